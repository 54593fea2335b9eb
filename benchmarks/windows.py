"""Check that sliding windows save the memory that they should: the KV cache of a Gemma-shaped 27B at 131,072 tokens.

    python benchmarks/windows.py [--quick]

The prediction for the whole shape is by its header. A thinner one, with the same pattern (1024 tokens, in 5 of 6
layers) and the same context, is written with random weights and loaded: the cache predicted against what llama.cpp
logs of its buffers, and all that is predicted but the mapped weights against the private resident memory.

About 20 seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import psutil
from common import MeasureError, Row, Target, arguments, machine, report, run_main

from cpuchat.models import fit
from cpuchat.models.synthetic.model import SHAPES, header_of, write_model

WHOLE = SHAPES["27b-gemma3"]
THIN = msgspec.structs.replace(WHOLE, name="thin", n_layer=6, n_embd=512, n_head=16, n_ff=1024, n_vocab=2048)
N_CTX = 131_072


def child(file: Path, n_ctx: int) -> dict[str, float]:
    """Return the bytes that are predicted and logged of the cache, predicted and resident of the process."""
    from cpuchat.engine.llama import bindings
    from cpuchat.engine.llama.bindings import AbortFlag
    from cpuchat.engine.llama.model import Model
    from cpuchat.protocol.messages import LoadOptions

    options = LoadOptions(n_ctx=n_ctx)
    model = Model.load(file, options, (0,), on_progress=lambda *_: None, abort=AbortFlag())
    logged = [line for line in bindings.log.lines() if "KV buffer size" in line]
    memory = psutil.Process().memory_info()  # llama.cpp has written zeros to all of the cache
    model.free()
    return {
        "predicted": model.plan.need.kv,
        "private": model.plan.need.kv + model.plan.need.compute,
        "logged": sum(float(line.rpartition("=")[2].split()[0]) for line in logged) * 2**20,
        "resident": memory.rss - memory.shared,
    }


def measured(file: Path, n_ctx: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", str(file), str(n_ctx)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MeasureError(done.stderr.strip().rpartition("\n")[2])
    return json.loads(done.stdout)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(Path(sys.argv[2]), int(sys.argv[3]))))
        return
    options: argparse.Namespace = arguments(__doc__)
    where, n_ctx = machine(), N_CTX // 8 if options.quick else N_CTX
    header = header_of(WHOLE)
    with tempfile.TemporaryDirectory() as folder:
        file = write_model(Path(folder) / "thin-Q8_0.gguf", THIN, "Q8_0")
        found = measured(file, n_ctx)
    whole = n_ctx * sum(fit.kv_by_window(header).values())
    rows = [
        Row(f"KV cache of {WHOLE.name} at {n_ctx:,} tokens, without windows", "GB",
            [fit.kv_bytes(header, n_ctx) / 1e9], [whole / 1e9], Target(0.2, at_least=False)),
    ]  # fmt: skip
    thin = f"{THIN.n_layer} thin layers at {n_ctx:,} tokens"
    for what, ours, theirs in (
        (f"KV cache of {thin}, predicted and logged", "predicted", "logged"),
        (f"process with {thin}, predicted and resident", "private", "resident"),
    ):
        for target in (Target(1.0), Target(1.25, at_least=False)):
            rows.append(Row(what, "MB", [found[ours] / 1e6], [found[theirs] / 1e6], target))
    report("windows", where, rows, quick=options.quick)


if __name__ == "__main__":
    run_main(main)
