"""Passes of 1 to 32 tokens and a prompt of 512 with cpuchat's kernels, and with llama.cpp's.

    python benchmarks/kernels.py [--quick] [--rounds N] [--files FILE,...] [--threads N]

Both sides are the same engine and file (the Coder 1.5B of `coder_pair.py` in Q4_K_M and in Q8_0, its 0.5B draft in
Q4_K_M) loaded twice in one process, on the same pinned threads, in turn. A pass stands at a depth of 64 tokens. GB/s
are the bytes of the weights over the best time of one token. Loads are timed in turn too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

from coder_pair import coder_pair, larger_target
from common import MeasureError, Row, Target, arguments, machine, report, run_main, say
from product import default_threads

from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.model import Model
from cpuchat.hardware.topology import instructions
from cpuchat.models.kernels import instructions_used
from cpuchat.protocol.messages import LoadOptions
from cpuchat.protocol.options import Kernels

DEPTH, PROMPT = 64, 512
WIDTHS = (1, 2, 4, 8, 16, 32)
SIDES: tuple[Kernels, Kernels] = ("auto", "llama.cpp")
# By instruction set: decode and prompt against llama.cpp, passes of 2, 4, 8 and 16 tokens against one.
TARGETS = {
    "AVX2": (1.4, 1.2, {2: 1.15, 4: 1.4, 8: 2.4, 16: 4.5}),
    "AVX-VNNI": (1.4, 1.2, {2: 1.15, 4: 1.4, 8: 2.4, 16: 4.5}),
    "AVX-512 VNNI": (2.0, 1.5, {2: 1.1, 4: 1.2, 8: 1.6, 16: 2.4}),
    "AVX-512 VNNI, AMX": (2.0, 2.0, {2: 1.1, 4: 1.2, 8: 1.6, 16: 2.4}),
}


def loaded(file: Path, kernels: Kernels, cpus: tuple[int, ...]) -> tuple[Model, float]:
    start = time.perf_counter()
    options = LoadOptions(n_ctx=1024, kernels=kernels)
    model = Model.load(file, options, cpus, on_progress=lambda *_: None, abort=bindings.AbortFlag(), n_outputs=32)
    return model, time.perf_counter() - start


def passed(model: Model, n: int, repeats: int) -> list[float]:
    """Return the milliseconds of passes of `n` tokens behind `DEPTH` others."""
    sequence, times = model.sequence, list[float]()
    sequence.clear()
    sequence.extend(tokens(DEPTH), n_outputs=1)
    for _ in range(repeats):
        sequence.truncate(DEPTH)
        start = time.perf_counter()
        sequence.extend(tokens(n), n_outputs=min(n, 32))
        times.append(1e3 * (time.perf_counter() - start))
    model.pool.rest()  # else its threads spin beside those of the other side
    return times


def prompted(model: Model) -> float:
    """Return tok/s of a prompt."""
    model.sequence.clear()
    start = time.perf_counter()
    model.sequence.extend(tokens(PROMPT), n_outputs=1)
    seconds = time.perf_counter() - start
    model.pool.rest()
    return PROMPT / seconds


def tokens(n: int) -> list[int]:
    return [(i * 7919) % 20_000 + 100 for i in range(n)]


def measure(file: Path, rounds: int, cpus: tuple[int, ...], repeats: int) -> list[Row]:
    used = instructions_used(instructions())
    decode, prompt, widths = TARGETS[used]
    loads: dict[str, list[float]] = {side: [] for side in SIDES}
    passes = {(side, n): list[float]() for side in SIDES for n in WIDTHS}
    prompts: dict[str, list[float]] = {side: [] for side in SIDES}
    models: dict[str, Model] = {}
    for side in SIDES:
        models[side], _ = loaded(file, side, cpus)
    for number in range(rounds):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            for n in WIDTHS:
                passes[side, n].append(min(passed(models[side], n, repeats if n < 16 else 3)))
            prompts[side].append(prompted(models[side]))
            say(
                f"  round {number + 1}/{rounds} {side}: one {passes[side, 1][-1]:.1f} ms, {prompts[side][-1]:.0f} tok/s"
            )
    size = models["auto"].header.size
    for model in models.values():
        model.free()
    for number in range(max(1, rounds // 2)):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            model, seconds = loaded(file, side, cpus)
            model.free()
            loads[side].append(seconds)
    name = file.stem.removeprefix("qwen2.5-coder-")
    speeds = {side: [1e3 / ms for ms in passes[side, 1]] for side in SIDES}
    ours, theirs = (size / 1e6 / min(passes[side, 1]) for side in SIDES)
    rows = [
        Row(f"{name}: decode", "tok/s", speeds["auto"], speeds["llama.cpp"], Target(decode),
            note=f"{ours:.1f} GB/s of weights against {theirs:.1f}"),
        Row(f"{name}: prompt of {PROMPT}", "tok/s", prompts["auto"], prompts["llama.cpp"], Target(prompt)),
        Row(f"{name}: load", "s", loads["auto"], loads["llama.cpp"], Target(1.2, at_least=False)),
    ]  # fmt: skip
    for n in WIDTHS[1:]:
        target = Target(widths[n], at_least=False) if n in widths else None
        ratios = {side: [ms / one for ms, one in zip(passes[side, n], passes[side, 1], strict=True)] for side in SIDES}
        note = f"llama.cpp {statistics.median(ratios['llama.cpp']):.2f}"
        rows.append(Row(f"{name}: {n} tokens ÷ 1", "", ratios["auto"], (), target, note=note))
    return rows


def main() -> None:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--files", default="", help="GGUF files, separated by commas")
        parser.add_argument("--threads", type=int, default=default_threads())

    given = arguments(__doc__, options)
    where = machine()
    if not instructions_used(instructions()):
        raise MeasureError("this engine has no kernels of cpuchat's, or they do not run on this CPU")
    target, draft = coder_pair()
    files = [Path(one) for one in given.files.split(",")] if given.files else [target, larger_target(), draft]
    cpus = tuple(sorted(os.sched_getaffinity(0)))[: given.threads]
    bindings.start()
    rows: list[Row] = []
    for file in files[:1] if given.quick else files:
        say(f"{file.name}")
        rows += measure(file, 1 if given.quick else given.rounds or 5, cpus, 2 if given.quick else 7)
    report("kernels", where, rows, quick=given.quick, remarks=[f"instructions: {instructions_used(instructions())}"])


if __name__ == "__main__":
    run_main(main)
