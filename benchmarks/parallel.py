"""Several answers at once: the sum of their speeds, first tokens, and decoding while a prompt is read.

Each side is a process with the model loaded; they run in turn. Baselines: one answer alone, and with `--server` (or
`--peer`, which builds it: half an hour) llama-server of the same llama.cpp with as many slots.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import build_llama
from common import WORK, MeasureError, Row, Target, arguments, machine, report, run_main, say

from cpuchat.backend.local import LocalBackend
from cpuchat.protocol.messages import (
    Generate,
    GenerationFinished,
    LoadOptions,
    Message,
    ModelLoaded,
    Sampling,
    TextDelta,
)

MODEL = WORK / "models" / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
AT_ONCE = (2, 4, 8)
SUMS = {2: 1.7, 4: 2.8, 8: 3.5}
TOKENS, CONTEXT = 96, 5_120
TASKS = ("a CSV parser", "a hash map", "a ring buffer", "a thread pool", "a trie", "an LRU cache", "a heap", "a lexer")
GREEDY = Sampling(temperature=0.0, top_k=1)


@dataclass
class Run:
    """Seconds to the first token, and the times of all."""

    first: float
    times: list[float]


def question(task: str, before: str = "") -> tuple[Message, ...]:
    return (Message(role="user", content=f"{before}Write {task} in C, with comments."),)


async def answer(backend: LocalBackend, messages: tuple[Message, ...], n: int, times: list[float] | None = None) -> Run:
    """Answer in `n` tokens; `times` gets those of the tokens as they come."""
    start, times = time.perf_counter(), [] if times is None else times
    request = Generate(messages=messages, sampling=GREEDY, max_tokens=n, ignore_eos=True)
    async for event in backend.generate(request):
        if isinstance(event, TextDelta):
            times += [time.perf_counter()] * event.n_tokens
    if not isinstance(event, GenerationFinished):
        raise MeasureError(str(event))
    return Run(times[0] - start, times)


def rate(runs: list[Run]) -> float:
    """Tokens per second of all together, while all were written: from the last first token to the first last one."""
    start, end = max(run.times[0] for run in runs), min(run.times[-1] for run in runs)
    return sum(sum(start < at <= end for at in run.times) for run in runs) / (end - start)


@contextlib.asynccontextmanager
async def loaded(model: Path, parallel: int) -> AsyncIterator[LocalBackend]:
    backend = LocalBackend()
    try:
        events = [event async for event in backend.load(model, LoadOptions(n_ctx=CONTEXT, parallel=parallel))]
        if not isinstance(events[-1], ModelLoaded):
            raise MeasureError(str(events[-1]))
        yield backend
    finally:
        await backend.close()


@contextlib.contextmanager
def server(binary: Path, model: Path, n: int) -> Iterator[str]:
    """llama-server with `n` slots, each with the same context."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [binary, "-m", model, "-c", n * CONTEXT, "--parallel", n, "--port", port, "--no-kv-unified", "-t", 2]
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            time.sleep(0.2)
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                yield f"http://127.0.0.1:{port}"
                return
        raise MeasureError("llama-server did not start")
    finally:
        process.kill()
        process.wait()


def ask_server(url: str, task: str, n: int) -> Run:
    body = {"messages": [{"role": "user", "content": question(task)[0].content}], "stream": True, "temperature": 0}
    body |= {"max_tokens": n, "ignore_eos": True, "cache_prompt": False}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    start, times = time.perf_counter(), list[float]()
    with urllib.request.urlopen(request) as reply:
        for line in reply:
            if b'"content":"' in line:
                times.append(time.perf_counter())
    return Run(times[0] - start, times)


async def round_of(model: Path, n: int, tokens: int) -> tuple[Run, list[Run]]:
    async with loaded(model, n) as backend:
        await answer(backend, question("a loop"), 8)
        await backend.forget("")
        alone = await answer(backend, question("a stack"), tokens)
        await backend.forget("")
        return alone, await asyncio.gather(*(answer(backend, question(task), tokens) for task in TASKS[:n]))


async def beside_a_prompt(model: Path, tokens: int) -> tuple[float, float, float, float]:
    """Tokens per second of an answer while 4,000 tokens of another prompt are read, and before; and the seconds until
    they are read, beside it and alone."""
    prompt, times = "This is line after line of a file. " * 440, list[float]()
    other = "Here was row upon row in a table. " * 440
    async with loaded(model, 2) as backend:
        alone = await answer(backend, question("a heap", before=prompt), 1)
        writing = asyncio.create_task(answer(backend, question("a queue"), CONTEXT // 2, times))
        while len(times) < tokens:
            await asyncio.sleep(0.1)
        start, before = time.perf_counter(), len(times) / (times[-1] - times[0])
        reading = await answer(backend, question("a tree", before=other), 1)
        beside = sum(start < at < start + reading.first for at in times) / reading.first
        writing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await writing
    return beside, before, reading.first, alone.first


def main() -> None:
    options = arguments(
        __doc__,
        lambda parser: parser.add_argument("--server", type=Path, help="a llama-server of the pinned llama.cpp"),
        lambda parser: parser.add_argument("--peer", action="store_true", help="build llama-server"),
        lambda parser: parser.add_argument("--model", type=Path, default=MODEL),
    )
    binary = options.server or (build_llama.libraries() / "llama-server" if options.peer else None)
    where, rounds, tokens = machine(), options.rounds or (1 if options.quick else 3), 16 if options.quick else TOKENS
    sums: dict[int, list[tuple[float, float]]] = {n: [] for n in AT_ONCE}
    firsts: dict[int, list[tuple[float, float]]] = {n: [] for n in AT_ONCE}
    peers: dict[int, list[float]] = {n: [] for n in AT_ONCE}
    for number in range(rounds):
        for n in AT_ONCE:
            alone, together = asyncio.run(round_of(options.model, n, tokens))
            sums[n].append((rate(together), rate([alone])))
            firsts[n].append((max(run.first for run in together), alone.first))
            if binary is not None:
                with server(binary, options.model, n) as url, ThreadPoolExecutor(n) as pool:
                    ask_server(url, "a loop", 8)
                    peers[n].append(rate(list(pool.map(lambda task: ask_server(url, task, tokens), TASKS[:n]))))
            say(f"round {number + 1}, {n} at once: {sums[n][-1]}, first {firsts[n][-1]}, peer {peers[n][-1:]}")
    beside, before, reading, alone = zip(
        *(asyncio.run(beside_a_prompt(options.model, tokens)) for _ in range(rounds)), strict=True
    )
    rows = [
        Row("decoding while 4,000 tokens are read ÷ before", "tok/s", beside, before, Target(0.5)),
        Row("reading 4,000 tokens beside that ÷ alone", "s", reading, alone),
    ]
    for n in AT_ONCE:
        ours, alone = zip(*sums[n], strict=True)
        rows.append(Row(f"{n} at once ÷ one alone", "tok/s", ours, alone, Target(SUMS[n])))
        last, first = zip(*firsts[n], strict=True)
        rows.append(Row(f"last first token of {n} ÷ alone", "s", last, first, Target(2.0, at_least=False)))
        if peers[n]:
            rows.append(Row(f"{n} at once ÷ llama-server", "tok/s", ours, peers[n], Target(1.3)))
    report("parallel", where, rows, quick=options.quick)


if __name__ == "__main__":
    run_main(main)
