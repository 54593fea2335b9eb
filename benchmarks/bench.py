"""`cpuchat bench` against llama-bench: pp512 and tg128 of the same file with the same threads, alternating runs.

    python benchmarks/bench.py [--quick] [--rounds N] [--threads N] [--reps N] [--models 0.5b:Q4_K_M,...]

Both time the same: random tokens, nothing sampled, a warm-up dropped. Each side is a fresh process per round and gives
the median of its `--reps` runs.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

import models
from baselines import llama_bench
from common import MeasureError, Row, Target, alternate, arguments, machine, report, run_main, say
from product import default_threads

from cpuchat.bench.matrix import Cell, Setup, Workload
from cpuchat.bench.results import report_of
from cpuchat.bench.run import Bench
from cpuchat.config.settings import Settings

SIZES, QUICK = (512, 128), (64, 8)
"""Tokens of prefill and decoding."""
LOW, HIGH = Target(0.98), Target(1.02, at_least=False)
"""As fast as llama-bench says, and no faster: a figure above it would be measured differently."""


def ours(file: Path, threads: int, reps: int, sizes: tuple[int, int]) -> dict[str, float]:
    """What `cpuchat bench FILE --pp 512 --tg 128` prints."""
    setup = Setup(model=str(file), threads=threads)
    tests = {"prefill": Workload.random("pp", sizes[0], 0), "decode": Workload.random("tg", sizes[1], 0)}
    cells = [Cell(setup=setup, test=test) for test in tests.values()]
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder:
        running = Bench(cells, reps, Settings(), folder=Path(folder), fresh=True)
        asyncio.run(running.run())
        found = report_of(running.journal, running.failed)
    if running.failed:
        raise MeasureError(next(iter(running.failed.values())))
    prefill, decode = found.results
    return {"prefill": prefill.prefill_ts or 0.0, "decode": decode.decode_ts or 0.0}


def measure(
    shape: str, quantization: str, *, threads: int, rounds: int, reps: int, sizes: tuple[int, int]
) -> list[Row]:
    """All rows of one file."""
    file = models.model(shape, quantization)

    def theirs() -> dict[str, float]:
        return {
            "prefill": llama_bench(file, threads=threads, n_prompt=sizes[0], reps=reps),
            "decode": llama_bench(file, threads=threads, n_gen=sizes[1], reps=reps),
        }

    say(f"{file.name}, {threads} threads")
    runs = alternate(rounds, {"llama-bench": theirs, "cpuchat": lambda: ours(file, threads, reps, sizes)})
    rows: list[Row] = []
    for figure, name in (("decode", f"tg{sizes[1]}"), ("prefill", f"pp{sizes[0]}")):
        values = {side: [run[figure] for run in runs[side]] for side in runs}
        for target in (LOW, HIGH):
            what = f"{shape.upper()} {quantization} {name}"
            rows.append(Row(what, "tok/s", values["cpuchat"], values["llama-bench"], target))
    return rows


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=0, help="for both sides (0: cpuchat's choice)")
    every = ",".join(f"{shape}:{quantization}" for shape in models.SHAPES for quantization in models.QUANTIZATIONS)
    parser.add_argument("--models", default=every)
    parser.add_argument("--reps", type=int, default=3, help="runs in each process; their median counts")


def main() -> None:
    options = arguments(__doc__, _options)
    where = machine()
    threads = options.threads or default_threads()
    rounds = options.rounds or (1 if options.quick else 5)
    sizes = QUICK if options.quick else SIZES
    rows: list[Row] = []
    for chosen in options.models.split(",")[: 1 if options.quick else None]:
        shape, quantization = chosen.split(":")
        rows += measure(shape, quantization, threads=threads, rounds=rounds, reps=options.reps, sizes=sizes)
    report("bench", where, rows, quick=options.quick, remarks=[f"{threads} threads on both sides"])


if __name__ == "__main__":
    run_main(main)
