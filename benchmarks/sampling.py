"""Python time per token outside llama.cpp's decode call, at a vocabulary of 152 thousand.

    python benchmarks/sampling.py [--quick] [--rounds N] [--tokens N]

First the whole: `Timings.overhead_us` of real answers of a 0.5B-shape model, greedy and with top-k 40 / top-p 0.95,
by two kinds of models: one whose logits have a clear winner and one whose logits are noise, the hardest rows for a
sampler. Then its largest part alone: `Sampler.sample` on prepared rows, with caches as decoding leaves them and warm.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import models
import numpy as np
from common import MeasureError, Row, Target, alternate, arguments, machine, report, run_main
from numpy.typing import NDArray
from product import GREEDY, answer, worker

from cpuchat.engine.decoding.sampling import Sampler
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.protocol.messages import LoadOptions, Sampling

N_VOCAB = 151_936
JUNK = 128 << 20
"""Bytes that empty the caches when they are read."""
STOCHASTIC = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.0, seed=1)
DEFAULT = Sampling(seed=1)
SETTINGS = {
    "greedy": (GREEDY, Target(50, False)),
    "top-k 40, top-p 0.95": (STOCHASTIC, Target(150, False)),
    "app defaults": (DEFAULT, Target(150, False)),
}


async def _real(file: Path, tokens: int, threads: int) -> dict[str, float]:
    """µs per token of one answer for each of `SETTINGS`, in one worker.

    It is wall time: whoever takes the core away in the middle is in it.
    """
    found = {}
    async with worker(file, LoadOptions(n_ctx=1024), PlacementSpec(threads=threads)) as backend:
        if backend.model is None or backend.model.n_vocab < N_VOCAB:
            raise MeasureError(f"{file.name} has too small a vocabulary for this")
        await answer(backend, models.words(16, salt=1), 8)
        for name, (sampling, _) in SETTINGS.items():
            done = await answer(backend, models.words(16, salt=2), tokens, sampling=sampling, to_the_end=False)
            found[name] = done.timings.overhead_us
    return found


def rows_of_logits() -> dict[str, NDArray[np.float32]]:
    """Made-up rows: a text model's (20 candidates above a noise floor), one clear winner, and pure noise."""
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(N_VOCAB).astype(np.float32) * np.float32(2.5)
    text, winner = noise.copy(), noise.copy()
    text[rng.choice(N_VOCAB, 20, replace=False)] += np.linspace(18, 8, 20, dtype=np.float32)
    winner[77] += 40
    return {"like text": text, "one winner": winner, "noise": noise}


def _pick_us(sampling: Sampling, row: NDArray[np.float32], repeats: int, *, cold: bool) -> float:
    """Median µs of one call on `row`.

    `cold`: other memory is read in between, as decoding does, which streams the weights through all caches. The
    interpreter and numpy then come from memory, too, and that is most of what a call costs in a real answer.
    """
    sampler = Sampler(sampling, row.size)
    weights = np.ones(JUNK, np.uint8)
    times = []
    for _ in range(repeats // 10 if cold else repeats):
        if cold:
            weights.sum()
        start = time.perf_counter_ns()
        token = sampler.sample(row)
        sampler.accept(token)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return float(statistics.median(times))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=128, help="length of the real answers")


def main() -> None:
    options = arguments(__doc__, _options)
    where = machine()
    rounds = options.rounds or (1 if options.quick else 5)
    tokens = 32 if options.quick else options.tokens
    # A core is left for this process, which takes the text: what it takes from the worker is not the worker's work.
    threads = max(1, where.cores - 1)
    files = {"clear winner": models.model("0.5b", "Q4_K_M"), "noise": models.noise_model("0.5b", "Q4_K_M")}
    real = alternate(
        rounds, {kind: lambda f=file: asyncio.run(_real(f, tokens, threads)) for kind, file in files.items()}
    )
    rows = [
        Row(f"per token, {name}, logits: {kind}", "µs", [run[name] for run in runs], target=target)
        for kind, runs in real.items()
        for name, (_, target) in SETTINGS.items()
    ]
    calls = 200 if options.quick else 2000
    picks: dict[str, Callable[[], float]] = {
        f"pick alone, {name}, row: {kind}, caches {'cold' if cold else 'warm'}": lambda s=sampling, r=row, c=cold: (
            _pick_us(s, r, calls, cold=c)
        )
        for name, (sampling, _) in SETTINGS.items()
        for kind, row in rows_of_logits().items()
        for cold in (True, False)
    }
    rows += [Row(name, "µs", found) for name, found in alternate(rounds, picks, settle=0.0).items()]
    report(
        "sampling", where, rows, quick=options.quick, remarks=[f"real answers with {threads} of {where.cores} threads"]
    )


if __name__ == "__main__":
    run_main(main)
