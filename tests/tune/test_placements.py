from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from cpuchat.config.settings import Settings
from cpuchat.costs.calibrations import TargetCosts
from cpuchat.hardware.bandwidth.read_bandwidth import ReadBandwidth, remember
from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.hardware.topology import read_topology
from cpuchat.models.costs import CostLog
from cpuchat.models.drafts.candidates import expected_pair
from cpuchat.models.gguf.header import read_model
from cpuchat.models.machine import this_machine
from cpuchat.models.prediction import predict
from cpuchat.models.synthetic.model import write_model
from cpuchat.models.traffic import N_PAST, model_work
from cpuchat.protocol.messages import LoadOptions
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import DrafterCount, SpeculationFigures
from cpuchat.telemetry import units
from cpuchat.telemetry.meter import ChatFigures, Meter
from cpuchat.telemetry.metric import Metric
from cpuchat.telemetry.roofline import Roofline
from cpuchat.telemetry.speculation import DraftingFigures
from cpuchat.tune.candidates import LoadedCosts, PlacementOption, PlacementOptions, compare_placements, loaded_costs
from tests.costs.made_up import decode_rate, probe, two_cores, work
from tests.hardware.trees import make_tree
from tests.models.library.test_usage import info
from tests.support.machines import ON_8_CORES, WITH_DRAFT, WORK, on, surveyed


@pytest.fixture
def small_model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "small.gguf", "0.05b", "Q8_0")


def figures(drafting: bool = True) -> ChatFigures:
    return dataclasses.replace(Meter().figures(), drafting=DraftingFigures(wanted=drafting))


def options(
    tmp_path: Path, model: ModelInfo | None, in_use: PlacementSpec | None = None, known: bool = True
) -> PlacementOptions:
    topology = read_topology(make_tree(tmp_path, "epyc-9354"))
    return compare_placements(
        topology,
        surveyed(topology) if known else None,
        None,
        on(topology, model) if model is not None else None,
        figures(),
        in_use or PlacementSpec(),
    )


