"""How long people wait before anything happens.

    python benchmarks/startup.py [--quick] [--rounds N]

App start to first paint: from the spawn in a 120x40 pseudo-terminal to the arrival of the output that completes the
frame with the prompt's border, and on to the demo model being ready. Then `cpuchat --help`, and a whole
`cpuchat ask` with the demo model: to the first byte of the answer, and to its end.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import MeasureError, Row, Target, alternate, arguments, machine, report, run_main
from terminal import app, command, environment, is_ready

PROMPT_CORNER = "╰"


def first_paint() -> dict[str, float]:
    with app() as (terminal, _):
        painted = terminal.wait_for(lambda screen: PROMPT_CORNER in screen)
        ready = terminal.wait_for(is_ready)
        return {"first paint": painted - terminal.spawned, "demo model ready": ready - terminal.spawned}


def whole_run(*arguments: str) -> dict[str, float]:
    """Seconds to the first byte on stdout and to the end of the process."""
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder:
        start = time.perf_counter()
        process = subprocess.Popen(
            [*command(), *arguments],
            env=environment(Path(folder)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        first = time.perf_counter() - start
        process.stdout.read()
        error = process.stderr.read()
        if process.wait():
            raise MeasureError(f"cpuchat {arguments[0]} ended with {process.returncode}: {error[-400:].decode()}")
        return {"first byte": first, "total": time.perf_counter() - start}


def bare_python() -> dict[str, float]:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return {"total": time.perf_counter() - start}


def main() -> None:
    options = arguments(__doc__)
    where = machine()
    question = "How do I stop an answer?"
    runs = alternate(
        options.rounds or (1 if options.quick else 7),
        {
            "app": first_paint,
            "help": lambda: whole_run("--help"),
            "ask": lambda: whole_run("ask", question, "--max-tokens", "32", "--temperature", "0"),
            "python": bare_python,
        },
    )

    def seconds(side: str, figure: str) -> list[float]:
        return [run[figure] for run in runs[side]]

    rows = [
        Row("app start to first paint", "s", seconds("app", "first paint")),
        Row("app start to demo model ready", "s", seconds("app", "demo model ready")),
        Row("cpuchat --help", "s", seconds("help", "total"), target=Target(0.3, False)),
        Row("cpuchat ask, demo model: first byte", "s", seconds("ask", "first byte")),
        Row("cpuchat ask, demo model: 32 tokens, total", "s", seconds("ask", "total")),
        Row("(python -c pass, for comparison)", "s", seconds("python", "total")),
    ]
    report("startup", where, rows, quick=options.quick)


if __name__ == "__main__":
    run_main(main)
