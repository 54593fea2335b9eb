"""The engine's wheel against the engine compiled for this CPU: decode, prefill, and the time to a loaded demo model.

    python benchmarks/modules.py [--quick] [--rounds N] [--models FILE,...] [--modules NAME,...] [--wheel FILE|FOLDER]

Theirs: the engine that is installed, which must be one compiled for this CPU. Ours: that of the wheel (`make wheels`),
unpacked into `work/`, with the CPU module of the highest score; `--modules` times others, too. The sides take turns,
each in a worker of its own that keeps its model; starts are fresh processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import HERE, WORK, MeasureError, Row, Target, alternate, arguments, machine, report, run_main, say

SPEED, START_MS = Target(0.98), Target(50, False)
N_GEN, N_PROMPT = 48, 256
NATIVE = "native"


class Side:
    """A process with one engine and one model, which measures on request."""

    def __init__(self, engine: Path | None, module: str, model: Path) -> None:
        command = [sys.executable, __file__, "--side", module, "--models", str(model)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(engine)
        )
        self.module = str(self._said()["module"])

    def measure(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._said()

    def close(self) -> None:
        self._process.communicate()

    def _said(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise MeasureError(f"a side ended with status {self._process.wait()}")
        return json.loads(line)


def environment(engine: Path | None) -> dict[str, str]:
    """Return the environment in which cpuchat runs on this engine; None: the installed one."""
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(engine or ""), *paths]))}


async def answer_requests(model: Path, module: str) -> None:
    """Load, and measure for each line of the input."""
    from cpuchat.backend.loading import load_to_measure
    from cpuchat.backend.local import LocalBackend
    from cpuchat.hardware.placement.placement import PlacementSpec
    from cpuchat.protocol.messages import LoadOptions, Measure, Measured

    backend = LocalBackend()
    options = LoadOptions(n_ctx=1024, cpu_module=module)
    try:
        await load_to_measure(backend, model, options, PlacementSpec(), lambda: False)
        assert backend.engine is not None
        print(json.dumps({"module": backend.engine.module}), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            found = {}
            for name, n_prompt, n_gen in (("decode", 0, N_GEN), ("prefill", N_PROMPT, 0)):
                took = await backend.measure(Measure(n_prompt=n_prompt, n_gen=n_gen))
                assert isinstance(took, Measured)
                found[name] = (n_prompt + n_gen) / took.seconds
            print(json.dumps(found), flush=True)
    finally:
        await backend.close()


async def start(model: Path) -> dict[str, float]:
    """Return the seconds until the engine is ready, and until the model is loaded, page cache warm."""
    from cpuchat.backend.loading import load_to_measure
    from cpuchat.backend.local import LocalBackend
    from cpuchat.hardware.placement.placement import PlacementSpec
    from cpuchat.protocol.messages import LoadOptions

    backend, begun = LocalBackend(), time.perf_counter()
    try:
        await backend.start()
        ready = time.perf_counter() - begun
        await load_to_measure(backend, model, LoadOptions(n_ctx=512), PlacementSpec(), lambda: False)
        return {"engine": ready, "model": time.perf_counter() - begun}
    finally:
        await backend.close()


def start_in_a_process(engine: Path | None) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--start"], capture_output=True, text=True, env=environment(engine)
    )
    if done.returncode:
        raise MeasureError(done.stderr[-500:])
    return json.loads(done.stdout.splitlines()[-1])


def unpacked(wheel: str) -> Path:
    """Return a folder with the package of the wheel; a folder is taken as it is."""
    found = Path(wheel) if wheel else max(HERE.parent.glob("dist/llama_cpp_python-*.whl"), default=None)
    if found is None or not found.exists():
        raise MeasureError("there is no wheel of the engine in dist/: make wheels")
    if found.is_dir():
        return found
    folder = WORK / "modules-engine"
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(found) as archive:
        archive.extractall(folder)
    return folder


def speeds(model: Path, engine: Path, modules: list[str], rounds: int) -> list[Row]:
    made = {NATIVE: Side(None, "auto", model)} | {name: Side(engine, name, model) for name in modules}
    if made[NATIVE].module:
        raise MeasureError("the installed engine has modules, too: compile it for this CPU (make setup without dist/)")
    for side in made.values():
        side.measure()  # a warm-up
    measures: dict[str, Callable[[], dict[str, float]]] = {name: side.measure for name, side in made.items()}
    runs = alternate(rounds, measures)
    rows = []
    for name in modules:
        for figure in ("decode", "prefill"):
            ours, theirs = ([run[figure] for run in runs[side]] for side in (name, NATIVE))
            target = SPEED if name == "auto" else None
            rows.append(Row(f"{model.stem}: {figure} {made[name].module}", "tok/s", ours, theirs, target))
    for side in made.values():
        side.close()
    return rows


def starts(engine: Path, rounds: int) -> list[Row]:
    runs = alternate(rounds, {NATIVE: lambda: start_in_a_process(None), "auto": lambda: start_in_a_process(engine)})
    rows = []
    for figure, what in (("engine", "worker ready"), ("model", "demo model loaded")):
        later = [1e3 * (ours[figure] - theirs[figure]) for ours, theirs in zip(runs["auto"], runs[NATIVE], strict=True)]
        rows.append(Row(f"{what}: later with modules", "ms", later, target=START_MS))
    return rows


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="", help="GGUF files; default: the Coder 1.5B of coder_pair.py")
    parser.add_argument("--modules", default="", help="also time these CPU modules")
    parser.add_argument("--wheel", default="", help="the engine's wheel, or a folder with its package")
    parser.add_argument("--side", default="", help=argparse.SUPPRESS)
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)


def main() -> None:
    options = arguments(__doc__, _options)
    files = [Path(name) for name in options.models.split(",") if name]
    if options.side:
        asyncio.run(answer_requests(files[0], options.side))
        return
    from cpuchat.base.paths import demo_dir

    demo = next(demo_dir().glob("*.gguf"))
    if options.start:
        print(json.dumps(asyncio.run(start(demo))))
        return
    where, engine = machine(), unpacked(options.wheel)
    files = files or sorted((WORK / "models").glob("qwen2.5-coder-1.5b-*.gguf"))
    modules = ["auto", *filter(None, options.modules.split(","))]
    rows = starts(engine, 1 if options.quick else options.rounds or 7)
    for file in [demo] if options.quick else files:
        say(file.name)
        rows += speeds(file, engine, modules, 1 if options.quick else options.rounds or 5)
    report("modules", where, rows, quick=options.quick)


if __name__ == "__main__":
    run_main(main)
