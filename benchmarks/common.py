"""What every benchmark here shares: alternating runs, medians with their spread, the machine, the table, the file.

Machines are shared and noisy: the sides of a comparison run in turn (A B C A B C ...), each round gives one ratio, and
the median of the rounds' ratios counts. A single time is never compared with a time of another day.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

HERE = Path(__file__).parent
WORK = HERE / "work"
RESULTS = HERE / "results"

T = TypeVar("T")


class MeasureError(RuntimeError):
    """Nothing could be measured; the script ends with a nonzero status."""


def run_main(main: Callable[[], None]) -> None:
    """Run a script; what kept it from measuring becomes one message and status 1. Missed targets are no failure."""
    try:
        main()
    except MeasureError as error:
        sys.exit(f"not measured: {error}")


@dataclass(frozen=True)
class Target:
    """What a ratio (or, without an baseline, the figure itself) must reach."""

    limit: float
    at_least: bool = True

    def reached(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"


@dataclass(frozen=True)
class Row:
    """One line of a result: our values, the baseline's of the same rounds (none: an absolute figure)."""

    what: str
    unit: str
    ours: Sequence[float]
    theirs: Sequence[float] = ()
    target: Target | None = None
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)] if self.theirs else []

    @property
    def judged(self) -> float:
        """What is held against the target: the median ratio, else the median."""
        return statistics.median(self.ratios or self.ours)

    @property
    def reached(self) -> bool | None:
        return self.target.reached(self.judged) if self.target else None

    def cells(self) -> list[str]:
        ratio = f"{self.judged:.3f} ({min(self.ratios):.3f}–{max(self.ratios):.3f})" if self.ratios else "–"
        verdict = {None: "–", True: "yes", False: "NO"}[self.reached]
        target = f"{self.target}{'×' if self.theirs else ' ' + self.unit}" if self.target else "–"
        theirs = spread(self.theirs, self.unit) if self.theirs else "–"
        return [self.what, spread(self.ours, self.unit), theirs, ratio, target, verdict]


def spread(values: Sequence[float], unit: str = "") -> str:
    """Median with minimum and maximum: `48.1 (47.7–48.4) tok/s`."""
    middle = statistics.median(values)
    digits = 0 if abs(middle) >= 1000 else 1 if abs(middle) >= 10 else 2 if abs(middle) >= 1 else 3
    text = f"{middle:.{digits}f}"
    if len(values) > 1:
        text += f" ({min(values):.{digits}f}–{max(values):.{digits}f})"
    return f"{text} {unit}".rstrip()


@dataclass
class Machine:
    """Where and when it was measured. `load` is the load average of the last minute before the first run."""

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str
    load: float
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))

    def __str__(self) -> str:
        return (
            f"{self.cpu}, {self.cores} CPUs usable, {self.memory_gib:.0f} GiB, kernel {self.kernel}, "
            f"Python {self.python}, load average before: {self.load:.2f}, {self.date}"
        )


def machine() -> Machine:
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return Machine(
        cpu=model,
        cores=len(os.sched_getaffinity(0)),
        memory_gib=psutil.virtual_memory().total / (1 << 30),
        kernel=platform.release(),
        python=platform.python_version(),
        load=os.getloadavg()[0],
    )


def arguments(description: str | None, *extra: Callable[[argparse.ArgumentParser], object]) -> argparse.Namespace:
    """The command line that all benchmarks share (`--quick`, `--rounds`) plus what `extra` adds."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short round: does it run at all")
    parser.add_argument("--rounds", type=int, default=0, help="how often each side runs (0: the script's choice)")
    for add in extra:
        add(parser)
    return parser.parse_args()


def alternate(rounds: int, sides: dict[str, Callable[[], T]], settle: float = 0.3) -> dict[str, list[T]]:
    """Run the sides in turn, `rounds` times; the order is reversed in every other round.

    `settle` seconds pass between two runs: idle compute threads of the side before may still be spinning.
    """
    results: dict[str, list[T]] = {name: [] for name in sides}
    for number in range(rounds):
        order = list(sides)
        if number % 2:
            order.reverse()
        for name in order:
            time.sleep(settle)
            results[name].append(sides[name]())
            say(f"  round {number + 1}/{rounds} {name}: {_brief(results[name][-1])}")
    return results


def _brief(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_brief(item)}" for key, item in value.items())
    return str(value)


def say(text: str) -> None:
    """Progress; stdout is the table's."""
    print(text, file=sys.stderr, flush=True)


HEADS = ("what", "cpuchat", "baseline", "ratio", "target", "reached")


def table(rows: Sequence[Sequence[str]], heads: Sequence[str] = HEADS) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]

    def line(row: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(heads), rule, *map(line, rows)])


def report(
    name: str, where: Machine, rows: Sequence[Row], *, quick: bool, remarks: Sequence[str] = (), adds: bool = False
) -> None:
    """Print machine and table; keep the figures in `results/NAME.json` (a quick run is not kept). With `adds` the rows
    of other names that are there stay: the script was run in parts."""
    print(f"\n{name} - {where}\n")
    print(table([row.cells() for row in rows]))
    for remark in [*remarks, *(f"{row.what}: {row.note}" for row in rows if row.note)]:
        print(f"- {remark}")
    if quick:
        print("(a quick run: it proves that the script works, not how fast anything is)")
        return
    lines = [
        {**asdict(row), "target": str(row.target) if row.target else None, "judged": row.judged, "reached": row.reached}
        for row in rows
    ]
    file, names = RESULTS / f"{name}.json", {row.what for row in rows}
    if adds and file.is_file():
        kept = json.loads(file.read_text(encoding="utf-8"))
        parts = {remark.partition(":")[0] for remark in remarks}
        remarks = [*(one for one in kept["remarks"] if one.partition(":")[0] not in parts), *remarks]
        lines = [*(line for line in kept["rows"] if line["what"] not in names), *lines]
    save(name, where, {"rows": lines, "remarks": list(remarks)})


def save(name: str, where: Machine, content: dict[str, object]) -> None:
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps({"machine": asdict(where), **content}, indent=1, ensure_ascii=False, default=list)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
