"""What a chat loses when its app is killed while an answer streams, and when the disk is full for a while.

    python benchmarks/kill_chats.py [--quick] [--kills 200] [--seed 1]

The answer comes at 250 words per second into the real `Conversation` and `ChatStore` of a child process, which notes
when it gave out each word. `kill -9` comes at a random moment; the text that the store lacks then is counted from the
first word that is missing to the kill. For the full disk the child is forbidden to make files longer (RLIMIT_FSIZE),
goes on streaming, and is allowed again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from common import MeasureError, Row, Target, arguments, machine, report, run_main, say

from cpuchat.backend.base import DEFAULT_PLACEMENT, NO_MODEL
from cpuchat.chats.store import ChatStore
from cpuchat.config.servers import Source
from cpuchat.config.settings import Settings
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.protocol.messages import AnyEvent, Failed, Generate, GenerationFinished, LoadOptions, Measure, TextDelta
from cpuchat.protocol.model_info import EngineInfo, ModelInfo
from cpuchat.protocol.timings import Timings
from cpuchat.session.conversation import Conversation

PACE = 0.004  # seconds per word
WORDS = 100_000  # more than are written before the kill
FULL_AT, FREE_AT, FULL_WORDS = 100, 700, 900
ROOM = 8192  # bytes that every file may still grow when the disk is "full"


class Paced:
    """A backend that streams numbered words, and writes down when."""

    model: ModelInfo | None = None
    engine: EngineInfo | None = None
    pid: int | None = None

    def __init__(self, n_words: int, folder: Path) -> None:
        self._n_words = n_words
        self._folder = folder

    async def load(
        self, path: Source, options: LoadOptions, spec: PlacementSpec = DEFAULT_PLACEMENT
    ) -> AsyncGenerator[AnyEvent, None]:
        for event in ():  # the conversation begins with a loaded model
            yield event

    async def generate(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        full = self._n_words == FULL_WORDS
        for number in range(self._n_words):
            if full and number == FULL_AT:
                sizes = [file.stat().st_size for file in self._folder.iterdir() if not file.name.endswith("-shm")]
                _limit_files(max(sizes) + ROOM)
            if full and number == FREE_AT:
                _limit_files(resource.RLIM_INFINITY)
            os.write(1, f"{number} {time.monotonic()}\n".encode())
            yield TextDelta(request_id=1, text=word(number), predicted_n=number + 1, at_ms=0.0)
            await asyncio.sleep(PACE)
        yield GenerationFinished(request_id=1, stop_reason="end", timings=Timings())

    async def cancel(self) -> None: ...

    async def end_reasoning(self) -> bool:
        return False

    async def unload(self) -> None: ...

    async def count_tokens(self, of: str | Generate) -> None: ...

    async def measure(self, request: Measure) -> Failed:
        return NO_MODEL

    async def forget(self, chat_id: str) -> None: ...

    def kill(self) -> None: ...

    async def close(self) -> None: ...


def word(number: int) -> str:
    return f"{number} "


def _limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


async def _child(path: Path, n_words: int) -> None:
    core = Conversation(settings=Settings(), backend=Paced(n_words, path.parent), store=ChatStore(path))
    told = 0

    def count() -> None:
        nonlocal told
        told += core.history.saver.problem is not None

    core.on_save_problem = count
    async for _ in core.send("Count"):
        pass
    await core.close()
    os.write(1, f"told {told}\n".encode())


def missing_ms(folder: Path, chance: random.Random) -> float:
    """Milliseconds of text that one kill costs.

    Raises:
        MeasureError: the child ended by itself, or what is stored is not the beginning of what was streamed.
    """
    path = folder / "chats.db"
    given: dict[int, float] = {}
    with _started(path, WORDS) as child:
        assert child.stdout is not None
        kill_at: float | None = None
        for line in child.stdout:
            number, at = line.split()
            given[int(number)] = float(at)
            if kill_at is None:
                kill_at = float(at) + chance.uniform(0.0, 2.5)
            if time.monotonic() >= kill_at:
                break
        killed = time.monotonic()
        child.send_signal(signal.SIGKILL)
        for line in child.stdout:  # what it gave out before the signal came
            with contextlib.suppress(ValueError):  # cut in the middle
                number, at = line.split()
                given[int(number)] = float(at)
        if child.wait() != -signal.SIGKILL:
            raise MeasureError("the child ended before it was killed")
    text, stop_reason = _stored(path)
    n_stored = len(text.split())
    if text != "".join(map(word, range(n_stored))):
        raise MeasureError(f"the store holds something else: {text[-100:]!r}")
    if text and stop_reason != "interrupted":
        raise MeasureError(f"the answer is marked {stop_reason!r}")
    return max(0.0, 1e3 * (killed - given[n_stored])) if n_stored in given else 0.0


def missing_after_full_disk(folder: Path) -> tuple[int, int]:
    """(words missing at the end, how often the user was told)."""
    path = folder / "chats.db"
    with _started(path, FULL_WORDS) as child:
        output, _ = child.communicate(timeout=120)
        if child.returncode:
            raise MeasureError("the child failed")
    text, _ = _stored(path)
    return FULL_WORDS - len(text.split()), int(output.split()[-1])


def _started(path: Path, n_words: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", str(path), "--words", str(n_words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _stored(path: Path) -> tuple[str, str | None]:
    store = ChatStore(path)
    try:
        if notices := store.take_notices():
            raise MeasureError(f"the file was damaged: {notices}")
        for chat in store.chats():
            for message in store.messages(chat.id):
                if message.role == "assistant":
                    return message.content, message.stop_reason
        return "", None
    finally:
        store.close()


def measure(kills: int, seed: int) -> tuple[list[float], list[float], int]:
    """(milliseconds missing after each kill, words missing after a full disk, how often that was told)."""
    chance = random.Random(seed)
    lost: list[float] = []
    for number in range(kills):
        with tempfile.TemporaryDirectory(prefix="cpuchat-kill-") as folder:
            lost.append(missing_ms(Path(folder), chance))
        if not (number + 1) % 20:
            say(f"  {number + 1}/{kills} kills: at most {max(lost):.0f} ms missing")
    with tempfile.TemporaryDirectory(prefix="cpuchat-full-") as folder:
        missing, told = missing_after_full_disk(Path(folder))
    return lost, [float(missing)], told


def main() -> None:
    def own(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--kills", type=int, default=200)
        parser.add_argument("--seed", type=int, default=1)
        parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
        parser.add_argument("--words", type=int, default=0, help=argparse.SUPPRESS)

    options = arguments(__doc__, own)
    if options.child is not None:
        asyncio.run(_child(options.child, options.words))
        return
    where = machine()
    lost, missing, told = measure(5 if options.quick else options.kills, options.seed)
    rows = [
        Row("text missing after kill -9, worst", "ms", [max(lost)], target=Target(500, False)),
        Row("text missing after kill -9", "ms", lost),
        Row("words missing after a full disk was freed", "words", missing, target=Target(0, False)),
    ]
    remarks = [f"{len(lost)} kills, seed {options.seed}", f"the full disk was told {told} times"]
    report("kill_chats", where, rows, quick=options.quick, remarks=remarks)


if __name__ == "__main__":
    run_main(main)
