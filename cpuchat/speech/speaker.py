"""Reads a text aloud while it arrives: sentences to the speech process, its sound to a player."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from cpuchat.base.errors import CpuchatError, SpeechFailed
from cpuchat.base.line_process import LineProcess
from cpuchat.base.processes import python_command
from cpuchat.speech.player import Player

if TYPE_CHECKING:
    from cpuchat.speech.sentences import SentenceSplitter

INSTALL = 'Run `uv tool install ".[speech]"` in the checkout of cpuchat.'
_PIECE = 8192
"""Characters of a long text that are divided at once."""
_PAUSE_SECONDS = 0.12
"""Silence after a sentence, beside the little that the voice itself leaves."""


class Synthesize(msgspec.Struct, frozen=True, kw_only=True):
    """Speak `text`, one sentence."""

    id: int
    text: str


class VoiceReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The first answer: the voice is loaded. `rate` in samples per second."""

    rate: int


class Sound(msgspec.Struct, frozen=True, kw_only=True, tag="sound"):
    """A sentence: 16-bit mono samples, little-endian."""

    id: int
    samples: bytes


Answer = VoiceReady | Sound


def check_voice() -> None:
    """Raise SpeechFailed if the extra `speech` is not installed."""
    if not all(map(importlib.util.find_spec, ("hibari", "sentencex"))):
        raise SpeechFailed("No voice is installed.", INSTALL)


class _Reading:
    """One text. None comes after the last of its sentences."""

    def __init__(self) -> None:
        from cpuchat.speech.sentences import SentenceSplitter  # of the extra `speech`

        self.splitter: SentenceSplitter | None = SentenceSplitter()  # None: the text is complete
        self.sentences: asyncio.Queue[str | None] = asyncio.Queue()


class Speaker:
    """Use from one event loop. Nothing is started before `prepare` or the first sentence. `speed` of the voice: 1 is
    normal. `player` makes the player of a reading; `tell` is called with what went wrong: the reading is over then;
    `ended` is called when a reading is over by itself."""

    def __init__(
        self,
        speed: float,
        player: Callable[[], Player],
        *,
        tell: Callable[[CpuchatError], None] = lambda error: None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.speed = speed
        self.seconds = 0.0
        """Length of the sound of the last text so far."""
        self._new_player = player
        self._tell = tell
        self._ended = ended
        self._loading: asyncio.Task[tuple[LineProcess[Answer], int]] | None = None  # the process, samples per second
        self._reading: _Reading | None = None
        self._task: asyncio.Task[None] | None = None
        self._last_id = 0
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Return whether a text is being read."""
        return self._task is not None and not self._task.done()

    @property
    def pid(self) -> int | None:
        """Return the PID of the speech process; None while it does not run, or loads its voice."""
        return self._process.pid if self._process is not None else None

    @property
    def _process(self) -> LineProcess[Answer] | None:
        task = self._loading
        return task.result()[0] if task and task.done() and not task.cancelled() and not task.exception() else None

    def prepare(self) -> None:
        """Start the speech process and load the voice, in the background, unless it runs."""
        if self._loading is None or (self._loading.done() and self.pid is None):
            self._end_process()
            self._loading = asyncio.ensure_future(self._load())
            self._loading.add_done_callback(lambda task: task.cancelled() or task.exception())

    def begin(self) -> None:
        """Begin to read a text; what is being read is stopped."""
        self.stop()
        self.seconds = 0.0
        reading = self._reading = _Reading()
        self._task = asyncio.ensure_future(self._read(reading))

    async def feed_whole(self, text: str) -> None:
        """Read all of a text that is there; returns when it is divided into sentences, or the reading was stopped."""
        reading = self._reading
        for at in range(0, len(text), _PIECE):
            self.feed(text[at : at + _PIECE])
            await asyncio.sleep(0)
            if self._reading is not reading:
                return
        self.finish()

    def feed(self, text: str) -> None:
        """Read more text; without a reading nothing happens."""
        if (reading := self._reading) is not None and reading.splitter is not None:
            for sentence in reading.splitter.feed(text):
                reading.sentences.put_nowait(sentence)

    def finish(self) -> None:
        """Say that the text is complete; what is left of it is still read."""
        if (reading := self._reading) is not None and reading.splitter is not None:
            for sentence in (*reading.splitter.flush(), None):
                reading.sentences.put_nowait(sentence)
            reading.splitter = None

    def stop(self) -> None:
        """Be silent at once, and forget what is left to read."""
        task, self._task, self._reading = self._task, None, None
        if task is not None:
            task.cancel()

    async def wait(self) -> None:
        """Return when everything was heard, or the reading was stopped."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """Stop, and end the speech process."""
        tasks = {*filter(None, (self._task, self._loading))}
        self.stop()
        self._end_process()
        if tasks:  # a load that is cancelled ends its process
            await asyncio.wait(tasks)
        if self._ending:
            await asyncio.wait({*self._ending})

    def _end_process(self) -> None:
        process, loading, self._loading = self._process, self._loading, None
        if loading is not None:
            loading.cancel()
        if process is not None:
            self._end(process)

    def _end(self, process: LineProcess[Answer]) -> None:
        task = asyncio.ensure_future(process.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _load(self) -> tuple[LineProcess[Answer], int]:
        command = python_command("-m", "cpuchat.speech", "--speed", str(self.speed))
        process = LineProcess[Answer](command, "speech process", Answer, SpeechFailed)
        try:
            await process.__aenter__()
            ready = await process.receive()
        except BaseException:
            self._end(process)
            raise
        assert isinstance(ready, VoiceReady)
        return process, ready.rate

    async def _read(self, reading: _Reading) -> None:
        """Turn sentences into sound and play it, one after the other: a player waits when it has enough."""
        player: Player | None = None
        try:
            while (text := await reading.sentences.get()) is not None:
                self.prepare()
                assert self._loading is not None
                process, rate = await asyncio.shield(self._loading)
                samples = await self._sound(process, text)
                if not samples:
                    continue
                if player is None:
                    player = self._new_player()
                    await player.start(rate)
                self.seconds += len(samples) / (2 * rate)
                await player.play(samples + bytes(2 * int(rate * _PAUSE_SECONDS)))
            if player is not None:
                await player.finish()
        except CpuchatError as error:
            self._tell(error)
        except Exception as error:
            self._tell(SpeechFailed(f"Cannot speak: {error!r}."))
        finally:
            if player is not None:
                player.stop()
            if self._reading is reading:  # nothing has stopped it
                self._reading = None
                asyncio.get_running_loop().call_soon(self._ended)

    async def _sound(self, process: LineProcess[Answer], text: str) -> bytes:
        self._last_id += 1
        number = self._last_id
        try:
            await process.send(Synthesize(id=number, text=text))
            while True:
                answer = await process.receive()
                if isinstance(answer, Sound) and answer.id == number:  # others are of a reading that was stopped
                    return answer.samples
        except CpuchatError:
            self._end_process()
            raise


async def read_aloud(speaker: Speaker, text: str) -> None:
    """Read a whole text. Cancelling this stops it."""
    speaker.begin()
    try:
        await speaker.feed_whole(text)
        await speaker.wait()
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            speaker.stop()
