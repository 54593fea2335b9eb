"""Decoding, passes of 2 to 32 tokens, a prompt of 512 and loads with cpuchat's kernels, and with llama.cpp's.

    python benchmarks/kernels.py [--quick] [--rounds N] [--threads N] [--only PART,...] [--files FILE,...]

Both sides are the same engine and file, loaded twice in one process, on the same cores, pass by pass in turn. A pass
stands at a depth of 64 tokens, and the best of a round counts. GB/s are the bytes that decoding reads; the read
bandwidth is probed after each pass of one token, and its best of a round counts too. The parts (`--only`) are kept one
by one in results/kernels.json: the Coder 1.5B in Q4_K_M, Q8_0, Q4_K and Q6_K (every matrix in that type), its 0.5B
draft, "experts" (six layers of the 30B-A3B shape), and "attention": what 4,096 and 16,384 tokens before add to a pass
of the 1.5B shape.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
from coder_pair import coder_pair, larger_target, pure_target
from common import MeasureError, Row, Target, arguments, machine, report, run_main, say
from product import default_threads

from cpuchat.costs.model import N_PAST, bytes_read
from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.model import Model
from cpuchat.hardware.topology import instructions
from cpuchat.measure.peak import measure as probe
from cpuchat.models.kernels import instructions_used
from cpuchat.models.synthetic.model import write_model
from cpuchat.models.traffic import model_work
from cpuchat.protocol.messages import LoadOptions
from cpuchat.protocol.options import CacheType, Kernels
from tests.support.shapes import shape_of

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
READ = {"q8_0": 0.9}  # of the probe's bandwidth; other types 0.85
CACHES: dict[CacheType, tuple[int, ...]] = {"f16": (0, 4096, 16384), "q8_0": (0, 4096)}
N_LAYER = 28


def loaded(file: Path, options: LoadOptions, cpus: tuple[int, ...]) -> tuple[Model, float]:
    start = time.perf_counter()
    model = Model.load(file, options, cpus, on_progress=lambda *_: None, abort=bindings.AbortFlag(), n_outputs=32)
    seconds = time.perf_counter() - start
    model.pool.rest()
    model.pool._next_look = math.inf  # else beside other programs one side might compute with fewer threads
    return model, seconds


def passed(model: Model, n: int, depth: int = DEPTH) -> float:
    """Return the milliseconds of a pass of `n` tokens behind `depth` others, which are there already."""
    sequence = model.sequence
    sequence.truncate(depth)
    start = time.perf_counter()
    sequence.extend(tokens(n), n_outputs=min(n, 32))
    seconds = time.perf_counter() - start
    model.pool.rest()  # else its threads spin beside those of the other side
    return 1e3 * seconds


def one_round(
    models: dict[Kernels, Model], repeats: int, cpus: tuple[int, ...]
) -> tuple[dict[Kernels, dict[int, float]], float]:
    """Return the milliseconds of passes by their tokens, each the best of `repeats`, and of a prompt, and the GB/s of
    the probe: pass by pass in turn, windows of the probe as long as a pass, so that what else the machine does meets
    all of them."""
    found: dict[Kernels, dict[int, float]] = {side: {} for side in models}
    peak = 0.0
    for model in models.values():
        model.sequence.clear()
        model.sequence.extend(tokens(DEPTH), n_outputs=1)
    for n in WIDTHS:
        for _ in range(repeats if n < 16 else 2):
            for side, model in models.items():
                found[side][n] = min(passed(model, n), found[side].get(n, math.inf))
            if n == 1:
                peak = max(probe(cpus, seconds=0.06, rounds=1).bytes_per_s / 1e9, peak)
    for side, model in models.items():
        found[side][PROMPT] = passed(model, PROMPT, 0)
    return found, peak


def others_seconds() -> float:
    """Return the CPU time that other programs have used."""
    every, own = psutil.cpu_times(), psutil.Process().cpu_times()
    return every.user + every.nice + every.system - own.user - own.system - own.children_user - own.children_system


def tokens(n: int) -> list[int]:
    return [(i * 7919) % 15_000 + 100 for i in range(n)]


def measure(name: str, file: Path, rounds: int, cpus: tuple[int, ...], repeats: int) -> list[Row]:
    options = {side: LoadOptions(n_ctx=1024, kernels=side) for side in SIDES}
    models = {side: loaded(file, options[side], cpus)[0] for side in SIDES}
    found: dict[Kernels, list[dict[int, float]]] = {side: [] for side in SIDES}
    loads: dict[Kernels, list[float]] = {side: [] for side in SIDES}
    peaks: list[float] = []
    for number in range(rounds):
        order = SIDES if number % 2 == 0 else SIDES[::-1]
        ms, peak = one_round({side: models[side] for side in order}, repeats, cpus)
        peaks.append(peak)
        for side, one in ms.items():
            found[side].append(one)
            say(f"  round {number + 1}/{rounds} {name} {side}: " + ", ".join(f"{n}: {ms:.1f}" for n, ms in one.items()))
    size = bytes_read(model_work(models["auto"].header), 1, N_PAST)
    for model in models.values():
        model.free()
    for number in range(max(1, rounds - 1)):
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            model, seconds = loaded(file, options[side], cpus)
            model.free()
            loads[side].append(seconds)
    return rows_of(name, size, found, loads, peaks)


def rows_of(
    name: str,
    size: float,
    found: dict[Kernels, list[dict[int, float]]],
    loads: dict[Kernels, list[float]],
    peaks: list[float],
) -> list[Row]:
    decode, prompt, widths = TARGETS[instructions_used(instructions())]
    if name == "experts":
        decode = prompt = 1.5

    def rates(n: int) -> tuple[list[float], list[float]]:
        ours, theirs = ([1e3 * n / one[n] for one in found[side]] for side in SIDES)
        return ours, theirs

    read = [size / 1e6 / one[1] for one in found["auto"]]
    rows = [
        Row(f"{name}: decode", "tok/s", *rates(1), Target(decode)),
        Row(f"{name}: read by decoding, probe beside it", "GB/s", read, peaks, Target(READ.get(name, 0.85)),
            note=f"llama.cpp {statistics.median(size / 1e6 / one[1] for one in found['llama.cpp']):.1f} GB/s"),
        Row(f"{name}: prompt of {PROMPT}", "tok/s", *rates(PROMPT), Target(prompt)),
        Row(f"{name}: load", "s", loads["auto"], loads["llama.cpp"], Target(1.2, at_least=False)),
    ]  # fmt: skip
    for n in WIDTHS[1:]:
        target = Target(widths[n], at_least=False) if n in widths and name != "experts" else None
        ours, theirs = ([one[n] / one[1] for one in found[side]] for side in SIDES)
        at = ", ".join(f"{statistics.median(one[n] for one in found[side]):.1f} ms" for side in SIDES)
        note = f"{at}; llama.cpp {statistics.median(theirs):.2f}"
        rows.append(Row(f"{name}: {n} tokens ÷ 1", "", ours, (), target, note=note))
    return rows


def experts(rounds: int, cpus: tuple[int, ...], repeats: int) -> list[Row]:
    """Six of the 48 layers, and the vocabulary in proportion, so that a pass is made of what the whole model's is."""
    shape = msgspec.structs.replace(shape_of("30b-a3b", 6), n_vocab=19_456)
    with tempfile.TemporaryDirectory() as folder:
        file = write_model(Path(folder) / "experts.gguf", shape, "Q4_K_M")
        return measure("experts", file, rounds, cpus, repeats)


