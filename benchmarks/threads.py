"""What the UI and the inference threads cost each other on a machine with few cores; the ground for the defaults.

    python benchmarks/threads.py [--quick] [--rounds N] [--model 0.5b:Q4_K_M]

llama-bench decodes with 1 and with all threads, without OpenMP (idle threads spin by `poll` 0, 50, 100) and with it
(default and passive waiting), while nothing else runs, and beside a load like a terminal UI's: bursts of 8 ms, ten
per second, at nice 0 and at nice 5. Beside the decode rate it shows what the UI feels: how late its bursts ended.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import models
from baselines import llama_bench
from common import alternate, arguments, machine, run_main, save, spread, table
from ui_load import UiLoad

DEPTH = 32


def _one(file: Path, n_gen: int, load: tuple[float, int] | None, **engine: object) -> dict[str, float]:
    def rate() -> float:
        return llama_bench(file, n_gen=n_gen, depth=DEPTH, reps=1, **engine)  # type: ignore[arg-type]

    if load is None:
        return {"tok/s": rate()}
    with UiLoad(*load) as ui:
        found = rate()
    late = sorted(ui.late_ms)
    return {"tok/s": found, "late p95": late[int(0.95 * (len(late) - 1))]}


def engines(cores: int) -> dict[str, dict[str, object]]:
    """The engine settings compared: name, then arguments of `llama_bench`."""
    choices: dict[str, dict[str, object]] = {"1 thread": {"threads": 1}}
    for poll in (0, 50, 100):
        choices[f"{cores} threads, poll {poll}"] = {"threads": cores, "poll": poll}
    choices["1 thread, OpenMP"] = {"threads": 1, "openmp": True}
    choices[f"{cores} threads, OpenMP"] = {"threads": cores, "openmp": True}
    choices[f"{cores} threads, OpenMP passive"] = {
        "threads": cores,
        "openmp": True,
        "env": {"OMP_WAIT_POLICY": "passive"},
    }
    return choices


LOADS: dict[str, tuple[float, int] | None] = {"alone": None, "UI 8 %": (0.08, 0), "UI 8 %, nice 5": (0.08, 5)}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="0.5b:Q4_K_M")
    parser.add_argument("--tokens", type=int, default=64)


def main() -> None:
    options = arguments(__doc__, _options)
    where = machine()
    file = models.model(*options.model.split(":"))
    chosen = engines(where.cores)
    sides: dict[str, Callable[[], dict[str, float]]] = {}
    for engine, settings in chosen.items():
        for load, burden in LOADS.items():
            sides[f"{engine} | {load}"] = lambda s=settings, b=burden: _one(file, options.tokens, b, **s)
    if options.quick:
        sides = {name: sides[name] for name in list(sides)[:4]}
    runs = alternate(options.rounds or (1 if options.quick else 3), sides, settle=0.1)
    lines = []
    for name, found in runs.items():
        engine, _, load = name.partition(" | ")
        alone = statistics.median(run["tok/s"] for run in runs[f"{engine} | alone"])
        rates = [run["tok/s"] for run in found]
        late = spread([run["late p95"] for run in found], "ms") if "late p95" in found[0] else "–"
        lines.append([engine, load, spread(rates, "tok/s"), f"{statistics.median(rates) / alone:.3f}", late])
    print(f"\nthreads - {file.name} - {where}\n")
    print(table(lines, ("engine", "beside", "decode", "of alone", "UI burst late, p95")))
    if not options.quick:
        save("threads", where, {"model": file.name, "runs": runs})


if __name__ == "__main__":
    run_main(main)
