"""Tests measuring the demo model's two files against each other, with the real process and the real engine."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from cpuchat.base.errors import MeasureFailed
from cpuchat.base.line_process import LineProcess
from cpuchat.base.paths import demo_dir
from cpuchat.hardware.placement.placement import Placement, place
from cpuchat.hardware.topology import read_topology
from cpuchat.protocol.messages import Message
from cpuchat.quality.measure import QualityMeasurement, QualityProgress
from cpuchat.quality.messages import Text
from cpuchat.quality.texts import prose
from tests.support.cores import ON_ONE_CPU

Q8, Q4 = (demo_dir() / f"cpuchat-demo-8m-{kind}.gguf" for kind in ("q8_0", "q4_k_m"))
PROSE = "cpuchat reads the weights of the model for every token, so the memory bandwidth sets the pace. " * 30
TEXTS = (
    Text(kind="prose", content=PROSE),
    Text(
        kind="dialogue",
        dialogues=((Message(role="user", content="What is a draft model?"), Message(role="assistant", content=PROSE)),),
    ),
)


def measurement(*others: Path, texts: tuple[Text, ...] = TEXTS) -> QualityMeasurement:
    return QualityMeasurement(Q8, others or (Q4,), texts, n_ctx=256)


@pytest.fixture(scope="module")
def here() -> Placement:
    return place(read_topology(), ON_ONE_CPU)


@pytest.fixture(scope="module")
def whole(here: Placement, tmp_path_factory: pytest.TempPathFactory) -> QualityMeasurement:
    """A measurement that ran to its end."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("CONFIG", "DATA", "CACHE"):
            patch.setenv(f"CPUCHAT_{kind}_DIR", str(tmp_path_factory.getbasetemp() / "whole"))
        found = measurement()
        asyncio.run(found.run(here))
    return found


async def test_a_file_against_itself_loses_nothing_and_a_smaller_one_little(here: Placement, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(Q8.read_bytes())
    found = measurement(copy, Q4)
    await found.run(here)
    same, smaller = (one.summary() for one in found.comparisons)
    assert same.kld.value == pytest.approx(0, abs=1e-6) and same.same_top.value == 1
    assert same.n == smaller.n == 127 * len(found.progress.kinds)
    assert 1e-5 < smaller.kld.value < 0.5 and smaller.same_top.value > 0.7
    assert smaller.ppl_base == pytest.approx(same.ppl_base)
    assert {kind for kind, _ in found.by_kind(found.comparisons[1])} == {"prose", "dialogue"}
    assert found.comparisons[0].worst == []
    worst = found.comparisons[1].worst
    assert worst == sorted(worst, key=lambda one: -one.kld) and len(worst) <= 10
    assert all(one.base_top != one.other_top and 0 < one.base_p <= 1 for one in worst)


async def test_a_killed_process_keeps_what_it_measured_and_the_next_run_resumes(
    here: Placement, whole: QualityMeasurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[LineProcess] = []
    enter = LineProcess.__aenter__

    async def entered(self: LineProcess) -> LineProcess:
        processes.append(self)
        return await enter(self)

    monkeypatch.setattr(LineProcess, "__aenter__", entered)
    killed = measurement()

    def kill(progress: QualityProgress) -> None:
        pid = processes[-1].pid
        if progress.done == 2 and pid is not None:
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(MeasureFailed, match="killed"):
        await killed.run(here, kill)
    measured = set(killed.comparisons[0].windows)
    assert 2 <= len(measured) < whole.progress.total

    resumed = measurement()
    assert set(resumed.comparisons[0].windows) == measured
    new: list[int] = []
    await resumed.run(here, lambda progress: new.append(progress.done))
    assert resumed.comparisons[0].summary() == whole.comparisons[0].summary()
    assert min(new[-(whole.progress.total - len(measured)) :]) > len(measured) - 1


async def test_figures_are_llama_perplexitys(here: Placement) -> None:
    """Recorded with llama.cpp of the pinned engine, whose 16-bit storage clips only PPL(base) of this toy:

    llama-perplexity -m Q8 -f text -c 256 -t 2 --kl-divergence-base b.kld
    llama-perplexity -m Q4 -c 256 -t 2 --kl-divergence-base b.kld --kl-divergence"""
    found = measurement(texts=(Text(kind="text", content=prose()[:12_000]),))
    await found.run(here)
    summary = found.comparisons[0].summary()
    assert summary is not None and summary.n == 14 * 127
    assert summary.ppl_base == pytest.approx(52645.8, rel=0.05)
    assert summary.ppl_other == pytest.approx(52255.1, rel=0.05)
    # The kernels of other CPUs round otherwise: without AVX-512 the median is 3.1 % lower.
    assert summary.kld.value == pytest.approx(0.060580, rel=0.05)
    assert summary.kld.error > 0.001845  # theirs, as if positions of one window were independent
    assert summary.kld_median == pytest.approx(0.040465, rel=0.05)
    assert summary.kld_99 == pytest.approx(0.398448, rel=0.1)  # 18 positions; other CPUs round otherwise
    assert 100 * summary.same_top.value == pytest.approx(87.289, abs=0.6)
    assert 100 * summary.rms_dp.value == pytest.approx(2.426, rel=0.05)
