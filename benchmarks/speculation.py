"""Speculative decoding: adaptive depth against plain decoding and fixed depths, on known, real and hopeless texts.

    python benchmarks/speculation.py [--quick] [--rounds N] [--depths N] [--threads N] [--only adaptive,text,...]

Pairs with a known acceptance rate (1.5B shape in Q4_K_M, Q8_0 and F16, a draft of 0.05B) and texts that are known
beforehand; real models and texts. All sides of a comparison run in one worker, in turn. The parts (`--only`) are kept
one by one in results/speculation.json.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from common import RESULTS, WORK, MeasureError, Row, arguments, machine, run_main, save, say, table
from depths import adaptive_depth
from drafting import Section, Setup
from never_slower import free_drafters, hopeless_pair, noise
from pairs import Shapes
from product import default_threads
from real_text import real_pair, text

NAME = "speculation"
SECTIONS: dict[str, Callable[[Setup], Section]] = {
    "adaptive": adaptive_depth,
    "never-slower": hopeless_pair,
    "never-slower-free": free_drafters,
    "never-slower-noise": noise,
    "text": text,
    "real-pair": real_pair,
}
QUICK_SHAPES = Shapes("tiny", "tiny", 4096, 4, 1)


def show(name: str, section: Section) -> None:
    """The judged rows, the tables beside them and the remarks."""
    print(f"\n### {name}\n")
    print(table([row.cells() for row in section.rows]))
    for one in section.tables:
        if one.lines:
            print(f"\n{one.title}:\n\n{table(one.lines, one.heads)}")
    print()
    for remark in [*section.remarks, *(f"{row.what}: {row.note}" for row in section.rows if row.note)]:
        print(f"- {remark}", flush=True)


def _kept(name: str) -> dict[str, Any]:
    """The parts of the last runs."""
    file = RESULTS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8"))["sections"] if file.is_file() else {}


def _as_json(section: Section, seconds: float) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "seconds": round(seconds),
        "rows": [_row(row) for row in section.rows],
        "tables": [asdict(one) for one in section.tables],
        "remarks": section.remarks,
        "data": section.data,
    }


def _row(row: Row) -> dict[str, Any]:
    target = str(row.target) if row.target else None
    return {**asdict(row), "target": target, "judged": row.judged, "reached": row.reached}


def run_parts(
    name: str, description: str | None, parts: dict[str, Callable[[Setup], Section]], shapes: Shapes, quick: Shapes
) -> None:
    """Run the parts that the command line asks for, and keep each in results/NAME.json; with the shapes of `quick` in a
    quick run. Raises MeasureError: there is no such part, or one could not measure."""

    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", default=",".join(parts), help=f"parts, of {', '.join(parts)}")
        parser.add_argument("--depths", type=int, default=0, help="most fixed depths per pair (0: the script's choice)")
        parser.add_argument("--threads", type=int, default=0, help="for all sides (0: cpuchat's choice)")

    given = arguments(description, options)
    chosen = given.only.split(",")
    if unknown := [part for part in chosen if part not in parts]:
        raise MeasureError(f"there is no part {', '.join(unknown)}; choose of {', '.join(parts)}")
    # What passes cost is measured once per file and kept; not in the user's own folder.
    os.environ["CPUCHAT_CACHE_DIR"] = str(WORK / "cache")
    where = machine()
    threads = given.threads or default_threads()
    setup = Setup(given.quick, given.rounds, given.depths, threads, quick if given.quick else shapes)
    print(f"\n{name} - {where}\n\n{threads} threads on all sides")
    for part in chosen:
        started = time.perf_counter()
        section = parts[part](setup)
        seconds = time.perf_counter() - started
        show(part, section)
        say(f"{part}: {seconds:.0f} s")
        if not given.quick:
            save(name, where, {"threads": threads, "sections": _kept(name) | {part: _as_json(section, seconds)}})
    if given.quick:
        print("(a quick run: it proves that the script works, not how fast anything is)")


def main() -> None:
    run_parts(NAME, __doc__, SECTIONS, Shapes(), QUICK_SHAPES)


if __name__ == "__main__":
    run_main(main)
