"""What saving a chat's KV to disk costs: the messages that follow, the disk, and the engine's thread.

    python benchmarks/idle_save.py [--quick] [--rounds N] [--model 1.5b:Q8_0] [--rest SECONDS]

After an answer: a message sent at once against one sent after a rest, in a worker with the server's own timing; what
an answer leaves to be done in the background would make the first one wait.

Leaving a chat: the first message of a new chat, with the chat before to be saved (its state is copied in memory first)
against one that has no name and is not saved. Return: the first message in a saved chat, whose state is read again.

Bytes: an hour of three chats that grow to 8,000 tokens, with a change of chat before every answer. The hour is the
write budget's, on a clock of this script; the bytes are those that this process gave to the kernel (/proc/self/io).
The chats hold the same words, so what one has computed serves the others: each is saved by itself all the same.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import models
import psutil
from common import MeasureError, Row, Target, alternate, arguments, machine, report, run_main
from product import GREEDY, answer, worker

from cpuchat.backend.local import LocalBackend
from cpuchat.engine.engine import Engine
from cpuchat.engine.states.files import WriteBudget
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.protocol.messages import Event, Failed, Generate, GenerationFinished, LoadModel, LoadOptions
from cpuchat.protocol.timings import Timings

N_CTX = 8192
HISTORY, LONGEST, NEW, SHORT = 4000, 8000, 32, 4
HOUR, ANSWERS, CHATS = 3600.0, 60, 3
MB = 1e6


async def _two_turns(backend: LocalBackend, history: str, number: int, rest: float) -> float:
    """Milliseconds to the first text of a message that comes `rest` seconds after an answer."""
    for half in range(2):
        if half:
            await asyncio.sleep(rest)
        done = await answer(backend, history + models.words(NEW, salt=100 + 2 * number + half), SHORT, chat_id="chat")
    return done.first_ms


def after_an_answer(file: Path, rounds: int, history: int, rest: float) -> Row:
    prompt = models.words(history, salt=1)
    numbers = iter(range(1_000_000))
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder, asyncio.Runner() as runner:
        context = worker(file, LoadOptions(n_ctx=N_CTX), state_dir=Path(folder))
        backend = runner.run(context.__aenter__())
        try:
            runner.run(_two_turns(backend, prompt, next(numbers), 0.0))  # not counted: computes the history
            sides = {
                name: lambda seconds=seconds: runner.run(_two_turns(backend, prompt, next(numbers), seconds))
                for name, seconds in (("at once", 0.0), ("after a rest", rest))
            }
            runs = alternate(rounds, sides)
        finally:
            runner.run(context.__aexit__(None, None, None))
    what = f"message right after an answer, {history} tokens of history"
    note = f"the baseline is the same message {rest:g} s after the answer"
    return Row(what, "ms", runs["at once"], runs["after a rest"], Target(1.1, False), note)


class _Engine:
    """An engine in this process, whose hours pass as `now` says."""

    def __init__(self, file: Path, folder: Path) -> None:
        self.now = 0.0
        self.last: Event | None = None
        self._folder = folder
        self._engine = Engine(self._take, WriteBudget(clock=lambda: self.now))
        options = LoadOptions(n_ctx=N_CTX)
        self._engine.load(LoadModel(path=str(file), cpus=own_cpus(), options=options, state_dir=str(folder)))
        self._check()

    def _take(self, event: Event) -> None:
        self.last = event

    def _check(self) -> None:
        if isinstance(self.last, Failed):
            raise MeasureError(f"{self.last.message} {self.last.hint}")

    def ask(self, prompt: str, chat_id: str) -> Timings:
        self._engine.generate(Generate(request_id=1, prompt=prompt, chat_id=chat_id, sampling=GREEDY, max_tokens=SHORT))
        self._check()
        assert isinstance(self.last, GenerationFinished)
        return self.last.timings

    @property
    def saved(self) -> set[str]:
        """The names of the chats on the disk."""
        return {file.name for file in self._folder.glob("*.text")}

    def settle(self, besides: set[str] | None = None) -> None:
        """Wait until the disk has what is on its way there, and a chat `besides` these, if given.

        An old chat may be deleted to make room for it, so their number says nothing.

        Raises:
            MeasureError: it has not within a minute.
        """
        end = time.monotonic() + 60.0
        while (besides is not None and self.saved <= besides) or any(self._folder.glob(".*")):
            if time.monotonic() > end:
                raise MeasureError("a chat that was left is not saved")
            time.sleep(0.01)

    def close(self) -> None:
        self._engine.close()


def leaving(engine: _Engine, rounds: int, history: int) -> list[Row]:
    """The first message of a new chat after one of `history` tokens, saved or not, and the way back."""
    prompt = models.words(history, salt=1)
    engine.ask(prompt, "long")
    numbers = iter(range(1_000_000))
    back: list[float] = []

    def leave(named: bool) -> float:
        number = next(numbers)
        engine.now += HOUR  # the budget allows it
        back.append(engine.ask(prompt, "long").ttft_ms)
        engine.settle()  # a chat that is left while another is being written is not saved
        chats = engine.saved if named else None
        engine.ask(prompt, f"copy {history} {number}" if named else "")
        engine.settle()
        first = engine.ask(models.words(2, salt=1000 + number), "").ttft_ms
        engine.settle(chats)
        return first

    leave(named=True)  # saves "long"
    back.clear()
    runs = alternate(rounds, {"saved": lambda: leave(named=True), "not saved": lambda: leave(named=False)}, settle=1.0)
    held = [saved - plain for saved, plain in zip(runs["saved"], runs["not saved"], strict=True)]
    size = f"{history} tokens"
    return [
        Row(f"first message of a new chat, leaving one of {size} to be saved", "ms", runs["saved"], runs["not saved"]),
        Row(f"of it, longer by the copy of {size}", "ms", held, target=Target(100, False)),
        Row(f"first message back in a saved chat of {size}", "ms", back),
    ]


def an_hour(engine: _Engine, longest: int) -> Row:
    """Bytes written for each answer, of three chats that grow from a quarter of `longest` tokens."""
    io = psutil.Process()
    before, largest = io.io_counters().write_chars, 0
    first = longest // 4
    for number in range(ANSWERS):
        turn = number // CHATS
        length = first + (longest - first) * turn // (ANSWERS // CHATS - 1)
        largest = max(largest, engine.ask(models.words(length, salt=1), f"hour {number % CHATS}").n_past)
        engine.settle()
        engine.now += HOUR / ANSWERS
    written = io.io_counters().write_chars - before
    note = f"{written / MB:.0f} MB in {ANSWERS} answers; the longest chat came to {largest} tokens"
    what = "written to disk per answer in an hour"
    return Row(what, "MB", [written / ANSWERS / MB], target=Target(50, False), note=note)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="1.5b:Q8_0")
    parser.add_argument("--rest", type=float, default=60.0, help="seconds between an answer and the later message")


def main() -> None:
    options = arguments(__doc__, _options)
    where = machine()
    file = models.model(*options.model.split(":"))
    rounds = options.rounds or (1 if options.quick else 5)
    history, longest = (300, 900) if options.quick else (HISTORY, LONGEST)
    rows = [after_an_answer(file, rounds, history, 1.0 if options.quick else options.rest)]
    with tempfile.TemporaryDirectory(prefix="cpuchat-bench-") as folder:
        engine = _Engine(file, Path(folder))
        try:
            rows += leaving(engine, rounds, history)
            rows.append(an_hour(engine, longest))
            if not options.quick:
                rows += leaving(engine, rounds, longest)
        finally:
            engine.close()
    report("idle_save", where, rows, quick=options.quick, remarks=[file.name])


if __name__ == "__main__":
    run_main(main)