def attention(rounds: int, cpus: tuple[int, ...], deepest: int) -> list[Row]:
    """What the cache adds to a pass of one and of eight tokens and to a token of a prompt, of two layers, times the
    model's number of them. A cache in Q8_0 is llama.cpp's on both sides, and is filled to 4,096 tokens only."""
    shape = msgspec.structs.replace(shape_of("1.5b", 2), n_vocab=16_384)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        file = write_model(Path(folder) / "layers.gguf", shape, "Q4_K_M")
        for kind, depths in CACHES.items():
            added: dict[tuple[int, int], dict[Kernels, list[float]]] = {}
            for side in SIDES if kind == "f16" else SIDES[:1]:
                options = LoadOptions(n_ctx=deepest + 2 * PROMPT, kernels=side, type_k=kind, type_v=kind)
                model, _ = loaded(file, options, cpus)
                base: dict[int, float] = {}
                for depth in (one for one in depths if one <= deepest):
                    while len(model.sequence) < depth:
                        model.sequence.extend(tokens(PROMPT), n_outputs=1)
                    for n, repeats in ((1, 15), (8, 7), (PROMPT, 1)):
                        times = [min(passed(model, n, depth) for _ in range(repeats)) for _ in range(rounds)]
                        base.setdefault(n, statistics.median(times))
                        ms = [N_LAYER / shape.n_layer * (one - base[n]) / (n if n == PROMPT else 1) for one in times]
                        added.setdefault((depth, n), {})[side] = ms
                    model.sequence.truncate(depth)
                    say(
                        f"  attention {kind} {side} at {depth}: " + str([added[depth, n][side] for n in (1, 8, PROMPT)])
                    )
                model.free()
            for (depth, n), found in added.items():
                what = "a token of a prompt" if n == PROMPT else f"a pass of {n}"
                if depth:
                    name = f"attention: added to {what} at {depth:,}, {kind.upper()}"
                    rows.append(Row(name, "ms", found["auto"], found.get("llama.cpp", ())))
    return rows


