"""What passes cost on this machine, as the probe and chats tell it, makes its profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from cpuchat.base import paths
from cpuchat.config.settings import parse
from cpuchat.costs.calibrations import Calibration, Calibrations, interpolate
from cpuchat.costs.model import ALIKE, CostProfile, compute_ceiling, pass_cost, usual_profile
from cpuchat.costs.observations import KNOTS, Observation
from cpuchat.hardware.bandwidth.read_bandwidth import ReadBandwidth, remember
from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.hardware.topology import read_topology
from cpuchat.models.costs import CostLog, factor_of
from cpuchat.models.gguf.header import read_model
from cpuchat.models.library.places import LocalModel
from cpuchat.models.library.usage import UsageLog
from cpuchat.models.machine import costs_here, reach_of, this_machine, usual_here
from cpuchat.models.prediction import estimate_local, predict
from cpuchat.models.synthetic.model import write_model
from cpuchat.models.traffic import N_PAST, model_work
from cpuchat.protocol.messages import LoadOptions
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import Timings
from tests.costs.made_up import decode_rate, probe, recorded_probe, two_cores, work
from tests.models.library.test_usage import answer, info

pytestmark = pytest.mark.slow

CPUS = (0, 1)
TRUE = two_cores()
START = usual_profile("zen3", 2, 30e9)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("costs") / "small.gguf", "0.05b", "Q8_0")


@pytest.fixture
def small(written: Path, tmp_path: Path) -> Path:
    (tmp_path / "small.gguf").hardlink_to(written)
    return tmp_path / "small.gguf"


def calibrated(model: ModelInfo, **changes: object) -> None:
    """Keep the calibrated passes of a model as the engine does."""
    costs = Calibration(model.pass_ms, target=model.fingerprint)
    Calibrations(paths.calibration_file()).save("k", msgspec.structs.replace(costs, **changes))


def chatted(file: Path, true: CostProfile = TRUE, **changes: object) -> tuple[ModelInfo, Timings]:
    """Return what an answer of 200 tokens gives on a machine whose passes cost what `true` says."""
    known = model_work(read_model(file))
    passes = tuple(1e3 * pass_cost(true, known, n, 32).seconds for n in range(1, 33))
    model = info(file, fingerprint="f" * 32, cpus=CPUS, pass_ms=passes)
    if "pass_ms" not in changes:
        calibrated(model)
    rate = decode_rate(true, known, 100)
    return msgspec.structs.replace(model, **changes), answer(rate, n=201, n_past=200)


def n_measured() -> int:
    """Return how many passes the profile is fitted to."""
    CostLog(CPUS).costs(START)
    fitted = CostLog(CPUS).read().fitted
    return fitted.n if fitted is not None else 0


def test_nothing_measured_leaves_what_is_usual() -> None:
    assert CostLog(CPUS).costs(START)[:2] == (START, "")


def test_a_probe_makes_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    CostLog(CPUS).probed(probe(two_cores()))
    profile, source = CostLog(CPUS).costs(START)[:2]
    assert source == "probe of 2 cores"
    for shape in ("1.5b", "30b-a3b"):
        model = work(shape, "Q4_K_M", 4)
        assert decode_rate(profile, model, 100) == pytest.approx(decode_rate(two_cores(), model, 100), rel=0.05)
    monkeypatch.setattr("cpuchat.costs.fit.fit", None)  # fitted once
    assert CostLog(CPUS).costs(START)[:2] == (profile, source)


def test_other_cores_have_other_costs() -> None:
    CostLog(CPUS).probed(probe(two_cores()))
    assert CostLog((0,)).costs(START)[:2] == (START, "")


@pytest.mark.parametrize(("name", "value"), [("engine_fingerprint", lambda: "another"), ("COST_MODEL", 999)])
def test_another_engine_or_cost_model_is_measured_anew_and_predicted_by_the_earlier_probe_until_then(
    name: str, value: object, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CostLog(CPUS, "local").probed(probe(two_cores()))
    UsageLog().answered(*chatted(small, msgspec.structs.replace(TRUE, pass_s=2e-3), pass_ms=()), "local")
    before, probed = costs_here(CPUS, "local", 35e9)
    assert probed and before.factors
    monkeypatch.setattr(f"cpuchat.models.costs.{name}", value)
    assert CostLog(CPUS, "local").costs(START)[:2] == (START, "")
    now, probed = costs_here(CPUS, "local", 35e9)
    assert (now.profile, now.factors, probed) == (before.profile, before.factors, False)
    assert "earlier engine" in now.source
    CostLog(CPUS, "local").probed(probe(two_cores()))
    assert costs_here(CPUS, "local", 35e9)[1]


def test_chats_teach_the_profile(small: Path) -> None:
    UsageLog().answered(*chatted(small))
    known = CostLog(CPUS).read()
    assert len(known.models) == 1
    profile, source = CostLog(CPUS).costs(START)[:2]
    assert n_measured() == 1 + sum(n <= 32 for n in KNOTS)
    assert source == "chats with 1 model"
    model = model_work(read_model(small))
    for n in (1, 8, 32):
        true, before, now = (pass_cost(one, model, n, 32).seconds for one in (TRUE, START, profile))
        assert abs(now / true - 1) < max(0.5 * abs(before / true - 1), 0.1)


def test_calibrated_passes_count_after_a_plain_chat_without_them(small: Path) -> None:
    model, timings = chatted(small)
    CostLog(CPUS).answered(msgspec.structs.replace(model, pass_ms=()), timings)
    CostLog(CPUS).answered(model, msgspec.structs.replace(timings, draft_n=9))
    assert n_measured() == 1 + sum(n <= 32 for n in KNOTS)


def test_a_calibration_counts_as_it_is_now(small: Path) -> None:
    model, timings = chatted(small)
    CostLog(CPUS).answered(model, timings)
    before = CostLog(CPUS).costs(START)
    calibrated(msgspec.structs.replace(model, pass_ms=tuple(1.5 * ms for ms in model.pass_ms)))
    assert CostLog(CPUS).costs(START) != before
    calibrated(model, disturbed=True)
    CostLog(CPUS).costs(START)
    assert n_measured() == 1


def test_passes_calibrated_in_another_way_do_not_count(small: Path) -> None:
    """On other cores, or under another memory policy."""
    model, timings = chatted(small)
    CostLog(CPUS).answered(msgspec.structs.replace(model, pass_ms=tuple(2 * ms for ms in model.pass_ms)), timings)
    assert n_measured() == 1


@pytest.mark.parametrize(
    "changes", [{"predicted_n": 64}, {"cpu_wait": 0.2}, {"cpu_wait": None}, {"draft_n": 1}], ids=str
)
def test_only_long_quiet_answers_without_drafts_tell_what_decoding_costs(
    small: Path, changes: dict[str, object]
) -> None:
    model, timings = chatted(small, pass_ms=())
    UsageLog().answered(model, msgspec.structs.replace(timings, **changes))
    assert not CostLog(CPUS).read().models
    UsageLog().answered(model, timings)
    assert CostLog(CPUS).read().models


def test_an_answer_beside_other_load_does_not_replace_a_faster_one(small: Path) -> None:
    model, timings = chatted(small, pass_ms=())
    for slower in (1.0, 3.0, 1.5):
        CostLog(CPUS).answered(model, msgspec.structs.replace(timings, predicted_ms=slower * timings.predicted_ms))
    (one,) = CostLog(CPUS).read().models.values()
    assert one.answer is not None and 1 / one.answer.seconds == pytest.approx(timings.predicted_per_second)


def test_what_stays_slower_replaces_what_was_faster(small: Path) -> None:
    model, timings = chatted(small, pass_ms=())
    ms = timings.predicted_ms
    slow = [msgspec.structs.replace(timings, predicted_ms=by * ms) for by in (1.6, 1.5, 1.7, 1.65, 1.62)]
    rates: list[float] = []
    for one in (timings, *slow[:4], timings, *slow):
        CostLog(CPUS).answered(model, one)
        (kept,) = CostLog(CPUS).read().models.values()
        assert kept.answer is not None
        rates.append(1 / kept.answer.seconds)
    assert rates[-2] == pytest.approx(rates[0])  # four in a row are not enough, and a fast one ends them
    assert rates[-1] == pytest.approx(rates[0] / 1.5)


def test_a_model_that_is_slower_than_others_is_predicted_so(small: Path) -> None:
    cpus = choose_cores(read_topology(), "auto", 1).cpus
    remember(ReadBandwidth(cpus=cpus, bytes_per_s=25e9, rounds=(25e9,)))
    CostLog(cpus).probed(probe(two_cores()))
    header, settings = read_model(small), parse("[engine]\nthreads = 1\n")
    before = predict(header, LoadOptions(), this_machine(settings))
    model, timings = chatted(small, pass_ms=(), cpus=cpus)
    UsageLog().answered(model, msgspec.structs.replace(timings, predicted_ms=1.3 * timings.predicted_ms))
    after = predict(header, LoadOptions(), this_machine(settings))
    assert before.tok_s is not None and after.tok_s is not None
    assert before.tok_s / after.tok_s == pytest.approx(1.3, rel=0.1)
    assert "in your chats with it" in after.basis and "your chats" not in before.basis
    local = LocalModel(path=small, name="s", source="folder", quantization="Q8_0", size=header.file_size)
    machine = this_machine(settings)
    other = msgspec.structs.replace(local, path=small.with_name("other.gguf"))
    ratio = estimate_local(other, machine).tok_s, estimate_local(local, machine).tok_s
    assert ratio[0] is not None and ratio[1] is not None
    assert ratio[0] / ratio[1] == pytest.approx(1.3, rel=0.1)


def test_a_tiny_model_is_predicted_by_what_its_tokens_took() -> None:
    """After one short chat the list promised 3,052 tok/s for the demo model, which writes 1,900 to 2,450."""
    demo = paths.demo_dir() / "cpuchat-demo-8m-q8_0.gguf"
    remember(ReadBandwidth(cpus=CPUS, bytes_per_s=23.4e9, rounds=(23.4e9,)))
    CostLog(CPUS).probed(recorded_probe())
    passes = {1: 0.3386, 2: 0.8197, 4: 0.8922, 5: 0.9441, 8: 1.4063, 12: 1.7050, 16: 2.2125, 32: 4.6564}
    model = info(demo, fingerprint="d" * 32, cpus=CPUS, pass_ms=interpolate(passes))
    calibrated(model)

    def predicted(n_past: int = N_PAST) -> float:
        costs, _ = costs_here(CPUS, "", 23.4e9)
        return decode_rate(costs.profile, model_work(read_model(demo)), n_past) / factor_of(costs.factors, demo)

    UsageLog().answered(model, answer(2_180.0, n=40, n_past=120, overhead_us=32.0))  # too short for its own speed
    assert 1_900 < predicted() < 2_700
    UsageLog().answered(model, answer(2_180.0, n=201, n_past=300, overhead_us=32.0))
    assert predicted(200) == pytest.approx(2_180, rel=0.01)
    assert 1_600 < predicted() < 2_180


@pytest.mark.parametrize("changes", [{"type_k": "q8_0", "type_v": "q8_0"}, {"flash_attn": "off"}], ids=str)
def test_a_chat_counts_with_the_cache_and_the_attention_that_were_loaded(small: Path, changes: dict[str, Any]) -> None:
    work = model_work(read_model(small), LoadOptions(**changes))
    model, timings = chatted(small, pass_ms=(), work=msgspec.structs.replace(work, alike=ALIKE))
    UsageLog().answered(model, timings)
    (one,) = CostLog(CPUS).read().models.values()
    assert one.work == work != model_work(read_model(small))


def test_other_cores_are_scaled_from_the_probe_that_shares_most_with_them() -> None:
    """Tuning may choose fewer cores than the probe measured."""
    topology = read_topology()
    cpus = choose_cores(topology, "auto").cpus
    if len(cpus) < 2:
        pytest.skip("needs two cores")
    one, every = cpus[:1], cpus
    CostLog(every, "local").probed(probe(two_cores()))
    CostLog((9_998, 9_999), "local").probed(probe(two_cores()))
    remember(ReadBandwidth(cpus=every, bytes_per_s=30e9, rounds=(30e9,)), "local")
    costs, probed = costs_here(one, "local", 15e9)
    whole, _ = costs_here(every, "local", 30e9)
    assert probed and costs.source == f"probe of {len(every)} cores, scaled to 1"
    large = work("8b", "Q4_K_M")
    halved = decode_rate(costs.profile, large) / decode_rate(whole.profile, large)
    assert halved == pytest.approx(0.5, rel=0.1)
    assert compute_ceiling(costs.profile, large) == pytest.approx(compute_ceiling(whole.profile, large) / len(every))


def test_a_disturbed_chat_with_a_small_model_changes_no_other_prediction(small: Path) -> None:
    """After a chat at 41 % of its speed with a small model, a list promised half the true speed for all others."""
    CostLog(CPUS).probed(probe(two_cores()))
    large = work("8b", "Q4_K_M")
    before = decode_rate(CostLog(CPUS).costs(START).profile, large, 500)
    model, timings = chatted(small, pass_ms=())
    UsageLog().answered(model, msgspec.structs.replace(timings, predicted_ms=timings.predicted_ms / 0.41))
    assert decode_rate(CostLog(CPUS).costs(START).profile, large, 500) == pytest.approx(before, rel=0.03)


def test_without_a_probe_too_a_small_model_says_little_about_a_large_one(small: Path) -> None:
    """A pass of a small model costs more than reading: it reaches a small share of the bandwidth."""
    true = msgspec.structs.replace(START, pass_s=3e-3, layer_s=5e-4)
    large = work("8b", "Q4_K_M")
    before = decode_rate(START, large, 500)
    UsageLog().answered(*chatted(small, true))
    profile, _ = CostLog(CPUS).costs(START)[:2]
    assert decode_rate(profile, large, 500) == pytest.approx(before, rel=0.15)
    model = model_work(read_model(small))
    assert decode_rate(profile, model, 100) < 0.6 * decode_rate(START, model, 100)


def test_this_machine_is_predicted_by_its_probe() -> None:
    cpus = choose_cores(read_topology(), "auto", 1).cpus
    remember(ReadBandwidth(cpus=cpus, bytes_per_s=25e9, rounds=(25e9,)))
    CostLog(cpus).probed(probe(two_cores()))
    machine = this_machine(parse("[engine]\nthreads = 1\n"))
    assert machine.source == "probe of 1 core"
    assert machine.profile is not None
    model = work("1.5b")
    assert decode_rate(machine.profile, model) == pytest.approx(decode_rate(two_cores(), model), rel=0.1)
    assert CostLog(cpus).costs(usual_here(cpus, 25e9)).profile == machine.profile


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 1, "entries": {"a": 3}}'])
def test_a_damaged_file_counts_as_empty_and_is_replaced(content: bytes) -> None:
    paths.costs_file().parent.mkdir(parents=True)
    paths.costs_file().write_bytes(content)
    assert CostLog(CPUS).costs(START)[:2] == (START, "")
    CostLog(CPUS).probed([Observation(work=work("tiny"), n_tokens=1, seconds=1e-3)])
    assert len(CostLog(CPUS).read().probe) == 1


def test_what_cores_compute_is_known_for_a_loaded_model_after_a_probe(small: Path) -> None:
    model, work = info(small, cpus=CPUS), model_work(read_model(small))
    remember(ReadBandwidth(cpus=CPUS, bytes_per_s=35e9, rounds=(35e9,)), "local")
    assert reach_of(model, "local").compute_tok_s == 0.0
    CostLog(CPUS, "local").probed(probe(two_cores()))
    assert reach_of(model, "local").compute_tok_s == pytest.approx(compute_ceiling(two_cores(), work, N_PAST), rel=0.35)
    before = reach_of(model, "local").compute_tok_s
    slower = answer(decode_rate(two_cores(), work, 100) / 1.5, n=201, n_past=200)
    UsageLog().answered(msgspec.structs.replace(model, fingerprint="f" * 32), slower, "local")
    assert reach_of(model, "local").compute_tok_s == pytest.approx(before / 1.5, rel=0.15)
    small.unlink()  # a loaded model answers without its file
    assert reach_of(model, "local").compute_tok_s > 0.0
