"""How long people wait before anything happens.

    python benchmarks/startup.py [--quick] [--rounds N]

App start to first paint: from the spawn in a 120x40 pseudo-terminal to the arrival of the output that completes the
frame with the prompt's border, and on to the demo model being ready. Then `cpuchat --help`, and a whole `cpuchat ask`
with the demo model. Every side has been started once before: bytecode, measurements of the machine and calibrations are
there.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import MeasureError, Row, Target, alternate, arguments, machine, report, run_main
from terminal import Terminal, environment, is_ready, program

PROMPT_CORNER = "╰"
QUESTION = "How do I stop an answer?"


def first_paint(folder: Path) -> dict[str, float]:
    terminal = Terminal(folder)
    try:
        painted = terminal.wait_for(lambda screen: PROMPT_CORNER in screen)
        ready = terminal.wait_for(is_ready)
    finally:
        terminal.close()
    return {"first paint": painted - terminal.spawned, "demo model ready": ready - terminal.spawned}


def whole_run(folder: Path, *arguments: str) -> dict[str, float]:
    """Seconds of a run of cpuchat, to the first byte on stdout and to the end of the process."""
    with (folder / "stderr").open("w+b") as stderr:
        start = time.perf_counter()
        process = subprocess.Popen(
            [program(), *arguments],
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter() - start
        process.stdout.read()
        if process.wait():
            stderr.seek(0)
            raise MeasureError(f"cpuchat ended with {process.returncode}: {stderr.read()[-400:].decode()}")
        return {"first byte": first, "total": time.perf_counter() - start}


def bare_python() -> dict[str, float]:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return {"total": time.perf_counter() - start}


def main() -> None:
    options = arguments(__doc__)
    where = machine()
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as name:
        folder = Path(name)
        sides = {
            "app": lambda: first_paint(folder),
            "help": lambda: whole_run(folder, "--help"),
            "ask": lambda: whole_run(folder, "ask", "--max-tokens", "32", "--temperature", "0", QUESTION),
            "python": bare_python,
        }
        for side in sides.values():
            side()
        runs = alternate(options.rounds or (1 if options.quick else 7), sides)

    def seconds(side: str, figure: str) -> list[float]:
        return [run[figure] for run in runs[side]]

    rows = [
        Row("app start to first paint", "s", seconds("app", "first paint"), target=Target(0.6, False)),
        Row("app start to demo model ready", "s", seconds("app", "demo model ready"), target=Target(1.2, False)),
        Row("cpuchat --help", "s", seconds("help", "total"), target=Target(0.3, False)),
        Row("cpuchat ask, demo model: first byte", "s", seconds("ask", "first byte")),
        Row("cpuchat ask, demo model: 32 tokens, total", "s", seconds("ask", "total")),
        Row("(python -c pass, for comparison)", "s", seconds("python", "total")),
    ]
    report("startup", where, rows, quick=options.quick)


if __name__ == "__main__":
    run_main(main)
