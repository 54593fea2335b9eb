"""Reads a text aloud while it arrives: sentences to the speech process, its sound to a player; and chooses on which
CPUs beside a model that computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from cpuchat.base.errors import CpuchatError, SpeechFailed
from cpuchat.base.line_process import LineProcess
from cpuchat.base.processes import python_command
from cpuchat.config.servers import computes_here
from cpuchat.hardware.lists import format_cpu_list, parse_cpu_list
from cpuchat.hardware.topology import Topology
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.speech.messages import Answer, Sound, Synthesize, VoiceReady
from cpuchat.speech.player import Player
from cpuchat.telemetry.speech import Speech, SpeechMeter

if TYPE_CHECKING:
    from cpuchat.speech.sentences import SentenceSplitter

INSTALL = 'Run `uv tool install ".[speech]"` in the checkout of cpuchat.'


def check_voice() -> None:
    """Raise SpeechFailed if the extra `speech` is not installed."""
    if not all(map(importlib.util.find_spec, ("hibari", "sentencex"))):
        raise SpeechFailed("No voice is installed.", INSTALL)


_PIECE = 8192
"""Characters of a long text that are divided at once."""
_PAUSE_SECONDS = 0.12
"""Silence after a sentence, beside the little that the voice itself leaves."""


def _new_splitter() -> SentenceSplitter:
    from cpuchat.speech.sentences import SentenceSplitter  # of the extra `speech`

    return SentenceSplitter()


@dataclass
class _Reading:
    """One text. None comes after the last of its sentences."""

    splitter: SentenceSplitter = field(default_factory=_new_splitter)
    sentences: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    complete: bool = False


class _Voice(NamedTuple):
    process: LineProcess[Answer]
    ready: VoiceReady


class Speaker:
    """Use from one event loop. Nothing is started before `prepare` or the first sentence.

    Args:
        speed: of the voice; 1 is normal.
        player: makes the player of a reading.
        tell: called with what went wrong; the reading is over then.
        ended: called when a reading is over by itself.
    """

    def __init__(
        self,
        speed: float,
        player: Callable[[], Player],
        *,
        tell: Callable[[CpuchatError], None] = lambda error: None,
        ended: Callable[[], None] = lambda: None,
        meter: SpeechMeter | None = None,
    ) -> None:
        self.speed = speed
        self.meter = meter or SpeechMeter()
        self._new_player = player
        self._tell = tell
        self._ended = ended
        self._cpus: tuple[int, ...] = ()
        self._loading: asyncio.Task[_Voice] | None = None
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
        process = self._process
        return process.pid if process is not None and process.alive else None

    @property
    def _process(self) -> LineProcess[Answer] | None:
        task = self._loading
        return task.result().process if task and task.done() and not task.cancelled() and not task.exception() else None

    def figures(self) -> Speech:
        return self.meter.figures(time.monotonic())

    def prepare(self, cpus: tuple[int, ...] = (), *, shared: bool = False) -> None:
        """Start the speech process on `cpus` (none given: on all) and load the voice, in the background.

        `shared`: a model computes on all of them. A process on other CPUs is replaced, unless it is reading.
        """
        runs = self._loading is not None and (not self._loading.done() or self.pid is not None)
        if runs and (cpus == self._cpus or self.busy):
            return
        self.meter.shared, self._cpus = shared, cpus
        self._end_process()
        self._loading = asyncio.ensure_future(self._load(cpus))
        self._loading.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def ready(self) -> VoiceReady:
        """Return the voice's facts once it is loaded. Raises SpeechFailed."""
        self.prepare(self._cpus, shared=self.meter.shared)
        assert self._loading is not None
        return (await asyncio.shield(self._loading)).ready

    def begin(self, asked: float | None = None) -> None:
        """Begin to read a text, whose request was sent at `asked` of the clock; what is being read is stopped."""
        self.stop()
        reading = self._reading = _Reading()
        self.meter.begin(asked)
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
        if (reading := self._reading) is not None and not reading.complete and text:
            self.meter.token(time.monotonic())
            self._add(reading, reading.splitter.feed(text))

    def finish(self) -> None:
        """Say that the text is complete; what is left of it is still read."""
        if (reading := self._reading) is not None and not reading.complete:
            self._add(reading, reading.splitter.flush())
            reading.complete = True
            reading.sentences.put_nowait(None)

    def stop(self) -> None:
        """Be silent at once, and forget what is left to read."""
        task, self._task, self._reading = self._task, None, None
        if task is not None:
            task.cancel()
        self.meter.end()

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
            self._follow(asyncio.ensure_future(process.end()))

    def _follow(self, task: asyncio.Task[None]) -> None:
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _load(self, cpus: tuple[int, ...]) -> _Voice:
        options = ["--speed", str(self.speed), "--cpus", format_cpu_list(cpus)]
        command = python_command("-m", "cpuchat.speech", *options)
        process = LineProcess[Answer](command, "speech process", Answer, SpeechFailed)
        try:
            await process.__aenter__()
            ready = await process.receive()
        except BaseException:
            self._follow(asyncio.ensure_future(process.end()))
            raise
        assert isinstance(ready, VoiceReady)
        self.meter.cpus = ready.cpus
        return _Voice(process, ready)

    def _add(self, reading: _Reading, sentences: list[str]) -> None:
        for sentence in sentences:
            reading.sentences.put_nowait(sentence)

    async def _read(self, reading: _Reading) -> None:
        """Turn sentences into sound and play it, one after the other: a player waits when it has enough."""
        player: Player | None = None
        try:
            while (text := await reading.sentences.get()) is not None:
                rate = (await self.ready()).rate
                sound = await self._sound(text)
                if not sound.samples:
                    continue
                if player is None:
                    player = self._new_player()
                    await player.start(rate)
                seconds = len(sound.samples) / (2 * rate)
                self.meter.played(seconds, sound.seconds, time.monotonic(), paced=player.paced)
                await player.play(sound.samples + bytes(2 * int(rate * _PAUSE_SECONDS)))
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
                self.meter.end()
                asyncio.get_running_loop().call_soon(self._ended)

    async def _sound(self, text: str) -> Sound:
        process = self._process
        if process is None:
            raise SpeechFailed("The speech process ended.")
        self._last_id += 1
        number = self._last_id
        try:
            await process.send(Synthesize(id=number, text=text))
            while True:
                answer = await process.receive()
                if isinstance(answer, Sound) and answer.id == number:  # others are of a reading that was stopped
                    return answer
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


_MAX_CORES = 2
"""One is enough; the process moves to the one that is idle."""


def cpus_beside(topology: Topology, cores: str, model: ModelInfo | None) -> tuple[tuple[int, ...], bool]:
    """Return the CPUs for `cores` of the settings beside a model, and whether the model computes on all of them too.

    "auto" is those of cores that compute nothing, the last ones, else SMT siblings of those that do. () where every CPU
    computes: then the scheduler chooses, because a fixed CPU would hold back the same thread always. A server on this
    machine may compute on every CPU: it does not say on which.
    """
    allowed = set(topology.allowed)
    computing = set() if model is None else allowed if computes_here(model.path) else set(model.compute_cpus)
    if cores != "auto":
        cpus = [cpu for cpu in parse_cpu_list(cores) if cpu in allowed]
    elif idle := [core.cpus for core in topology.allowed_cores if computing.isdisjoint(core.cpus)]:
        cpus = sorted(cpu for cpus in idle[-_MAX_CORES:] for cpu in cpus if cpu in allowed)
    else:
        cpus = sorted(allowed - computing)[-_MAX_CORES:]
    return tuple(cpus), bool(computing) and set(cpus or allowed) <= computing
