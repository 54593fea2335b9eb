"""Measure whether the app grows while it is used: after 5,000 answers, and with each hour of chatting.

    python benchmarks/memory.py [--quick] [--answers 5000]

The whole app, headless at 120 by 40, with its store; a backend without a worker writes answers of mixed Markdown as
fast as they are shown. "5,000 answers" are in chats of 50, and every 100 of them settings and hardware are opened and
closed: compared are 500 and 5,000. "One hour" is one chat of 120 answers of 300 tokens, what a model writes at 10
tok/s, and then a new chat: compared are the first and the third. What grew is divided by the text that was stored
meanwhile. RSS is taken after a garbage collection and a trim of the heap; objects of Python are counted by
tracemalloc, which is slow, over a fifth of the answers. The screen that was closed last may be held by a finished task.

About 12 minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import tracemalloc
import weakref
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from common import MeasureError, Row, Target, arguments, machine, report, run_main
from paced_worker import tokens
from terminal import environment

from cpuchat.telemetry.units import plural

ROOT = Path(__file__).parent.parent
PER_CHAT, PER_SCREENS = 50, 100
HOUR, HOUR_TOKENS, TOKENS = 120, 300, 100  # answers of an hour, and tokens of an answer in it, or else
FIRST = 10  # the first tenth is not counted
TRACED = 5  # a fifth of the answers
SECONDS = 60.0


class Use:
    """The running app, and what is done with it."""

    def __init__(self, app: Any, pilot: Any, write: Callable[[int], None]) -> None:
        self.app, self.pilot, self._write = app, pilot, write
        self.conversation = app.conversation
        self.n_stored = 0  # characters
        self.screens: list[weakref.ref[Any]] = []

    async def answer(self, n_tokens: int) -> None:
        self._write(n_tokens)
        conversation, screen = self.conversation, self.app.chat_screen
        messages = len(conversation.messages) + 2
        screen.submit("How fast could it be?")
        await until(lambda: len(conversation.messages) == messages and not screen.busy)
        if not conversation.messages[-1].stop_reason:
            raise MeasureError("an answer has no end")
        self.n_stored += sum(len(message.content) for message in conversation.messages[-2:])

    async def new_chat(self) -> None:
        self.app.chat_screen.action_new_chat()
        await until(lambda: self.conversation.chat is None)

    async def open_screens(self) -> None:
        chat = self.app.chat_screen
        for action in ("settings", "hardware"):
            await chat.run_action(action)
            await until(lambda: self.app.screen is not chat)
            self.screens.append(weakref.ref(self.app.screen))
            await self.pilot.press("escape")
            await until(lambda: self.app.screen is chat)

    async def memory(self) -> float:
        """Bytes: RSS, or those of Python's objects if they are traced."""
        await self.pilot.pause()
        gc.collect()
        if tracemalloc.is_tracing():
            return tracemalloc.get_traced_memory()[0]
        with contextlib.suppress(OSError, AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
        return psutil.Process().memory_info().rss


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


async def many_answers(use: Use, count: int) -> dict[str, float]:
    before, stored = 0.0, 0
    for number in range(count):
        if number % PER_CHAT == 0:
            await use.new_chat()
        if number % PER_SCREENS == 0:
            await use.open_screens()
        if number == count // FIRST:
            before, stored = await use.memory(), use.n_stored
        await use.answer(TOKENS)
    await use.new_chat()
    return {"grown": await use.memory() - before, "stored": use.n_stored - stored}


async def hours(use: Use, answers: int) -> dict[str, float]:
    before, stored = 0.0, 0
    for hour in range(3):
        for _ in range(answers):
            await use.answer(HOUR_TOKENS)
        await use.new_chat()
        if hour == 0:
            before, stored = await use.memory(), use.n_stored
    return {"grown": await use.memory() - before, "stored": use.n_stored - stored}


async def child(options: argparse.Namespace) -> dict[str, float]:
    sys.path.insert(0, str(ROOT))

    from cpuchat.base import paths
    from cpuchat.chats.store import ChatStore
    from cpuchat.config import settings
    from cpuchat.models.library.library import Library
    from cpuchat.protocol.messages import AnyEvent, Generate, GenerationFinished, PrefillProgress, TextDelta
    from cpuchat.session.conversation import Conversation
    from cpuchat.tui.app import ChatApp
    from tests.support.scripted_backend import MODEL, ScriptedBackend, Step, timings

    class Writer(ScriptedBackend):
        """Writes answers of `n_tokens`, and remembers no request."""

        n_tokens = TOKENS

        def generate(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
            pieces = tokens(self.n_tokens)
            steps: list[Step] = [PrefillProgress(request_id=1, processed=42, total=42, cache_n=0)]
            for start in range(0, len(pieces), 8):
                some = pieces[start : start + 8]
                written = start + len(some)
                steps.append(
                    TextDelta(
                        request_id=1, text="".join(some), n_tokens=len(some), predicted_n=written,
                        at_ms=210.0 + 25 * written,
                    )
                )  # fmt: skip
            steps.append(GenerationFinished(request_id=1, stop_reason="end", timings=timings(len(pieces))))
            return self._play(steps)

    backend = Writer()
    conversation = Conversation(settings=settings.load(), backend=backend, store=ChatStore(paths.chats_db()))
    app = ChatApp(conversation, Library(()), Path(MODEL.path))
    if options.traced:
        tracemalloc.start()
    async with app.run_test(size=(120, 40)) as pilot:
        await until(lambda: conversation.model is not None and not app.chat_screen.busy)
        use = Use(app, pilot, lambda count: setattr(backend, "n_tokens", count))
        found = await (many_answers(use, options.answers) if options.child == "answers" else hours(use, options.hour))
        found["screens"] = sum(ref() is not None for ref in use.screens)
        await app.action_quit()
    return found


@dataclass(frozen=True)
class Job:
    kind: str
    answers: int
    hour: int
    traced: bool

    @property
    def title(self) -> str:
        answers = f"{self.answers:,} answers against {self.answers // FIRST:,}"
        what = answers if self.kind == "answers" else f"the third hour of {plural(self.hour, 'answer')}"
        return f"{what}: {'objects of Python' if self.traced else 'RSS'}"


def measured(job: Job) -> dict[str, float]:
    """Run the app in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder:
        command = [
            sys.executable,
            __file__,
            "--child",
            job.kind,
            "--answers",
            str(job.answers),
            "--hour",
            str(job.hour),
        ]
        command += ["--traced"] if job.traced else []
        done = subprocess.run(command, env=environment(Path(folder)), capture_output=True, text=True)
    if done.returncode:
        raise MeasureError(f"the app failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--answers", type=int, default=0, help="how many (0: 5,000, quick 200)")
    parser.add_argument("--hour", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--traced", action="store_true", help=argparse.SUPPRESS)


def main() -> None:
    options = arguments(__doc__, _options)
    if options.child:
        print(json.dumps(asyncio.run(child(options))))
        return
    where = machine()
    answers, hour = options.answers or (200 if options.quick else 5000), 10 if options.quick else HOUR
    jobs = [
        Job("answers", answers, hour, traced=False),
        Job("answers", answers // TRACED, hour, traced=True),
        Job("hours", answers, hour, traced=False),
        Job("hours", answers, hour // TRACED, traced=True),
    ]
    rows: list[Row] = []
    with ThreadPoolExecutor(2) as two:  # memory does not depend on what else runs
        for job, found in zip(jobs, two.map(measured, jobs), strict=True):
            note = f"{found['grown'] / 1e6:+.2f} MB, {found['stored'] / 1e6:.2f} MB of text stored"
            growth = found["grown"] / found["stored"]
            rows.append(Row(job.title, "× the text", [growth], (), Target(1, at_least=False), note))
            if job.kind == "answers" and job.traced:
                closed = found["screens"]
                rows.append(Row("closed screens that are still in memory", "", [closed], (), Target(1, at_least=False)))
    report("memory", where, rows, quick=options.quick)


if __name__ == "__main__":
    run_main(main)
