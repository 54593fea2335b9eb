"""From a key press to its letter on the screen while an answer streams.

    python benchmarks/keys.py [--quick] [--keys 200] [--rate 100] [--model 0.5b:Q4_K_M]

The program in a pseudo-terminal of 120x40 writes a long answer; letters are typed into the prompt at irregular times.
Each is timed from the write into the terminal to the arrival of the output that shows it. At a given rate, a worker
that computes nothing writes (`paced_worker.py`); beside a model, every core computes.

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

import models
from common import MeasureError, Row, Target, arguments, machine, report, run_main
from terminal import ENTER, PASTE, Terminal, app, is_ready

HERE = Path(__file__).parent
LETTERS = "αβγδεζηθικλμνξοπρστυφχψωбвгджзийклмнптуфцчшщъыьэюя"
"""Each is unlike all else on the screen: the first output with it is its own."""
ESCAPE, CLEAR = "\x1b", "\x15"
TARGET_MS = 50.0


def delays(terminal: Terminal, count: int) -> list[float]:
    """ms of each key."""
    chance = random.Random(1)
    found: list[float] = []
    while len(found) < count:
        for letter in LETTERS[: count - len(found)]:
            terminal.skip(chance.uniform(0.1, 0.4))
            pressed = time.perf_counter()
            terminal.type(letter)
            found.append(1e3 * (terminal.wait_for_bytes(letter.encode()) - pressed))
        terminal.type(CLEAR)
        terminal.skip(0.3)
    return found


def measured(model: str, count: int, started_by: Sequence[str] = ()) -> list[float]:
    """ms of each key while `model` writes, ascending."""
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
    for what, found, target in (
        (f"at {options.rate:g} tok/s", measured("demo", count, started_by), Target(TARGET_MS, at_least=False)),
        (f"beside {options.model}", measured(str(file), count), None),
    ):
        p99 = found[min(len(found) - 1, int(0.99 * len(found)))]
        rows.append(Row(f"key to screen {what}, median", "ms", [statistics.median(found)]))
        rows.append(Row(f"key to screen {what}, p99", "ms", [p99], (), target))
    report("keys", where, rows, quick=options.quick, remarks=[f"{count} keys each"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--paced"]:
        paced(sys.argv[2], sys.argv[3:])
    run_main(main)
