"""What `cpuchat tune` finds, against the best of all combinations of settings, and how long it takes.

    python benchmarks/tuning.py [--quick] [--rounds N] [--prompt-share X]

A 1.5B-shape model in Q4_K_M is tuned from the default settings. Then every combination of threads (as `tune` tries
them), flash attention and micro-batch is measured, the fastest ones again, and the best of them takes turns with the
tuned settings: "cpuchat" is the tuned one, "baseline" the best combination, both in tokens per second at the prompt
share. Each side is loaded anew in each round. `--quick`: a 0.5B shape, few combinations.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common import Row, Target, arguments, machine, report, run_main, say
from models import model

from cpuchat.config.settings import Settings, with_changes
from cpuchat.hardware.topology import read_topology
from cpuchat.tune.candidates import UBATCH_SECONDS, Candidate, Choice, thread_choice
from cpuchat.tune.measurer import Measurer
from cpuchat.tune.trial import DEFAULT_PROMPT_SHARE, TuneResult
from cpuchat.tune.tuner import TUNING_HEADINGS, Tuner, tuning_row

LEAST, MOST_SECONDS = 0.97, 180.0
FINALISTS = 3
FLASH = ("on", "off")
UBATCHES = (128, 256, 512)


def words(chosen: Settings) -> str:
    engine = chosen.engine
    return f"threads {engine.threads or 'auto'}, cores {engine.cores}, FA {engine.flash_attn}, ubatch {engine.n_ubatch}"


def combinations(quick: bool) -> list[Settings]:
    choice = thread_choice(read_topology(), Settings())
    threads = [choice.now.settings, *(one.settings for one in choice.candidates)]
    ubatches = UBATCHES[1:] if quick else UBATCHES
    return [
        with_changes(one, {"engine": {"flash_attn": flash, "ubatch": ubatch}})
        for one, flash, ubatch in itertools.product(threads, FLASH, ubatches)
    ]


async def speeds(file: Path, sides: Sequence[Settings], rounds: int, share: float) -> list[list[float]]:
    """Measure all sides in turn; returns the overall speeds of each."""
    found: list[list[float]] = [[] for _ in sides]
    measurer = Measurer(file)
    try:
        await measurer.first(Settings())
        for number in range(rounds):
            order = list(enumerate(sides))
            for at, side in order if number % 2 == 0 else reversed(order):
                choice = Choice("all", (), Candidate("", side), prompt_seconds=UBATCH_SECONDS)
                speed = await measurer.measure(side, choice, 1, "")
                found[at].append(speed.overall(share))
                figures = f"prefill {speed.prefill:.1f}, decode {speed.mean_decode:.2f}"
                say(f"  {words(side)}: {found[at][-1]:.2f} ({figures})")
    finally:
        await measurer.close()
    return found


async def run(file: Path, share: float, rounds: int, quick: bool) -> tuple[TuneResult, list[float], list[float], str]:
    tuner = Tuner(file, Settings(), prompt_share=share)
    tuner.tell = lambda: say(f"  {tuner.seconds:.0f} s {tuner.progress.what}") if tuner.progress.what else None
    result = await tuner.run()
    tuned = with_changes(Settings(), result.changes)
    say("all combinations")
    every = combinations(quick)
    first = await speeds(file, every, 1, share)
    ranked = sorted(zip(every, first, strict=True), key=lambda one: -one[1][0])[:FINALISTS]
    finalists = [settings for settings, _ in ranked]
    again = await speeds(file, finalists, 1 if quick else 2, share)
    best = max(zip(finalists, again, strict=True), key=lambda one: max(one[1]))[0]
    say(f"tuned: {words(tuned)}\nbest:  {words(best)}")
    ours, theirs = await speeds(file, [tuned, best], rounds, share)
    return result, ours, theirs, words(best)


def main() -> None:
    given = arguments(
        __doc__, lambda parser: parser.add_argument("--prompt-share", type=float, default=DEFAULT_PROMPT_SHARE)
    )
    where, quick = machine(), given.quick
    file = model("0.5b" if quick else "1.5b", "Q4_K_M")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {f"CPUCHAT_{kind}_DIR": folder for kind in ("CONFIG", "DATA", "CACHE")}
        rounds = given.rounds or (1 if quick else 5)
        result, ours, theirs, best = asyncio.run(run(file, given.prompt_share, rounds, quick))
    rows = [
        Row(f"{file.stem}, prompt share {given.prompt_share:g}", "tok/s", ours, theirs, Target(LEAST), f"best: {best}"),
        Row("time to tune", "s", [result.seconds], target=Target(MOST_SECONDS, at_least=False)),
    ]
    remarks = [" | ".join(filter(None, row)) for row in (TUNING_HEADINGS, *map(tuning_row, result.choices))]
    report("tuning", where, rows, quick=quick, remarks=remarks)


if __name__ == "__main__":
    run_main(main)
