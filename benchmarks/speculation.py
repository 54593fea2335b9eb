"""Speculative decoding: adaptive depth against plain decoding, fixed depths and llama-server's own.

    python benchmarks/speculation.py [--quick] [--rounds N] [--depths N] [--threads N] [--only adaptive,copy,...]

Pairs with a known acceptance rate (1.5B shape in Q4_K_M, Q8_0 and F16; drafts of 0.05B and 0.5B) and texts that are
known beforehand. All sides of a comparison run in one worker, in turn; every answer is compared with the known text.
The parts (`--only`) are kept one by one in results/speculation.json; the plot, results/speculation.svg, is
drawn from that file. `--plot` only draws it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from accuracy import accuracy
from common import RESULTS, WORK, MeasureError, Row, arguments, machine, run_main, save, say, table
from depths import ALPHAS, large_draft, longer, small_draft
from drafting import Section, Setup
from free_drafters import copy, prose, real_pair, text
from never_slower import free_drafters, hopeless_pair, noise
from pairs import Shapes
from plots import COLOURS, INK, PALE, Chart, Dot, Line, Panel
from product import default_threads
from same_pair import server

NAME = "speculation"
SECTIONS: dict[str, Callable[[Setup], Section]] = {
    "accuracy": accuracy,
    "adaptive": small_draft,
    "never-slower": hopeless_pair,
    "never-slower-free": free_drafters,
    "never-slower-noise": noise,
    "longer": longer,
    "large-draft": large_draft,
    "copy": copy,
    "prose": prose,
    "text": text,
    "real-pair": real_pair,
    "server": server,
}
MEASURED = "fixed depths"
THIN = ("3", "7", "15")
"""Fixed depths whose predicted speed the plot shows at every acceptance rate (as JSON spells its keys)."""
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


def kept() -> dict[str, Any]:
    """The parts of the last runs."""
    file = RESULTS / f"{NAME}.json"
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


def plot(sections: dict[str, Any]) -> Chart:
    """Speed against plain decoding over acceptance, from the kept figures.

    Raises:
        MeasureError: the part "adaptive" was not run yet.
    """
    if "adaptive" not in sections:
        raise MeasureError('there is nothing to draw before the part "adaptive" has run')
    small = sections["adaptive"]["data"]["pairs"]
    large = sections.get("large-draft", {"data": {"pairs": []}})["data"]["pairs"]
    alphas = [alpha for alpha in ALPHAS if any(pair["alpha"] == alpha for pair in small)]
    panels = []
    for quantization in dict.fromkeys(pair["quantization"] for pair in small):
        own = [pair for pair in small if pair["quantization"] == quantization]
        panel = Panel(f"{quantization} ({statistics.median(own[0]['plain']):.1f} tok/s plain)", dots_name=MEASURED)
        for depth in THIN:
            by_costs = {pair["alpha"]: pair["predicted"].get(depth) for pair in own}
            panel.lines.append(Line("", [by_costs.get(alpha) for alpha in alphas], PALE, 1, label=depth))
        panel.lines.append(Line("adaptive", _by_alpha(own, alphas), COLOURS.get(quantization, INK), 3))
        other = [pair for pair in large if pair["quantization"] == quantization]
        if len(other) > 1:
            panel.lines.append(Line("0.5B draft", _by_alpha(other, alphas), INK, 1.5, "5 4"))
        for pair in own:
            place = alphas.index(pair["alpha"])
            panel.dots += [
                Dot(place, _ratio(rates, pair["plain"]), str(depth)) for depth, rates in pair["fixed"].items()
            ]
        panels.append(panel)
    return Chart(
        title="Speculation that follows the draft: speed over acceptance",
        subtitle="1.5B-shape target, 0.05B draft; medians of the rounds' ratios. Numbered: best fixed depth. "
        f"Thin: depths {', '.join(THIN)} as T(n) predicts.",
        x_title="acceptance rate α of the draft",
        y_title="speed against plain decoding",
        places=[f"{alpha:g}" for alpha in alphas],
        panels=panels,
        mark="plain decoding",
    )


def _by_alpha(pairs: list[dict[str, Any]], alphas: list[float]) -> list[float | None]:
    found = {pair["alpha"]: _ratio(pair["adaptive"], pair["plain"]) for pair in pairs}
    return [found.get(alpha) for alpha in alphas]


def _ratio(rates: list[float], plain: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(rates, plain, strict=True))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"parts, of {', '.join(SECTIONS)}")
    parser.add_argument("--depths", type=int, default=0, help="most fixed depths per pair (0: the script's choice)")
    parser.add_argument("--threads", type=int, default=0, help="for all sides (0: cpuchat's choice)")
    parser.add_argument("--plot", action="store_true", help="measure nothing, draw the kept figures")


def _draw() -> None:
    file = RESULTS / f"{NAME}.svg"
    plot(kept()).write(file)
    say(f"drew {file.name}")


def main() -> None:
    options = arguments(__doc__, _options)
    if options.plot:
        _draw()
        return
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in SECTIONS]:
        raise MeasureError(f"there is no part {', '.join(unknown)}; choose of {', '.join(SECTIONS)}")
    # What passes cost is measured once per file and kept; not in the user's own folder.
    os.environ["CPUCHAT_CACHE_DIR"] = str(WORK / "cache")
    where = machine()
    threads = options.threads or default_threads()
    shapes = QUICK_SHAPES if options.quick else Shapes()
    setup = Setup(options.quick, options.rounds, options.depths, threads, shapes)
    print(f"\n{NAME} - {where}\n\n{threads} threads on all sides")
    for name in chosen:
        started = time.perf_counter()
        section = SECTIONS[name](setup)
        seconds = time.perf_counter() - started
        show(name, section)
        say(f"{name}: {seconds:.0f} s")
        if not options.quick:
            save(NAME, where, {"threads": threads, "sections": kept() | {name: _as_json(section, seconds)}})
    if options.quick:
        print("(a quick run: it proves that the script works, not how fast anything is)")
    elif "adaptive" in kept():
        _draw()


if __name__ == "__main__":
    run_main(main)
