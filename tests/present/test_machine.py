"""Tests the machine in words: caches, clock, nodes, bars of bandwidth, and what a model lacks to its limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cpuchat.costs.model import PassCost, ProductRate
from cpuchat.hardware.diagnostics import DiagnosticFacts, gather_facts
from cpuchat.models.fit import MemoryNeed
from cpuchat.models.kernels import MeasuredProducts
from cpuchat.models.prediction import Prediction
from cpuchat.present.machine import (
    ModelHere,
    Now,
    about,
    bandwidth_bars,
    helping,
    how_known,
    kernel_chart,
    missing,
    read_bandwidth,
    rows,
    speed_chart,
)
from cpuchat.protocol.model_info import BufferWeights, LoadEvidence
from cpuchat.telemetry.machine import Peak, Peaks
from tests.hardware.trees import CPUS, make_tree
from tests.models.library.test_usage import info

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
    assert "all 32 cores 300 GB/s · 65 % of the theoretical peak · at least, other programs ran" in text
    begun = replace(peaks, l3_group=Peak(310e9, cpus[:4], at_least=True, unfinished=True))
    assert "of the theoretical peak · at least, not finished: m" in how_known(replace(found, peaks=begun), "m")
    estimate = replace(found, theoretical=None, peaks=Peaks(all_cores=Peak(2e11, cpus, estimated=True)))
    assert bandwidth_bars(estimate)[1] == 2e11 and "≈200 GB/s · estimated for 32 cores" in read_bandwidth(estimate)


MODEL = Prediction(
    need=MemoryNeed(10**9, 0, 0, 0), available=1, total_memory=1, bytes_per_token=10**9, tok_s=40.0, low_tok_s=40.0,
    limit_tok_s=50.0, cost=PassCost(fixed=0.001, read=0.020, compute=0.004),
)  # fmt: skip


def test_what_is_missing_adds_up_to_the_time_of_a_token() -> None:
    model = MODEL
    assert missing(model, 0) == "20 %: a token takes 25.0 ms, 20.0 reading, 4.0 computing, 1.0 between layers"
    slow = missing(model, 25.0)
    assert slow.startswith("50 %: a token takes 40.0 ms, 20.0 reading, 4.0 computing, 1.0 between layers, 15.0 unexpl")
    assert missing(model, 49.8).startswith("nothing: only drafts")
    rough = msgspec.structs.replace(model, low_tok_s=20.0)
    assert missing(rough, 0) == missing(rough, 25.0) == ""  # reading may be faster than is known
    assert missing(msgspec.structs.replace(model, limit_tok_s=None), 25.0) == ""


def test_the_speed_stands_against_its_limit_with_what_would_help(facts: Facts) -> None:
    here = ModelHere(MODEL, {"model": "a model", "limit": "50 tok/s", "missing": "20 %"}, measured=45.0)
    chart = speed_chart(Now(here=here))
    assert chart is not None and (chart.heading, chart.peak) == ("speed of a model, not loaded", 50.0)
    assert [(one.name, chart.figure(one), one.note) for one in chart.bars] == [
        ("last chat", " 45.0 tok/s", "90 % of the limit"), ("predicted", " 40.0 tok/s", "80 % of the limit"),
    ]  # fmt: skip
    rough = ModelHere(msgspec.structs.replace(MODEL, low_tok_s=20.0, limit_tok_s=None), {"model": "another"})
    chart = speed_chart(Now(here=rough))
    assert chart is not None and [(one.note, one.estimated) for one in chart.bars] == [("rough", True)]
    machine = facts("epyc-9354")
    (_, first), *others = helping(machine, Now(here=here, busy=frozenset({1, 2})))
    assert first == "20 %" and others[0] == ("would help", "Stop other programs (see top): they keep 2 CPUs busy.")
    known = replace(machine, peaks=Peaks(all_cores=Peak(300e9, tuple(range(32)))))
    assert helping(machine, Now(here=rough))[0][1].startswith("Measuring first: m")
    assert helping(known, Now(here=rough))[0][1].startswith("No setting of this machine: fewer bits per weight")


def test_the_clock_is_that_of_the_cores_that_compute(facts: Facts, tmp_path: Path) -> None:
    root = make_tree(tmp_path, "hybrid-desktop")
    (root / f"{CPUS}/cpu16/cpufreq/scaling_cur_freq").write_text("800000")
    assert gather_facts(refused=lambda _: "", counts=False, root=root).clock.low > 4_000_000


def test_the_sizes_beside_the_kernels_are_those_that_a_token_reads(tmp_path: Path) -> None:
    buffers = (("CPU_CPUCHAT", "q4_K", 626), ("CPU_Mapped", "q4_K", 131), ("CPU_REPACK", "q8_0", 354))
    weights = tuple(BufferWeights(buffer=name, type=kind, bytes=n * 10**6) for name, kind, n in buffers)
    model = info(tmp_path / "some.gguf", evidence=LoadEvidence(weights=weights))
    rates = ProductRate("Q4_K", ((1.0, 14e9),))
    products = {"Q4_K": MeasuredProducts(cpuchat=rates, llama_cpp=rates, disturbed=True)}
    found = kernel_chart("AVX2", products, Peak(12e9, (0,), at_least=True), model)
    assert found.bars[0].note == "– · 626 MB"
    assert list(found.foot) == ["╎ 12 GB/s read bandwidth, at least", "░ at least: not measured undisturbed"]
    assert kernel_chart("AVX2", products, Peak(12e9, (0,)), model).foot[-1] == "beyond ╎: L3 held what was measured"
    assert "kernels for AVX2: no type" in kernel_chart("AVX2", {}, None, model).foot[0]
