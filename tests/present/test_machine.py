"""Tests the machine in words: caches, clock, nodes, bars of bandwidth, and what a model lacks to its limit."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cpuchat.costs.model import PassCost, ProductRate
from cpuchat.hardware.diagnostics import DiagnosticFacts, gather_facts
from cpuchat.models.fit import MemoryNeed
from cpuchat.models.kernels import MeasuredProducts
from cpuchat.models.prediction import Prediction
from cpuchat.present.machine import (
    CpuUse,
    ModelHere,
    Now,
    about,
    bandwidth_bars,
    helping,
    how_known,
    kernel_chart,
    kernels_used,
    measured_anew,
    read_bandwidth,
    rows,
    speed_chart,
    token_time,
)
from cpuchat.protocol.messages import ModelLoaded
from cpuchat.protocol.model_info import BufferWeights, EngineInfo, LoadEvidence
from cpuchat.telemetry.machine import Peak, Peaks
from cpuchat.telemetry.meter import Meter
from cpuchat.telemetry.roofline import NO_LIMIT
from tests.hardware.trees import CPUS, make_tree
from tests.models.library.test_usage import info
from tests.support.meter_states import writing

Facts = Callable[[str], DiagnosticFacts]


@pytest.fixture
def facts(tmp_path: Path) -> Facts:
    def read(name: str) -> DiagnosticFacts:
        return gather_facts(refused=lambda _: "", counts=False, root=make_tree(tmp_path, name))

    return read


def test_the_screen_and_doctor_say_the_same_of_the_machine(facts: Facts) -> None:
    found = facts("2x-epyc-7543")
    of_page, of_screen = dict(about(found)), dict(rows(found, Now())[1])
    assert of_screen["caches"] == of_page["caches"] == "L2 1 MB per core · L3 32 MB per 4 cores, 512 MB in all"
    assert of_screen["clock"] == of_page["clock"]
    assert of_page["clock"] == "3.45–3.80 GHz now, 3.80 at most · governor performance · boost on"
    nodes = "0: 206 of 275 GB available, 1: 206 of 275 GB available · distance 32 (10: itself)"
    assert of_screen["nodes"] == of_page["nodes"] == nodes
    assert "nodes" not in dict(about(facts("hybrid-desktop")))


def test_kinds_of_cores_have_caches_of_their_own(facts: Facts) -> None:
    page = dict(about(facts("hybrid-desktop")))
    assert "8 of 12 cores in use, CPUs 0,2,4,6,8,10,12,14 · 8 performance + 4 efficient" in page["cores"]
    assert page["caches"] == "L2 1.25 MB per performance core, 1.25 MB per 4 efficient cores · L3 25 MB per 12 cores"
    assert not (gather_facts(counts=False, root=Path("/nowhere")).clock)


def test_bars_have_one_scale_and_fewer_cores_no_longer_one(facts: Facts) -> None:
    found = facts("epyc-9354")
    assert bandwidth_bars(found)[0] == [] and how_known(found, "press m") == "not measured: press m"
    cpus = tuple(range(32))
    peaks = Peaks(Peak(25e9, (0,)), Peak(310e9, cpus[:4], at_least=True), Peak(300e9, cpus))  # at other times
    bars, scale = bandwidth_bars(measured := replace(found, peaks=peaks), Now(traffic=(288e9, "umc")))
    assert [(one.name, one.rate / 1e9, one.note) for one in bars] == [
        ("1 core", 25, ""), ("1 L3 group", 300, "at least"), ("all 32 cores", 300, ""), ("now", 288, "umc"),
    ]  # fmt: skip
    assert scale == 460.8e9
    text = read_bandwidth(measured)
    assert "1 L3 group ≥300, all 32 cores 300 GB/s · 65 % of the theoretical peak" in text and "at least" not in text
    begun = replace(peaks, all_cores=Peak(310e9, cpus, at_least=True, unfinished=True))
    assert "of the theoretical peak · at least, not finished: m" in how_known(replace(found, peaks=begun), "m")
    estimate = replace(found, theoretical=None, peaks=Peaks(all_cores=Peak(2e11, cpus, estimated=True)))
    assert bandwidth_bars(estimate)[1] == 2e11 and "≈200 GB/s · estimated for 32 cores" in read_bandwidth(estimate)


MODEL = Prediction(
    need=MemoryNeed(10**9, 0, 0, 0), available=1, total_memory=1, bytes_per_token=10**9, tok_s=40.0, low_tok_s=40.0,
    limit_tok_s=50.0, cost=PassCost(fixed=0.001, read=0.020, compute=0.004),
)  # fmt: skip


def test_the_time_of_a_token_adds_up() -> None:
    for rate in (0.0, 49.0, 45.3, 25.0, 13.7, 3.3):
        takes, *parts = map(float, re.findall(r"[\d.]+", token_time(MODEL, rate)))
        assert takes == round(1e3 / (rate or 40.0), 1) and round(sum(parts), 1) == takes
    assert token_time(MODEL, 0) == "25.0 ms predicted = 20.0 at the limit + 4.0 computing + 1.0 between layers"
    assert token_time(MODEL, 25.0).endswith("1.0 between layers + 15.0 unexplained")
    assert token_time(MODEL, 50.0) == "20.0 ms = 20.0 at the limit"
    rough = msgspec.structs.replace(MODEL, low_tok_s=20.0)
    assert token_time(rough, 0) == token_time(rough, 25.0) == ""  # reading may be faster than is known
    assert token_time(msgspec.structs.replace(MODEL, limit_tok_s=None), 25.0) == ""


def test_the_speed_is_measured_else_predicted_and_drafts_stand_beside_it_with_their_gain(facts: Facts) -> None:
    rows = {"model": "a model", "limit": "50 tok/s", "per token": "25.0 ms"}

    def bars(here: ModelHere, **more: Any) -> list[tuple[str, str, str]]:
        chart = speed_chart(Now(here=here, **more))
        assert chart is not None
        return [(one.name, chart.figure(one).strip(), one.note) for one in chart.bars]

    assert bars(ModelHere(MODEL, rows)) == [("predicted", "≈40 tok/s", "80 % of the limit")]
    here = ModelHere(MODEL, rows, plain=45.0, drafted=63.0)
    plain = ("plain", "45.0 tok/s", "90 % of the limit")
    assert bars(here) == [plain, ("with drafts", "63.0 tok/s", "1.40× by drafts")]
    meter = Meter()
    for event in (ModelLoaded(model=info(Path("m.gguf"))), *writing(6)):
        meter.observe(event, 0.0)
    name, rate, note = bars(here, answered=meter.figures())[1]
    assert (name, rate.split()[1], note.split(" %")[1]) == ("this answer", "tok/s", " of the limit")
    assert bars(here, answered=meter.figures())[2][::2] == ("now", "")
    rough = ModelHere(msgspec.structs.replace(MODEL, low_tok_s=20.0, limit_tok_s=None), {"model": "another"})
    assert bars(rough) == [("predicted", "≈40 tok/s", "rough")]


def test_what_would_help_is_named(facts: Facts) -> None:
    rows = {"model": "a model", "limit": "50 tok/s", "per token": "25.0 ms"}
    here, machine = ModelHere(MODEL, rows, plain=45.0), facts("epyc-9354")
    rough = ModelHere(msgspec.structs.replace(MODEL, low_tok_s=20.0, limit_tok_s=None), {"model": "another"})
    busy = replace(machine, others=("cc1 (PID 7)", "ld (PID 8)"))
    first, second, *_ = helping(busy, Now(here=here))
    assert first == ("per token", "25.0 ms") and second == ("would help", "Stop cc1 (PID 7) and ld (PID 8).")
    known = replace(machine, peaks=Peaks(all_cores=Peak(300e9, tuple(range(32)))))
    quiet = Now(here=rough, cores={0: CpuUse()})
    assert helping(machine, quiet)[0][1].startswith("Measuring first: m")
    assert helping(known, quiet)[0][1].startswith("No setting of this machine: fewer bits per weight")
    cached = replace(rough, rows={"limit": NO_LIMIT})
    assert helping(known, replace(quiet, here=cached))[0][1].endswith(": a smaller model, or faster cores.")
    for unknown in (replace(quiet, busy=frozenset({0})), Now(here=rough)):  # who it is, or whether anyone is
        assert helping(known, unknown) == [("would help", "…")]


def test_a_token_beside_other_programs_tells_what_they_cost(facts: Facts) -> None:
    meter, machine = Meter(), facts("epyc-9354")
    slow = [msgspec.structs.replace(one, cpu_wait=0.6) for one in writing(6)]
    for event in (ModelLoaded(model=info(Path("m.gguf"))), *slow):
        meter.observe(event, 0.0)
    rate = meter.figures().decode_tok_s.value or 0.0
    for plain, how in ((0.0, "predicted"), (2 * rate, "measured")):
        here = ModelHere(msgspec.structs.replace(MODEL, tok_s=4 * rate), {"per token": "alone"}, plain)
        takes = dict(helping(machine, Now(here=here, answered=meter.figures())))["per token"]
        whole, alone, lost = map(float, re.findall(r"[\d.]+", takes))
        assert takes.endswith(f"{alone} {how} + {lost} lost to other programs") and whole == round(alone + lost, 1)


def test_a_measurement_says_who_ran_meanwhile() -> None:
    before = Peak(33e9, (0,))
    assert measured_anew(before, before, True) == "other programs ran: not better than the earlier 33 GB/s"
    for beside, least, how in ((True, False, "from quiet moments"), (True, True, "at least: other programs ran")):
        assert measured_anew(before, Peak(34e9, (0,), least), beside) == f"measured: 33 → 34 GB/s, {how}"


def test_the_clock_is_that_of_the_cores_that_compute(facts: Facts, tmp_path: Path) -> None:
    root = make_tree(tmp_path, "hybrid-desktop")
    (root / f"{CPUS}/cpu16/cpufreq/scaling_cur_freq").write_text("800000")
    assert gather_facts(refused=lambda _: "", counts=False, root=root).clock.low > 4_000_000


def test_the_sizes_beside_the_kernels_are_those_that_a_token_reads(tmp_path: Path) -> None:
    buffers = (("CPU_CPUCHAT", "q4_K", 626), ("CPU_Mapped", "q4_K", 131), ("CPU_REPACK", "q8_0", 354))
    weights = tuple(BufferWeights(buffer=name, type=kind, bytes=n * 10**6) for name, kind, n in buffers)
    model = info(tmp_path / "some.gguf", evidence=LoadEvidence(weights=weights))
    rates = ProductRate("Q4_K", ((1.0, 14e9),))
    one = MeasuredProducts(cpuchat=rates, llama_cpp=rates)
    noisy = msgspec.structs.replace(one, disturbed=True)
    products = {"Q4_K": one, "Q8_0": noisy, "Q5_0": one}  # the last: of another model
    found = kernel_chart("AVX2", products, Peak(12e9, (0,), at_least=True), model)
    assert [bar.note for bar in found.bars] == ["≈1.00× llama.cpp · 626 MB"]
    engine = EngineInfo(version="1", kernels="AVX2", features=("AVX2",))
    assert "cpuchat Q4_K 626 MB: 14 of 50 GB/s, ≈1.00× llama.cpp" in kernels_used(
        model, engine, products
    )  # as `why` says
    assert kernels_used(model, engine, products).endswith("llama.cpp Q8_0 354 MB; not measured yet: Q8_0")
    assert found.foot[0] == "╎ 12 GB/s read bandwidth, at least"
    assert found.foot[1].startswith("Q8_0 not measured yet without other programs")
    alone = kernel_chart("AVX2", {"Q4_K": one}, Peak(12e9, (0,)), model)
    assert alone.foot[-1] == "beyond ╎: L3 held what was measured"
    only = kernel_chart("AVX2", {"Q8_0": noisy}, Peak(12e9, (0,)), model)
    assert not only.bars and only.foot[-1].startswith("kernels for AVX2: Q8_0 not measured")
    assert "kernels for AVX2: nothing measured;" in kernel_chart("AVX2", {}, None, model).foot[0]
