"""Tests the predicted speed of placements, on a simulated server and on this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from cpuchat.config.settings import Settings
from cpuchat.costs.calibrations import TargetCosts
from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.hardware.topology import Topology, read_topology
from cpuchat.measure.peak import ReadBandwidth, keep
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
from cpuchat.telemetry.machine import NO_PEAKS
from cpuchat.telemetry.meter import ChatFigures, Meter
from cpuchat.telemetry.metric import Metric
from cpuchat.telemetry.speculation import DraftingFigures
from cpuchat.tune.candidates import LoadedCosts, PlacementOptions, compare_placements, loaded_costs
from tests.costs.made_up import decode_rate, probe, two_cores, work
from tests.hardware.trees import make_tree
from tests.models.library.test_usage import info
from tests.support.machines import ON_8_CORES, WITH_DRAFT, on, surveyed

TARGET = work("1.5b", "Q8_0")


@pytest.fixture
def server(tmp_path: Path) -> Topology:
    return read_topology(make_tree(tmp_path, "epyc-9354"))


def costs(topology: Topology, **more: object) -> LoadedCosts:
    cpus = on(topology).cpus
    return LoadedCosts(two_cores(), "probe of 32 cores", cpus, TARGET, 378e9, **more)  # type: ignore[arg-type]


@pytest.fixture
def small_model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "small.gguf", "0.05b", "Q8_0")


def figures(drafting: bool = True) -> ChatFigures:
    return dataclasses.replace(Meter().figures(), drafting=DraftingFigures(wanted=drafting))


@pytest.mark.parametrize(
    ("model", "words"), [(None, "No model is loaded"), (ON_8_CORES, "This machine is not measured")]
)
def test_nothing_is_predicted_from_nothing(server: Topology, model: ModelInfo | None, words: str) -> None:
    found = compare_placements(server, NO_PEAKS, model, figures(), PlacementSpec())
    assert all(choice.predicted == 0 and choice.speed in ("", "needs draft") for choice in found.options)
    assert words in found.options[0].about and found.recommended is found.options[0]


def test_what_is_in_use_keeps_its_words_and_cores_for_a_draft_need_one(server: Topology) -> None:
    found = compare_placements(server, NO_PEAKS, on(server), figures(), PlacementSpec(cores="all"), costs(server))
    assert found.options[0].spec == PlacementSpec(cores="all") and found.advice == ""
    own = next(one for one in found.options if one.spec.draft_cores == "l3:7")
    assert (own.predicted, own.speed) == (0.0, "needs draft") and "none is loaded" in own.about


def test_after_a_measurement_the_cost_model_predicts_each_placement(server: Topology) -> None:
    def found(model: ModelInfo, in_use: PlacementSpec, costs: LoadedCosts, wanted: bool = True) -> PlacementOptions:
        return compare_placements(server, surveyed(server), model, figures(wanted), in_use, costs)

    plain = costs(server, factor=1.25)
    options = found(on(server), PlacementSpec(), plain).options
    everywhere, fewer = options[0], next(one for one in options if one.spec.cores == "2/l3")
    assert everywhere.predicted == pytest.approx(decode_rate(two_cores(), TARGET, N_PAST) / 1.25)
    assert 0 < fewer.predicted < everywhere.predicted  # 97 % of the bandwidth, half of the cores
    assert everywhere.speed == f"≈ {units.rate(everywhere.predicted)} tok/s"
    assert "probe of 32 cores" in everywhere.about
    drafting = dataclasses.replace(plain, draft=work("0.5b"))
    with_draft = found(on(server, WITH_DRAFT), PlacementSpec(draft_cores="l3:7"), drafting)
    assert "70 % assumed acceptance" in with_draft.options[0].about
    apart = next(one for one in with_draft.options if one.spec.draft_cores == "l3:7")
    assert 0 < apart.predicted < with_draft.options[0].predicted
    assert "is predicted" in with_draft.advice
    off = found(on(server, WITH_DRAFT), PlacementSpec(), drafting, wanted=False).options[0]
    assert off.predicted == pytest.approx(everywhere.predicted)
    assert "drafting is off" in off.about and "acceptance" not in off.about


def test_predictions_do_not_exceed_what_was_measured_in_the_placement_in_use(server: Topology) -> None:
    def after(tok_s: float | None, n: int = 40, disturbed: bool = False) -> PlacementOptions:
        drafting = DraftingFigures(counts=SpeculationFigures(disturbed=disturbed))
        answered = dataclasses.replace(
            figures(), decode_tok_s=Metric.of(tok_s, "no answer yet"), predicted_n=n, drafting=drafting
        )
        return compare_placements(server, surveyed(server), on(server), answered, PlacementSpec(), costs(server))

    before = after(None).options
    slower = after(0.75 * before[0].predicted).options
    assert slower[0].predicted == pytest.approx(0.75 * before[0].predicted)
    for one, other in zip(slower, before, strict=True):
        assert one.predicted <= other.predicted
        assert ("scaled to the last answer" in one.about) == bool(one.predicted)
    for same in (after(2 * before[0].predicted), after(1.0, n=15), after(1.0, disturbed=True)):
        assert [one.predicted for one in same.options] == [one.predicted for one in before]
        assert not any("scaled" in one.about for one in same.options)


def test_the_lists_and_the_hardware_screen_predict_the_same(small_model: Path, tmp_path: Path) -> None:
    header, topology = read_model(small_model), read_topology()
    cpus = choose_cores(topology).cpus
    keep(ReadBandwidth(cpus=cpus, bytes_per_s=25e9, rounds=(25e9,)), "local")
    CostLog(cpus, "local").probed(probe(two_cores()))
    model = info(small_model, cpus=cpus, peak_read=0.0)
    listed = predict(header, LoadOptions(), this_machine(Settings())).tok_s
    measured = loaded_costs(model, "local")
    options = compare_placements(topology, NO_PEAKS, model, figures(), PlacementSpec(), measured).options
    assert listed is not None and options[0].predicted == pytest.approx(listed)
    small_draft = write_model(tmp_path / "draft.gguf", "tiny", "Q8_0")
    pair = msgspec.structs.replace(
        model, draft="draft", draft_path=str(small_draft), draft_work=model_work(read_model(small_draft)),
        pass_ms=tuple(10 + 0.5 * n for n in range(32)),
    )  # fmt: skip
    drafted = (DrafterCount(name="draft", draft_n=500, draft_n_accepted=400),)
    right = DraftingFigures(wanted=True, counts=SpeculationFigures(by_drafter=drafted, by_position=((500, 400),)))
    now = dataclasses.replace(figures(), drafting=right)
    measured = loaded_costs(pair, "local")
    options = compare_placements(topology, NO_PEAKS, pair, now, PlacementSpec(), measured).options
    gains = expected_pair(
        header, read_model(small_draft), TargetCosts(pass_ms=pair.pass_ms), this_machine(Settings())
    ).gains
    (code,) = (one for one in gains if one.acceptance == 0.8)
    assert code.speedup > 1.5 and options[0].predicted == pytest.approx(listed * code.speedup)
