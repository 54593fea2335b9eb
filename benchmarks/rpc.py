"""One model in two processes of this machine by llama.cpp's RPC: what it costs, and whether the plan's formula holds.

    python benchmarks/build_llama.py --rpc
    python benchmarks/rpc.py [--quick] [--rounds N] [--model 0.5b:Q4_K_M]

- tok/s with half of the layers on a worker, against all of them in one process, on one core each, in turn
- bytes and round trips for a token, through a proxy that counts, against `planner.network`

Takes about 3 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import models
from build_llama import tool
from common import MeasureError, Row, Target, alternate, arguments, machine, report, run_main, say
from product import answer
from proxy import Proxy

from cpuchat.backend.heads.backend import HeadBackend
from cpuchat.backend.heads.server import free_port
from cpuchat.backend.process import Spawner
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.models.gguf.header import read_model
from cpuchat.planner.plan import traffic
from cpuchat.protocol.messages import Failed, LoadOptions

N_CTX = 2048
PROMPT_WORDS = 64


class Counts(Proxy):
    """Bytes to a worker and back, and how often the direction turned."""

    def __init__(self, worker: int) -> None:
        self.there = self.back = self.turns = 0
        self._to_worker = True
        self._lock = threading.Lock()
        super().__init__(worker)

    def now(self) -> tuple[int, int, int]:
        with self._lock:
            return self.there, self.back, self.turns

    def passed(self, data: bytes, to_target: bool) -> None:
        with self._lock:
            if to_target:
                self.there += len(data)
            else:
                self.back += len(data)
                self.turns += self._to_worker
            self._to_worker = to_target


@contextlib.contextmanager
def rpc_worker(cpu: int, log: Path) -> Iterator[int]:
    """Run an rpc-server on one CPU; yields its port. Raises MeasureError when it does not listen."""
    port = free_port()
    command = ["taskset", "-c", str(cpu), str(tool("ggml-rpc-server", rpc=True)), "--port", str(port), "--threads", "1"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        for _ in range(100):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.05)
        else:
            raise MeasureError(f"no rpc-server: {log.read_text(errors='replace')[-500:]}")
        yield port
    finally:
        process.kill()
        process.wait()


async def loaded(spawner: Spawner, folder: Path, file: Path, cpu: int, port: int = 0, layers: int = 0) -> HeadBackend:
    """Return a llama-server on one CPU, with `layers` on the worker at `port`. Raises MeasureError."""
    backend = HeadBackend(spawner, folder)
    rpc = f"127.0.0.1:{port}" if port else ""
    options = LoadOptions(n_ctx=N_CTX, rpc=rpc, rpc_layers=layers)
    async for event in backend.load(file, options, PlacementSpec(cores=str(cpu))):
        if isinstance(event, Failed):
            await backend.close()
            raise MeasureError(f"{event.message} {event.hint}")
    return backend


def counted(runner: asyncio.Runner, backend: HeadBackend, counts: Counts, tokens: int) -> list[float]:
    """Return bytes there, bytes back and round trips for each further token of an answer."""
    prompt, ends = models.words(PROMPT_WORDS, salt=8), []
    for n in (1, 1, tokens + 1):  # the first one evaluates the prompt
        before = counts.now()
        runner.run(answer(backend, prompt, n))
        ends.append([after - one for after, one in zip(counts.now(), before, strict=True)])
    return [(long - short) / tokens for short, long in zip(*ends[1:], strict=True)]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="0.5b:Q4_K_M")


def main() -> None:
    options = arguments(__doc__, _options)
    where, file, quick = machine(), models.model(*options.model.split(":")), options.quick
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        raise MeasureError("two processes need two CPUs")
    tokens, rounds = 32 if quick else 128, options.rounds or (1 if quick else 7)
    header = read_model(file)
    layers, prompt = header.n_layer // 2, models.words(PROMPT_WORDS, salt=9)
    os.environ["PATH"] = f"{tool('llama-server', rpc=True).parent}{os.pathsep}{os.environ['PATH']}"
    say(f"{file.name}, {layers} of {header.n_layer} layers on the worker")
    spawner = Spawner()
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as name, asyncio.Runner() as runner:
        folder = Path(name)
        with rpc_worker(cpus[1], folder / "worker.log") as port:
            alone = runner.run(loaded(spawner, folder, file, cpus[0]))
            over = runner.run(loaded(spawner, folder, file, cpus[0], port, layers))

            def rate(backend: HeadBackend) -> float:
                return runner.run(answer(backend, prompt, tokens)).rate

            runs = alternate(rounds, {"over": lambda: rate(over), "alone": lambda: rate(alone)})
            runner.run(over.close())
            runner.run(alone.close())
            counts = Counts(port)
            through = runner.run(loaded(spawner, folder, file, cpus[0], counts.port, layers))
            there, back, turns = counted(runner, through, counts, tokens)
            runner.run(through.close())
            counts.close()
    spawner.close()
    formula = traffic(header.n_embd, 1, PROMPT_WORDS + tokens / 2)
    note = f"counted {there / 1e3:.1f} kB there, {back / 1e3:.1f} kB back"
    rows = [
        Row("tok/s over a worker, against one process", "tok/s", runs["over"], runs["alone"]),
        Row("bytes per token by the formula, against counted", "kB", [formula / 1e3], [(there + back) / 1e3],
            Target(1.0), note),
        Row("round trips per token", "", [turns], target=Target(1.1, False)),
    ]  # fmt: skip
    report("rpc", where, rows, quick=quick, remarks=[f"{file.name}, {layers} of {header.n_layer} layers on the worker"])


if __name__ == "__main__":
    run_main(main)
