"""A llama-server with an EAGLE-3 head of random weights: tok/s by draft depth at known acceptance rates.

    python benchmarks/heads.py [--quick] [--rounds N] [--model 1.5b:Q4_K_M] [--threads N]

The head has the usual sizes (one layer, 32,768 draft tokens); llama-server accepts its drafts at the given rate per
token (`--spec-synth-rates`), so that the costs of drafting and verifying are real and the gain is known.

- tok/s at depths 1 to 7 against plain decoding, acceptance 0.6 and 0.8: for the depths of `backend.heads.options`
- at depth 3, waiting threads that sleep (`--poll 0`, as cpuchat starts it) against those that spin (`--poll 50`)

Takes about 9 minutes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import models
from baselines import llama_server
from common import Row, Target, alternate, arguments, machine, report, run_main, say
from eagle3 import write_eagle3
from product import default_threads

from cpuchat.backend.heads.server import cpu_mask

DEPTHS = (1, 2, 3, 5, 7)
RATES = (0.6, 0.8)
N_CTX = 2048


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="1.5b:Q4_K_M")
    parser.add_argument("--threads", type=int, default=0, help="of the server (0: cpuchat's choice)")


def main() -> None:
    options = arguments(__doc__, _options)
    where, file, quick = machine(), models.model(*options.model.split(":"), llama=True), options.quick
    threads = options.threads or default_threads()
    tokens, rounds = 32 if quick else 128, options.rounds or (1 if quick else 5)
    mask = cpu_mask(sorted(os.sched_getaffinity(0))[:threads])
    prompt = models.words(64, salt=6)
    say(f"{file.name}, {threads} threads")
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as name:
        folder = Path(name)
        head = folder / "eagle3-random.gguf"
        write_eagle3(head, file)

        def rate(depth: int, accepted: float = 0.0, poll: int = 0) -> float:
            extra = ["--cpu-mask", mask, "--cpu-strict", "1", "--poll", str(poll), "--cache-ram", "0"]
            if depth:
                rates = ",".join(f"{accepted**n:.4f}" for n in range(1, depth + 1))
                extra += ["--spec-type", "draft-eagle3", "--spec-draft-model", str(head)]
                extra += ["--spec-draft-n-max", str(depth), "--spec-synth-rates", rates]
            log = folder / "server.log"
            with llama_server(file, threads=threads, n_ctx=N_CTX, log=log, extra=extra) as server:
                server.complete(prompt, 8)
                return server.complete(prompt, tokens).rate

        sides = {"plain": lambda: rate(0)}
        depths = DEPTHS[2:3] if quick else DEPTHS
        for accepted in RATES:
            for depth in depths:
                sides[f"{accepted:g} {depth}"] = lambda depth=depth, accepted=accepted: rate(depth, accepted)
        sides["spinning"] = lambda: rate(3, RATES[-1], 50)
        runs = alternate(rounds, sides)
    rows = [
        Row(f"acceptance {accepted:g}, depth {depth}", "tok/s", runs[f"{accepted:g} {depth}"], runs["plain"])
        for accepted in RATES
        for depth in depths
    ]
    sleeping = runs[f"{RATES[-1]:g} 3"]
    rows.append(Row("depth 3, waiting threads that sleep", "tok/s", sleeping, runs["spinning"], Target(1.0)))
    report("heads", where, rows, quick=quick, remarks=[f"{file.name}, {threads} threads"])


if __name__ == "__main__":
    run_main(main)
