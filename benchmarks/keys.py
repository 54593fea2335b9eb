"""From a key press to its letter on the screen while an answer streams.

    python benchmarks/keys.py [--quick] [--keys 200] [--rate 100] [--model 0.5b:Q4_K_M]

The program in a pseudo-terminal of 120x40 writes a long answer; letters are typed into the prompt at irregular times.
Each is timed from the write into the terminal to the arrival of the output that shows it. At a given rate, a worker
that computes nothing writes (`paced_worker.py`); beside a model, every core computes. Of the slowest keys it says how
long after a paint they were pressed, and when the next one came, which may have been another's.

About 3 minutes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import models
from common import MeasureError, Row, Target, arguments, machine, report, run_main
from terminal import ENTER, PASTE, Terminal, app, is_ready

HERE = Path(__file__).parent
LETTERS = "αβγδεζηθικλμνξοπρστυφχψωбвгджзийклмнптуфцчшщъыьэюя"
"""Each is unlike all else on the screen: the first output with it is its own."""
ESCAPE, CLEAR = "\x1b", "\x15"
TARGET_MS = 50.0


class Key(NamedTuple):
    """ms from the press to the letter, since the output before the press, and to the first output after it."""

    ms: float
    since: float
    first: float


def delays(terminal: Terminal, count: int) -> list[Key]:
    """Press so many keys."""
    chance = random.Random(1)
    found: list[Key] = []
    while len(found) < count:
        for letter in LETTERS[: count - len(found)]:
            terminal.skip(chance.uniform(0.1, 0.4))
            before, pressed = terminal.last_output, time.perf_counter()
            terminal.type(letter)
            shown, first = terminal.wait_for_bytes(letter.encode())
            found.append(Key(1e3 * (shown - pressed), 1e3 * (pressed - before), 1e3 * (first - pressed)))
        terminal.type(CLEAR)
        terminal.skip(0.3)
    return found


def measured(model: str, count: int, started_by: Sequence[str] = ()) -> list[Key]:
    """The keys pressed while `model` writes, the fastest first."""
    config = "[engine]\nctx = 8192\n[sampling]\ntemperature = 0.0\n[chat]\nmax_tokens = 8000\n"
    with app("--model", model, config=config, started_by=started_by) as (terminal, _):
        terminal.wait_for(is_ready, 180.0)
        terminal.type(PASTE.format(models.words(40, salt=1).strip()))
        terminal.type(ENTER)
        terminal.wait_for(lambda screen: "Esc stops the answer" in screen)
        terminal.skip(3.0)
        found = sorted(delays(terminal, count))
        terminal.type(ESCAPE)
    if not found:
        raise MeasureError("no key was pressed")
    return found


def paced(rate: str, options: list[str]) -> None:
    """Run the program with a worker that writes at this rate."""
    from cpuchat.backend import process
    from cpuchat.cli.main import main as cpuchat

    command = [sys.executable, str(HERE / "paced_worker.py"), str(HERE.parent), rate]
    process.python_command = lambda *_: command  # type: ignore[assignment]
    sys.exit(cpuchat(options))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", type=int, default=0, help="how many (0: 200, quick 20)")
    parser.add_argument("--rate", type=float, default=100.0, help="tok/s of the paced worker")
    parser.add_argument("--model", default="0.5b:Q4_K_M")


def main() -> None:
    options = arguments(__doc__, _options)
    where = machine()
    count = options.keys or (20 if options.quick else 200)
    started_by = [sys.executable, __file__, "--paced", f"{options.rate:g}"]
    file = models.model(*options.model.split(":"))
    rows: list[Row] = []
    remarks = [f"{count} keys each"]
    for what, found, target in (
        (f"at {options.rate:g} tok/s", measured("demo", count, started_by), Target(TARGET_MS, at_least=False)),
        (f"beside {options.model}", measured(str(file), count), None),
    ):
        ms = [key.ms for key in found]
        p99 = ms[min(len(ms) - 1, int(0.99 * len(ms)))]
        rows.append(Row(f"key to screen {what}, median", "ms", [statistics.median(ms)]))
        rows.append(Row(f"key to screen {what}, p99", "ms", [p99], (), target))
        slowest = (f"{key.ms:.0f} ms ({key.since:.0f} after a paint, next {key.first:.0f})" for key in found[:-6:-1])
        remarks.append(f"slowest keys {what}: {', '.join(slowest)}")
    report("keys", where, rows, quick=options.quick, remarks=remarks)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--paced"]:
        paced(sys.argv[2], sys.argv[3:])
    run_main(main)
