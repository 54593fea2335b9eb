"""Loading a model with a warm page cache: the worker's load against llama.cpp's own functions.

    python benchmarks/loader.py [--quick] [--rounds N] [--models 1.5b:Q8_0,...] [--threads N]

Theirs: weights, a context of the same size, one token; called through ctypes by a process that does nothing else.
Ours: the same with everything that a worker adds: header and vocabulary checked, the file looked up in the page cache,
limits described. Each side is a fresh process per round, and starts its clock when the library is loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import models
from common import MeasureError, Row, Target, alternate, arguments, machine, report, run_main, say
from product import default_threads

N_CTX = 4096


def ours(file: Path, threads: int) -> dict[str, float]:
    from cpuchat.engine.llama import bindings
    from cpuchat.engine.llama.model import Model
    from cpuchat.protocol.messages import LoadOptions

    bindings.start()
    cpus = tuple(sorted(os.sched_getaffinity(0)))[:threads]
    start, used = time.perf_counter(), time.process_time()
    Model.load(file, LoadOptions(n_ctx=N_CTX), cpus, on_progress=lambda *_: None, abort=bindings.AbortFlag())
    return {"wall": time.perf_counter() - start, "cpu": time.process_time() - used}


def theirs(file: Path, threads: int) -> dict[str, float]:
    from cpuchat.engine.llama import bindings

    bindings.start()
    llama = bindings.llama
    start, used = time.perf_counter(), time.process_time()
    model = llama.llama_model_load_from_file(os.fsencode(file), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = N_CTX, threads, threads
    params.n_batch = params.n_ubatch = 512
    context = llama.llama_init_from_model(model, params)
    batch = llama.llama_batch_get_one((llama.llama_token * 1)(1), 1)
    if llama.llama_decode(context, batch):
        raise MeasureError("llama.cpp did not evaluate the token")
    return {"wall": time.perf_counter() - start, "cpu": time.process_time() - used}


def in_a_process(side: str, file: Path, threads: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--side", side, "--models", str(file), "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise MeasureError(f"{side}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def after_another(side: str, file: Path, threads: int) -> dict[str, float]:
    """Right after a load that does not count: a virtual machine may have to get memory from its host first."""
    in_a_process("theirs", file, threads)
    return in_a_process(side, file, threads)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default="0.5b:Q4_K_M,1.5b:Q8_0")
    parser.add_argument("--threads", type=int, default=0, help="for both sides (0: cpuchat's choice)")
    parser.add_argument("--side", choices=("ours", "theirs"), help=argparse.SUPPRESS)


def main() -> None:
    options = arguments(__doc__, _options)
    if options.side:
        measured = {"ours": ours, "theirs": theirs}[options.side](Path(options.models), options.threads)
        print(json.dumps(measured))
        return
    where = machine()
    threads = options.threads or default_threads()
    rows = []
    for chosen in options.models.split(",")[: 1 if options.quick else None]:
        file = models.model(*chosen.split(":"))
        say(file.name)
        file.read_bytes()  # into the page cache
        sides = {side: lambda s=side, f=file: after_another(s, f, threads) for side in ("theirs", "ours")}
        runs = alternate(options.rounds or (1 if options.quick else 7), sides)
        for figure, target in (("wall", Target(1.1, False)), ("cpu", None)):
            values = {side: [run[figure] for run in runs[side]] for side in runs}
            what = f"{chosen}: load, {'time' if figure == 'wall' else 'CPU time'}"
            rows.append(Row(what, "s", values["ours"], values["theirs"], target))
    report("loader", where, rows, quick=options.quick, remarks=[f"{threads} threads on both sides"])


if __name__ == "__main__":
    run_main(main)
