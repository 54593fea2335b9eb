"""A quantized KV cache (Q8_0) with an F16 one: prefill of 512 tokens and decoding, at depths of 0 and 4,096 tokens.

    python benchmarks/kv_types.py [--quick] [--rounds N]

The Coder 1.5B in Q4_K_M (`coder_pair.py`), loaded twice in one process, on the same pinned threads, in turn. Attention
over a quantized cache has no tiled path in llama.cpp: `models.traffic` takes what a prompt's token costs from here.
"""

from __future__ import annotations

import os
import time

from coder_pair import coder_pair
from common import Row, alternate, arguments, machine, report, run_main
from product import default_threads

from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.model import Model
from cpuchat.protocol.messages import LoadOptions

DEPTHS, PROMPT, DECODED = (0, 4096), 512, 6


def tokens(n: int) -> list[int]:
    return [(i * 7919) % 20_000 + 100 for i in range(n)]


def measured(model: Model, depth: int) -> dict[str, float]:
    """Return the rates of a prompt and of single tokens behind `depth` tokens that the cache holds."""
    sequence, rates = model.sequence, {}
    for name, n, repeats in (("prefill", PROMPT, 1), ("decode", 1, DECODED)):
        times = []
        for _ in range(repeats):
            sequence.truncate(depth)
            start = time.perf_counter()
            sequence.extend(tokens(n), n_outputs=1)
            times.append(time.perf_counter() - start)
        rates[name] = n / min(times)
    model.pool.rest()  # else its threads spin beside those of the other side
    return rates


def main() -> None:
    given, where = arguments(__doc__), machine()
    target, _ = coder_pair()
    cpus = tuple(sorted(os.sched_getaffinity(0)))[: default_threads()]
    bindings.start()
    models: dict[str, Model] = {}
    for kind in ("q8_0", "f16"):
        options = LoadOptions(n_ctx=DEPTHS[-1] + 2 * PROMPT, type_k=kind, type_v=kind)
        models[kind] = Model.load(target, options, cpus, on_progress=lambda *_: None, abort=bindings.AbortFlag())
        for _ in range(0, DEPTHS[-1], PROMPT):
            models[kind].sequence.extend(tokens(PROMPT), n_outputs=1)
        models[kind].pool.rest()
    rows: list[Row] = []
    for depth in reversed(DEPTHS):  # what is deep is there already
        sides = {kind: lambda kind=kind: measured(models[kind], depth) for kind in models}  # noqa: B023
        found = alternate(1 if given.quick else given.rounds or 4, sides)
        rows += [
            Row(f"{what} at {depth:,}", "tok/s", *([one[what] for one in found[kind]] for kind in ("q8_0", "f16")))
            for what in ("prefill", "decode")
        ]
    report("kv_types", where, rows, quick=given.quick, remarks=["cpuchat: Q8_0 for K and V; baseline: F16"])


if __name__ == "__main__":
    run_main(main)
