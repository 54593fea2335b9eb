"""Decode and prefill tok/s of cpuchat against llama-bench: same file, same threads, alternating runs.

    python benchmarks/engine.py [--quick] [--rounds N] [--threads N] [--reps N]
                                    [--models 0.5b:Q4_K_M,...] [--no-tui]

Ours are the figures that the app shows (worker process, greedy, `Timings`), theirs llama-bench's. Both decode
`DECODE` tokens from the same depth. Each side is a fresh process per round.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from pathlib import Path

import models
from baselines import llama_bench
from common import MeasureError, Row, Target, alternate, arguments, machine, report, run_main, say
from product import answer, default_threads, worker
from terminal import tui_answers

from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.protocol.messages import LoadOptions

DEPTH = 32
"""Tokens in the KV cache where the decode measurement starts."""
TEMPLATE = 22
"""Tokens that the chat template puts around a message."""
PREFILL = 512
DECODE = {"0.5b": 128, "1.5b": 64}
"""Tokens of one decode measurement; fewer for the larger shape, to keep the run short."""
HEADLESS, WITH_TUI = Target(0.98), Target(0.97)


async def _headless(file: Path, threads: int, n_decode: int, reps: int) -> dict[str, float]:
    """One worker process: medians of `reps` prefills and `reps` decodes, after one warm-up of each."""
    options = LoadOptions(n_ctx=1024)
    prefill, decode = [], []
    async with worker(file, options, PlacementSpec(threads=threads)) as backend:
        for rep in range(reps + 1):
            timings = (await answer(backend, models.words(PREFILL, salt=2 * rep), 1)).timings
            _expect("prefill tokens", timings.prompt_n, PREFILL)
            prefill.append(timings.prompt_per_second or 0.0)
        for rep in range(reps):
            # One more than llama-bench computes: our rate counts the intervals between tokens.
            timings = (await answer(backend, models.words(DEPTH, salt=2 * rep + 1), n_decode + 1)).timings
            _expect("decode depth", timings.prompt_n, DEPTH)
            decode.append(timings.predicted_per_second or 0.0)
    return {"prefill": statistics.median(prefill[1:]), "decode": statistics.median(decode)}


def _expect(what: str, found: int, wanted: int) -> None:
    if found != wanted:
        raise MeasureError(f"{what}: {found} instead of {wanted}, the comparison would not be fair")


def measure(shape: str, quantization: str, *, threads: int, rounds: int, reps: int, tui: bool) -> list[Row]:
    """All rows of one file."""
    file = models.model(shape, quantization)
    n_decode = DECODE[shape]

    def theirs() -> dict[str, float]:
        return {
            "prefill": llama_bench(file, threads=threads, n_prompt=PREFILL, reps=reps),
            "decode": llama_bench(file, threads=threads, n_gen=n_decode, depth=DEPTH, reps=reps),
        }

    def ours() -> dict[str, float]:
        return asyncio.run(_headless(file, threads, n_decode, reps))

    def shown() -> dict[str, float]:
        prompts = [models.words(DEPTH - TEMPLATE, salt=50 + rep) for rep in range(reps)]
        rates = [timings.predicted_per_second or 0.0 for timings in tui_answers(file, prompts, n_decode + 1, threads)]
        return {"decode": statistics.median(rates)}

    say(f"{file.name}, {threads} threads")
    sides = {"llama-bench": theirs, "cpuchat": ours}
    runs = alternate(rounds, {**sides, "with the TUI": shown} if tui else sides)
    name = f"{shape.upper()} {quantization}"

    def values(side: str, figure: str) -> list[float]:
        return [run[figure] for run in runs[side]]

    bench = values("llama-bench", "decode")
    rows = [Row(f"{name} decode, headless", "tok/s", values("cpuchat", "decode"), bench, HEADLESS)]
    if tui:
        rows.append(Row(f"{name} decode, with the TUI", "tok/s", values("with the TUI", "decode"), bench, WITH_TUI))
    theirs_prefill = values("llama-bench", "prefill")
    rows.append(Row(f"{name} prefill {PREFILL}", "tok/s", values("cpuchat", "prefill"), theirs_prefill, HEADLESS))
    return rows


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=0, help="for both sides (0: cpuchat's choice)")
    every = ",".join(f"{shape}:{quantization}" for shape in models.SHAPES for quantization in models.QUANTIZATIONS)
    parser.add_argument("--models", default=every)
    parser.add_argument("--reps", type=int, default=1, help="measurements in each process; their median counts")
    parser.add_argument("--no-tui", action="store_true")


def main() -> None:
    options = arguments(__doc__, _options)
    where = machine()
    threads = options.threads or default_threads()
    rounds = options.rounds or (1 if options.quick else 3)
    rows: list[Row] = []
    for chosen in options.models.split(",")[: 1 if options.quick else None]:
        shape, quantization = chosen.split(":")
        rows += measure(shape, quantization, threads=threads, rounds=rounds, reps=options.reps, tui=not options.no_tui)
    report("engine", where, rows, quick=options.quick, remarks=[f"{threads} threads on both sides"])


if __name__ == "__main__":
    run_main(main)