def main() -> None:
    def options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", default="", help=f"parts, of {', '.join(parts)}")
        parser.add_argument("--files", default="", help="GGUF files in place of the parts, separated by commas")
        parser.add_argument("--threads", type=int, default=default_threads())

    parts: dict[str, Callable[[], Path]] = {
        "q4_k_m": lambda: coder_pair()[0],
        "q8_0": larger_target,
        "q4_k": lambda: pure_target("q4_k"),
        "q6_k": lambda: pure_target("q6_k"),
        "0.5b": lambda: coder_pair()[1],
        "experts": Path,
        "attention": Path,
    }
    given = arguments(__doc__, options)
    where, used = machine(), instructions_used(instructions())
    if not used:
        raise MeasureError("this engine has no kernels of cpuchat's, or they do not run on this CPU")
    names = given.only.split(",") if given.only else [*parts]
    if given.files:
        parts, names = {Path(one).stem: lambda one=one: Path(one) for one in given.files.split(",")}, []
    if unknown := set(names) - set(parts):
        raise MeasureError(f"there is no part {', '.join(unknown)}; choose of {', '.join(parts)}")
    cpus = tuple(sorted(os.sched_getaffinity(0)))[: given.threads]
    rounds, repeats = (1, 2) if given.quick else (given.rounds or 3, 7)
    bindings.start()
    for name in (names or [*parts])[: 1 if given.quick and not given.only else None]:
        start, used_before = time.perf_counter(), others_seconds()
        if name == "experts":
            rows = experts(rounds, cpus, repeats)
        elif name == "attention":
            rows = attention(rounds, cpus, CACHES["f16"][1 if given.quick else 2])
        else:
            rows = measure(name, parts[name](), rounds, cpus, repeats)
        share = (others_seconds() - used_before) / (time.perf_counter() - start) / where.cores
        remarks = [f"{name}: {used}, {rounds} rounds; other programs used {share:.0%} of the CPUs"]
        report("kernels", where, rows, quick=given.quick, remarks=remarks, adds=True)


if __name__ == "__main__":
    run_main(main)
