"""What passes cost on this machine, as the probe and chats tell it, makes its profile."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from cpuchat.config.settings import parse
from cpuchat.costs.model import N_PAST, CostProfile, ProductRate, compute_ceiling, pass_cost
from cpuchat.costs.usual import usual_profile
from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.hardware.topology import read_topology
from cpuchat.measure.peak import ReadBandwidth, keep
from cpuchat.models.costs import CostLog, factor_of
from cpuchat.models.gguf.header import read_model
from cpuchat.models.kernels import MeasuredProducts, ProductLog
from cpuchat.models.library import usage
from cpuchat.models.library.places import LocalModel
from cpuchat.models.machine import costs_here, reach_of, this_machine, usual_here
from cpuchat.models.prediction import estimate_local, predict
from cpuchat.models.synthetic.model import write_model
from cpuchat.models.traffic import model_work
from cpuchat.protocol.messages import LoadOptions
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import Timings
from tests.costs.made_up import decode_rate, probe, two_cores, work
from tests.models.library.test_usage import answer, info

pytestmark = pytest.mark.slow

CPUS = (0, 1)
TRUE = msgspec.structs.replace(two_cores(), l3_bytes=0.0)
START = usual_profile("zen4", 2, 36e9)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("costs") / "small.gguf", "0.05b", "Q8_0")


@pytest.fixture
def small(written: Path, tmp_path: Path) -> Path:
    (tmp_path / "small.gguf").hardlink_to(written)
    return tmp_path / "small.gguf"


def chatted(file: Path, true: CostProfile = TRUE, **changes: object) -> tuple[ModelInfo, Timings]:
    """Return what an answer of 200 tokens gives on a machine whose passes cost what `true` says."""
    known = model_work(read_model(file))
    passes = tuple(1e3 * pass_cost(true, known, n, 32).seconds for n in range(1, 33))
    model = info(file, fingerprint="f" * 32, cpus=CPUS, pass_ms=passes)
    rate = decode_rate(true, known, 100)
    return msgspec.structs.replace(model, **changes), answer(rate, n=201, n_past=200)


def factor(file: Path) -> float:
    """Return by how much longer the passes of a model take than by the profile."""
    return factor_of(CostLog(CPUS).costs(START).factors, file)


@pytest.mark.parametrize("disturbed", [False, True])
def test_before_a_probe_products_count_that_a_load_measured(disturbed: bool) -> None:
    start = usual_here(CPUS, 30e9)
    fast = ProductRate("Q4_K", ((1.0, 8e9), (64.0, 1e9)))
    slow = ProductRate("Q4_K", ((1.0, 4e9), (64.0, 1e9)))
    measured = MeasuredProducts(cpuchat=fast, llama_cpp=slow, disturbed=disturbed, made=time.time())
    ProductLog(CPUS).put({"Q4_K": measured})
    now = usual_here(CPUS, 30e9)
    assert now.product("Q4_K") == (start.product("Q4_K") if disturbed else fast)
    assert now.product("Q8_0") == start.product("Q8_0")


def test_other_cores_and_another_engine_have_other_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    CostLog(CPUS).probed(probe(TRUE))
    assert CostLog((0,)).costs(START)[:2] == (START, "")
    monkeypatch.setattr("cpuchat.models.costs.engine_fingerprint", lambda: "another")
    assert CostLog(CPUS).costs(START)[:2] == (START, "") and not costs_here(CPUS, "", 35e9).probed


def test_a_calibration_counts_until_an_answer_does(small: Path) -> None:
    CostLog(CPUS).probed(probe(TRUE))
    model, timings = chatted(small)
    drafted = msgspec.structs.replace(timings, draft_n=9)
    usage.answered(msgspec.structs.replace(model, pass_ms=()), drafted)  # not calibrated
    assert factor(small) == 1.0
    usage.answered(model, drafted)
    own = factor(small)
    assert own != 1.0
    usage.answered(model, msgspec.structs.replace(timings, predicted_ms=2 * timings.predicted_ms))
    assert factor(small) == pytest.approx(2 * own, rel=0.1)


def test_tiny_models_share_a_factor(small: Path, tmp_path: Path) -> None:
    """It tells of caches and overhead: two files of one model would differ by it for no reason that anybody sees."""
    CostLog(CPUS).probed(probe(TRUE))
    files = [write_model(tmp_path / f"{kind}.gguf", "tiny", kind) for kind in ("Q8_0", "Q4_0", "F16")]
    for number, file in enumerate(files[:2]):
        model, timings = chatted(file, fingerprint=str(number) * 32)
        usage.answered(model, msgspec.structs.replace(timings, predicted_ms=(2 + number) * timings.predicted_ms))
    assert factor(files[0]) == factor(files[1]) == factor(files[2]) > 1.5 and factor(small) == 1.0


@pytest.mark.parametrize("changes", [{"predicted_n": 64}, {"cpu_wait": 0.2}, {"draft_n": 1}], ids=str)
def test_only_long_quiet_answers_without_drafts_tell_what_decoding_costs(
    small: Path, changes: dict[str, object]
) -> None:
    model, timings = chatted(small, pass_ms=())
    usage.answered(model, msgspec.structs.replace(timings, **changes))
    assert not CostLog(CPUS).models
    usage.answered(model, timings)
    assert CostLog(CPUS).models


def test_what_stays_slower_replaces_what_was_faster(small: Path) -> None:
    model, timings = chatted(small, pass_ms=())
    ms = timings.predicted_ms
    slow = [msgspec.structs.replace(timings, predicted_ms=by * ms) for by in (1.6, 1.5, 1.7, 1.65, 1.62)]
    rates: list[float] = []
    for one in (timings, *slow[:4], timings, *slow):
        CostLog(CPUS).answered(model, one)
        (kept,) = CostLog(CPUS).models
        rates.append(1 / kept.answer.seconds)
    assert rates[-2] == pytest.approx(rates[0])  # four in a row are not enough, and a fast one ends them
    assert rates[-1] == pytest.approx(rates[0] / 1.5)


def test_a_model_that_is_slower_than_others_is_predicted_so(small: Path) -> None:
    cpus = choose_cores(read_topology(), "auto", 1).cpus
    keep(ReadBandwidth(cpus=cpus, bytes_per_s=42e9, rounds=(42e9,)))
    CostLog(cpus).probed(probe(TRUE))
    header, settings = read_model(small), parse("[engine]\nthreads = 1\n")
    before = predict(header, LoadOptions(), this_machine(settings))
    model, timings = chatted(small, pass_ms=(), cpus=cpus)
    usage.answered(model, msgspec.structs.replace(timings, predicted_ms=1.3 * timings.predicted_ms))
    after = predict(header, LoadOptions(), this_machine(settings))
    assert before.tok_s / after.tok_s == pytest.approx(1.3, rel=0.2)
    assert "by its own passes" in after.basis and "its own" not in before.basis
    local = LocalModel(path=small, name="s", source="folder", quantization="Q8_0", size=header.file_size)
    machine = this_machine(settings)
    other = msgspec.structs.replace(local, path=small.with_name("other.gguf"))
    ratio = estimate_local(other, machine).tok_s, estimate_local(local, machine).tok_s
    assert ratio[0] / ratio[1] == pytest.approx(1.3, rel=0.2)


def test_without_a_probe_large_models_tell_how_fast_others_are_and_small_ones_do_not(small: Path) -> None:
    """A pass of a small model costs more than reading: it reaches a small share of the bandwidth."""
    large, other = work("8b", "Q4_K_M"), work("3b", "Q8_0")
    model, timings = chatted(small, msgspec.structs.replace(START, layer_s=5e-4), pass_ms=())
    CostLog(CPUS).answered(model, timings)
    costs = CostLog(CPUS).costs(START)
    assert costs.profile == START and costs.source == "" and CostLog(CPUS).models
    slow = answer(decode_rate(START, large, 100) / 2, n=201, n_past=200)
    CostLog(CPUS).answered(msgspec.structs.replace(model, fingerprint="l" * 32, work=large), slow)
    profile, source, *_ = CostLog(CPUS).costs(START)
    assert source == "chats with 1 model"
    assert decode_rate(profile, other) == pytest.approx(decode_rate(START, other) / 2, rel=0.05)


def test_what_cores_compute_is_known_for_a_loaded_model_after_a_probe(small: Path) -> None:
    model, work = info(small, cpus=CPUS), model_work(read_model(small))
    keep(ReadBandwidth(cpus=CPUS, bytes_per_s=35e9, rounds=(35e9,)), "local")
    assert reach_of(model, "local").compute_tok_s == 0.0
    CostLog(CPUS, "local").probed(probe(TRUE))
    assert reach_of(model, "local").compute_tok_s == pytest.approx(compute_ceiling(TRUE, work, N_PAST), rel=0.35)
    before = reach_of(model, "local").compute_tok_s
    slower = answer(decode_rate(TRUE, work, 100) / 1.5, n=201, n_past=200)
    usage.answered(msgspec.structs.replace(model, fingerprint="f" * 32), slower, "local")
    assert reach_of(model, "local").compute_tok_s == pytest.approx(before / 1.5, rel=0.25)
    small.unlink()  # a loaded model answers without its file
    assert reach_of(model, "local").compute_tok_s > 0.0
