"""How long people wait before anything happens.

    python benchmarks/startup.py [--quick] [--rounds N] [--model 1.5b:Q8_0]

App start to first paint: from the spawn in a 120x40 pseudo-terminal to the arrival of the output that completes the
frame with the prompt's border, and on to the demo model being ready. Then `cpuchat --help`, a whole `cpuchat ask` with
the demo model, and the first token of `ask` with a larger model against `llama-completion`, its file in the page cache.
Every side has been started once before: bytecode, measurements of the machine and calibrations are there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import models
from build_llama import tool
from common import MeasureError, Row, Target, alternate, arguments, machine, report, run_main
from product import default_threads
from terminal import Terminal, command, environment, is_ready

PROMPT_CORNER = "╰"
QUESTION = "How do I stop an answer?"


def first_paint(folder: Path) -> dict[str, float]:
    terminal = Terminal([], folder)
    try:
        painted = terminal.wait_for(lambda screen: PROMPT_CORNER in screen)
        ready = terminal.wait_for(is_ready)
    finally:
        terminal.close()
    return {"first paint": painted - terminal.spawned, "demo model ready": ready - terminal.spawned}


def whole_run(folder: Path, *arguments: str) -> dict[str, float]:
    """Seconds of a run of cpuchat."""
    return _timed([*command(), *arguments], folder)


def _timed(argv: list[str], folder: Path) -> dict[str, float]:
    """Seconds to the first byte on stdout and to the end of the process."""
    with (folder / "stderr").open("w+b") as stderr:
        start = time.perf_counter()
        process = subprocess.Popen(
            argv, env=environment(folder), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr
        )
        assert process.stdout is not None
        process.stdout.read(1)
        first = time.perf_counter() - start
        process.stdout.read()
        if process.wait():
            stderr.seek(0)
            raise MeasureError(f"{argv[0]} ended with {process.returncode}: {stderr.read()[-400:].decode()}")
        return {"first byte": first, "total": time.perf_counter() - start}


def llama_completion(folder: Path, file: Path) -> dict[str, float]:
    """The same question and sampling, without a chat template on either side."""
    argv = [str(tool("llama-completion")), "-m", str(file), "-t", str(default_threads()), "-c", "4096", "-n", "1"]
    argv += ["-p", QUESTION, "--temp", "0", "-no-cnv", "--no-display-prompt"]
    return _timed(argv, folder)


def after_another(folder: Path, file: Path, run: Callable[[], dict[str, float]]) -> dict[str, float]:
    """What `run` returns, right after a process that took as much memory: a virtual machine may have to get memory from
    its host first, which took whichever side came first 2 s here."""
    llama_completion(folder, file)
    return run()


def bare_python() -> dict[str, float]:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return {"total": time.perf_counter() - start}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="1.5b:Q8_0")


def main() -> None:
    options = arguments(__doc__, _options)
    where = machine()
    file = models.model(*options.model.split(":"))
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as name:
        folder = Path(name)
        long = ("ask", "--model", str(file), "--ctx", "4096", "--raw", "--max-tokens", "1", "--temperature", "0", "-q")
        sides = {
            "app": lambda: first_paint(folder),
            "help": lambda: whole_run(folder, "--help"),
            "ask": lambda: whole_run(folder, "ask", "--max-tokens", "32", "--temperature", "0", QUESTION),
            "long ask": lambda: after_another(folder, file, lambda: whole_run(folder, *long, QUESTION)),
            "llama-completion": lambda: after_another(folder, file, lambda: llama_completion(folder, file)),
            "python": bare_python,
        }
        for side in sides.values():
            side()
        runs = alternate(options.rounds or (1 if options.quick else 7), sides)

    def seconds(side: str, figure: str) -> list[float]:
        return [run[figure] for run in runs[side]]

    first, theirs = seconds("long ask", "first byte"), seconds("llama-completion", "first byte")
    beyond = [a - b for a, b in zip(first, theirs, strict=True)]
    rows = [
        Row("app start to first paint", "s", seconds("app", "first paint"), target=Target(0.6, False)),
        Row("app start to demo model ready", "s", seconds("app", "demo model ready"), target=Target(1.2, False)),
        Row("cpuchat --help", "s", seconds("help", "total"), target=Target(0.3, False)),
        Row("cpuchat ask, demo model: first byte", "s", seconds("ask", "first byte")),
        Row("cpuchat ask, demo model: 32 tokens, total", "s", seconds("ask", "total")),
        Row(f"cpuchat ask, {options.model}: first byte, against llama-completion", "s", first, theirs),
        Row("the same, what it takes longer", "s", beyond, target=Target(0.15, False)),
        Row("(python -c pass, for comparison)", "s", seconds("python", "total")),
    ]
    report("startup", where, rows, quick=options.quick)


if __name__ == "__main__":
    run_main(main)
