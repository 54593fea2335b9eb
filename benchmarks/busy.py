"""Decoding beside other busy programs, and while the CPUs that the worker may use become fewer and more again.

    python benchmarks/busy.py [--quick] [--rounds N] [--model FILE]

The real worker decodes without drafts on all CPUs: alone, beside one and beside two programs that compute without a
pause (`while True: pass`, nice 0), in turn. Then the worker's CPUs go from all to one and back within an answer, as in
a container whose cpuset is changed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import models
import psutil
from common import Row, T, Target, alternate, arguments, machine, report, run_main, say

from cpuchat.backend.local import LocalBackend
from cpuchat.protocol.messages import (
    Failed,
    Generate,
    GenerationFinished,
    LoadOptions,
    Message,
    Sampling,
    TextDelta,
)

GREEDY = Sampling(temperature=0.0)
PROGRAMS = (1, 2)
SETTLE, SPAN = 1.5, 4.0  # seconds before a span that is measured, and of it
IDLE, MAX_DISTURBED = 10.0, 0.08  # percent of all CPUs before a run; CPUs that other programs use during one
BESIDE = {1: Target(0.55), 2: Target(0.4)}


class Chat:
    """A worker with the model, and an event loop to ask it from."""

    def __init__(self, file: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self.backend = LocalBackend()
        self._loop.run_until_complete(self._load(file))

    async def _load(self, file: Path) -> None:
        async for event in self.backend.load(file, LoadOptions(n_ctx=4096)):
            if isinstance(event, Failed):
                raise SystemExit(event.message)

    def decode(self, at: dict[float, Callable[[], None]], spans: dict[str, tuple[float, float]]) -> dict[str, float]:
        """Answer until the last span is over; call what `at` says after so many seconds. Returns tok/s per span."""
        return self._loop.run_until_complete(self._decode(at, spans))

    async def _decode(
        self, at: dict[float, Callable[[], None]], spans: dict[str, tuple[float, float]]
    ) -> dict[str, float]:
        asked = (Message(role="user", content="Count upwards without an end."),)
        request = Generate(messages=asked, sampling=GREEDY, max_tokens=0, ignore_eos=True)
        counts, due, start, n = [(0.0, 0)], sorted(at), 0.0, 0
        async for event in self.backend.generate(request):
            if isinstance(event, TextDelta):
                start = start or time.perf_counter()
                now, n = time.perf_counter() - start, n + event.n_tokens
                counts.append((now, n))
                while due and now >= due[0]:
                    at[due.pop(0)]()
                if now > max(end for _, end in spans.values()):
                    await self.backend.cancel()
            elif isinstance(event, GenerationFinished) and event.note:
                print(event.note, file=sys.stderr)
        found: dict[str, float] = {}
        for name, (first, last) in spans.items():
            inside = [(moment, count) for moment, count in counts if first <= moment <= last]
            found[name] = (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])
        return found

    def close(self) -> None:
        self._loop.run_until_complete(self.backend.close())


def cpu_seconds() -> dict[int, float]:
    """The CPU time of each process that is not one of ours."""
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    found: dict[int, float] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in own:
                times = process.cpu_times()
                found[process.pid] = times.user + times.system
    return found


def undisturbed(run: Callable[[], T]) -> T:
    """Run until no other program has computed meanwhile; four times at most."""
    tries = 0
    while True:
        while psutil.cpu_percent(0.5) > IDLE:
            pass
        before, start, tries = cpu_seconds(), time.perf_counter(), tries + 1
        result = run()
        used = sum(max(0.0, now - before.get(pid, now)) for pid, now in cpu_seconds().items())
        if used < MAX_DISTURBED * (time.perf_counter() - start) or tries == 4:
            return result
        say(f"  disturbed: other programs used {used:.1f} s of CPU time")


def beside(chat: Chat, programs: int, span: float) -> float:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(programs)]
    try:
        return chat.decode({}, {"rate": (SETTLE, SETTLE + span)})["rate"]
    finally:
        for other in others:
            other.kill()
            other.wait()


def shrinking(chat: Chat, span: float) -> dict[str, float]:
    """Decode on all CPUs, on one, and on all again."""
    pid, cpus = chat.backend.pid, sorted(os.sched_getaffinity(0))
    assert pid is not None

    def allow(allowed: list[int]) -> None:
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), allowed)

    at = {span: lambda: allow(cpus[-1:]), 2 * span: lambda: allow(cpus)}
    spans = {"before": (0.5, span), "one": (span, 2 * span), "after": (2 * span + 1.0, 3 * span)}
    return chat.decode(at, spans)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=models.FOLDER / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf")


def main() -> None:
    options = arguments(__doc__, _options)
    where, span = machine(), 2.0 if options.quick else SPAN
    chat = Chat(options.model)
    try:
        runs_of: dict[str, Callable[[], object]] = {str(n): lambda n=n: beside(chat, n, span) for n in (0, *PROGRAMS)}
        runs_of["cpuset"] = lambda: shrinking(chat, span)
        sides = {name: lambda run=run: undisturbed(run) for name, run in runs_of.items()}
        runs = alternate(options.rounds or (1 if options.quick else 4), sides, settle=0.5)
    finally:
        chat.close()
    rows = [
        Row(f"beside {n} busy program{'s' * (n > 1)} ÷ alone", "tok/s", runs[str(n)], runs["0"], BESIDE[n])
        for n in PROGRAMS
    ]
    before = [run["before"] for run in runs["cpuset"]]
    for name, what, least in (("one", "while one CPU is allowed", 0.45), ("after", "all CPUs allowed again", 0.95)):
        rows.append(Row(f"{what} ÷ before", "tok/s", [run[name] for run in runs["cpuset"]], before, Target(least)))
    report("busy", where, rows, quick=options.quick)


if __name__ == "__main__":
    run_main(main)
