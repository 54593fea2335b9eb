"""From a key press to its letter on the screen while a model computes on every core.

    python benchmarks/keys.py [--quick] [--keys 200] [--model 0.5b:Q4_K_M]

The installed program in a pseudo-terminal of 120x40 writes a long answer; letters are typed into the prompt at
irregular times. Each is timed from the write into the terminal to the arrival of the output that shows it.

About 1 minute.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import models
from common import MeasureError, Row, Target, arguments, machine, report, run_main
from terminal import ENTER, PASTE, Terminal, app, is_ready

LETTERS = "αβγδεζηθικλμνξοπρστυφχψωбвгджзийклмнптуфцчшщъыьэюя"
"""Each is unlike all else on the screen: the first output with it is its own."""
ESCAPE, CLEAR = "\x1b", "\x15"
TARGET_MS = 100.0


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


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", type=int, default=0, help="how many (0: 200, quick 20)")
    parser.add_argument("--model", default="0.5b:Q4_K_M")


def main() -> None:
    options = arguments(__doc__, _options)
    where = machine()
    file = models.model(*options.model.split(":"))
    config = "[engine]\nctx = 8192\n[sampling]\ntemperature = 0.0\n[chat]\nmax_tokens = 8000\n"
    with app("--model", str(file), config=config) as (terminal, _):
        terminal.wait_for(is_ready)
        terminal.type(PASTE.format(models.words(40, salt=1).strip()))
        terminal.type(ENTER)
        terminal.wait_for(lambda screen: "Esc stops the answer" in screen)
        terminal.skip(3.0)
        found = sorted(delays(terminal, options.keys or (20 if options.quick else 200)))
        terminal.type(ESCAPE)
    if not found:
        raise MeasureError("no key was pressed")
    p99 = found[min(len(found) - 1, int(0.99 * len(found)))]
    rows = [
        Row(f"key to screen beside {options.model}, median", "ms", [statistics.median(found)]),
        Row(f"key to screen beside {options.model}, p99", "ms", [p99], (), Target(TARGET_MS, at_least=False)),
    ]
    report("keys", where, rows, quick=options.quick, remarks=[f"{len(found)} keys"])


if __name__ == "__main__":
    run_main(main)