def test_without_a_draft_the_speed_is_bandwidth_by_bytes(tmp_path: Path) -> None:
    first = options(tmp_path, ON_8_CORES).options[0]
    assert first.ceiling is not None
    kv = WORK.attention[0]
    context = 256 * -(-(N_PAST + 1) // 256)  # llama.cpp reads its cache in steps
    assert first.ceiling.tok_s == pytest.approx(367e9 / (WORK.weight_bytes + context * kv.nbytes), rel=0.01)
    assert first.recommended


def test_a_prediction_by_bandwidth_says_so_where_compute_is_the_limit(tmp_path: Path) -> None:
    topology = read_topology(make_tree(tmp_path, "epyc-9354"))
    now = dataclasses.replace(figures(), roofline=Roofline(limit="compute"))
    found = compare_placements(topology, surveyed(topology), None, on(topology, ON_8_CORES), now, PlacementSpec())
    assert "compute is the limit now" in found.options[0].about
    assert "compute" not in options(tmp_path / "other", ON_8_CORES).options[0].about


def test_of_weights_that_fit_the_cache_no_speed_by_bandwidth_is_told(tmp_path: Path) -> None:
    cached = msgspec.structs.replace(ON_8_CORES, cache_bytes=2 * round(WORK.weight_bytes))
    for choice in options(tmp_path, cached).options:
        assert choice.ceiling is None
        assert "Limit" not in choice.about and "tok/s" not in choice.speed
    assert "fit in the L3 cache" in options(tmp_path / "again", cached).options[0].about


def test_layouts_with_cores_for_a_draft_need_one(tmp_path: Path) -> None:
    choice = next(c for c in options(tmp_path, ON_8_CORES).options if c.spec.draft_cores == "l3:7")
    assert choice.ceiling is None
    assert "none is loaded" in choice.about


def test_a_draft_on_one_l3_group_is_predicted_slower_and_why(tmp_path: Path) -> None:
    found = options(tmp_path, WITH_DRAFT, PlacementSpec(draft_cores="l3:7"))
    sequential, apart = found.options[0], next(c for c in found.options if c.spec.draft_cores == "l3:7")
    assert sequential.ceiling and apart.ceiling
    assert sequential.ceiling.tok_s > 3 * apart.ceiling.tok_s
    assert "does not fit the L3" in apart.about
    assert "that of now" in found.advice


def test_what_is_in_use_keeps_its_words(tmp_path: Path) -> None:
    found = options(tmp_path, ON_8_CORES, PlacementSpec(cores="all"))
    assert found.options[0].spec == PlacementSpec(cores="all")
    assert found.advice == ""


@pytest.mark.parametrize("model", [None, ON_8_CORES], ids=["no model", "not measured"])
def test_nothing_is_predicted_from_nothing(tmp_path: Path, model: ModelInfo | None) -> None:
    found = options(tmp_path, model, known=False)
    assert all(choice.ceiling is None and choice.speed in ("", "needs draft") for choice in found.options)
    assert "no speed is predicted" in found.options[0].about


def test_after_a_measurement_the_cost_model_predicts_each_placement(tmp_path: Path) -> None:
    topology = read_topology(make_tree(tmp_path, "epyc-9354"))
    model, target = on(topology, ON_8_CORES), work("1.5b", "Q8_0")
    costs = LoadedCosts(two_cores(), "probe of 32 cores", model.cpus, target, 1.25)

    def found(model: ModelInfo, in_use: PlacementSpec, costs: LoadedCosts, wanted: bool = True) -> PlacementOptions:
        return compare_placements(topology, surveyed(topology), None, model, figures(wanted), in_use, costs)

    options = found(model, PlacementSpec(), costs).options
    everywhere, fewer = options[0], next(one for one in options if one.spec.cores == "2/l3")
    assert everywhere.predicted == pytest.approx(decode_rate(two_cores(), target, N_PAST) / 1.25)
    assert 0 < fewer.predicted < everywhere.predicted  # 97 % of the bandwidth, half of the cores
    assert everywhere.speed == f"≈ {units.rate(everywhere.predicted)} tok/s"
    assert "probe of 32 cores" in everywhere.about
    drafting = dataclasses.replace(costs, draft=work("0.5b"))
    with_draft = found(on(topology, WITH_DRAFT), PlacementSpec(draft_cores="l3:7"), drafting)
    assert "70 % acceptance" in with_draft.options[0].about
    apart = next(one for one in with_draft.options if one.spec.draft_cores == "l3:7")
    assert 0 < apart.predicted < with_draft.options[0].predicted
    assert "is predicted" in with_draft.advice
    off = found(on(topology, WITH_DRAFT), PlacementSpec(), drafting, wanted=False).options[0]
    assert off.predicted == pytest.approx(everywhere.predicted)
    assert "drafting is off" in off.about and "acceptance" not in off.about


def test_predictions_do_not_exceed_what_was_measured_in_the_placement_in_use(tmp_path: Path) -> None:
    topology = read_topology(make_tree(tmp_path, "epyc-9354"))
    model = on(topology, ON_8_CORES)
    costs = LoadedCosts(two_cores(), "probe of 32 cores", model.cpus, work("1.5b", "Q8_0"))

    def after(tok_s: float | None, n: int = 40, disturbed: bool = False) -> PlacementOptions:
        drafting = DraftingFigures(counts=SpeculationFigures(disturbed=disturbed))
        answered = dataclasses.replace(
            figures(), decode_tok_s=Metric.of(tok_s, "no answer yet"), predicted_n=n, drafting=drafting
        )
        return compare_placements(topology, surveyed(topology), None, model, answered, PlacementSpec(), costs)

    before = after(None).options
    slower = after(0.75 * before[0].predicted).options
    assert slower[0].predicted == pytest.approx(0.75 * before[0].predicted)
    for one, other in zip(slower, before, strict=True):
        assert one.predicted <= other.predicted
        assert ("scaled to the last answer" in one.about) == bool(one.predicted)
    for same in (after(2 * before[0].predicted), after(1.0, n=15), after(1.0, disturbed=True)):
        assert [one.predicted for one in same.options] == [one.predicted for one in before]
        assert not any("scaled" in one.about for one in same.options)


def test_a_ceiling_below_what_was_predicted_or_measured_is_not_shown(tmp_path: Path) -> None:
    topology = read_topology(make_tree(tmp_path, "epyc-9354"))
    model = on(topology, ON_8_CORES)

    def in_use(tok_s: float) -> PlacementOption:
        answered = dataclasses.replace(figures(), decode_tok_s=Metric(tok_s), predicted_n=40)
        return compare_placements(topology, surveyed(topology), None, model, answered, PlacementSpec()).options[0]

    most = in_use(1.0).ceiling
    assert most is not None and "Memory bandwidth allows" in in_use(1.0).about
    faster = in_use(1.2 * most.tok_s)
    assert faster.ceiling is None and "Memory bandwidth allows" not in faster.about


def test_the_lists_and_the_hardware_screen_predict_the_same(small_model: Path, tmp_path: Path) -> None:
    header, topology = read_model(small_model), read_topology()
    cpus = choose_cores(topology).cpus
    remember(ReadBandwidth(cpus=cpus, bytes_per_s=25e9, rounds=(25e9,)), "local")
    CostLog(cpus, "local").probed(probe(two_cores()))
    model = info(small_model, cpus=cpus, peak_read=0.0)
    listed = predict(header, LoadOptions(), this_machine(Settings())).tok_s
    costs = loaded_costs(model, "local")
    options = compare_placements(topology, None, None, model, figures(), PlacementSpec(), costs).options
    assert listed is not None and options[0].predicted == pytest.approx(listed)
    small_draft = write_model(tmp_path / "draft.gguf", "tiny", "Q8_0")
    pair = msgspec.structs.replace(
        model, draft="draft", draft_path=str(small_draft), draft_work=model_work(read_model(small_draft)),
        pass_ms=tuple(10 + 0.5 * n for n in range(32)),
    )  # fmt: skip
    drafted = (DrafterCount(name="draft", draft_n=500, draft_n_accepted=400),)
    right = DraftingFigures(wanted=True, counts=SpeculationFigures(by_drafter=drafted, by_position=((500, 400),)))
    now = dataclasses.replace(figures(), drafting=right)
    costs = loaded_costs(pair, "local")
    options = compare_placements(topology, None, None, pair, now, PlacementSpec(), costs).options
    gains = expected_pair(
        header, read_model(small_draft), TargetCosts(pass_ms=pair.pass_ms), this_machine(Settings())
    ).gains
    (code,) = (one for one in gains if one.acceptance == 0.8)
    assert code.speedup > 1.5 and options[0].predicted == pytest.approx(listed * code.speedup)


def test_weights_in_the_cache_are_predicted_without_a_ceiling(tmp_path: Path) -> None:
    topology = read_topology(make_tree(tmp_path, "epyc-9354"))
    model = msgspec.structs.replace(on(topology, ON_8_CORES), cache_bytes=2 * round(WORK.weight_bytes))
    costs = LoadedCosts(two_cores(), "probe of 32 cores", model.cpus, work("1.5b", "Q8_0"))
    found = compare_placements(topology, surveyed(topology), None, model, figures(), PlacementSpec("2/l3"), costs)
    first = found.options[0]
    assert first.ceiling is None and first.predicted and first.speed.startswith("≈")
    assert "probe of 32 cores" in first.about and "At most" not in first.about
    assert "is predicted" in found.advice
