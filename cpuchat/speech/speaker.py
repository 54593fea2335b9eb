"""Reads a text aloud while it arrives: sentences to the speech process, its sound to a player.

Sound is made a few seconds ahead of what is heard: this bounds memory, a stop wastes little, and the cores are taken
for milliseconds at a time while an answer is decoded. Before that: which voice speaks, and on which CPUs beside a model
that computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cpuchat.base.errors import CpuchatError, SpeechFailed
from cpuchat.base.line_process import LineProcess
from cpuchat.base.paths import expanded, shown
from cpuchat.base.processes import python_command
from cpuchat.config.servers import computes_here
from cpuchat.config.settings import SpeechSection
from cpuchat.hardware.lists import format_cpu_list, parse_cpu_list
from cpuchat.hardware.topology import Topology
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.speech.messages import Answer, EngineName, Sound, Synthesize, VoiceReady
from cpuchat.speech.player import Player
from cpuchat.speech.sentences import SentenceSplitter
from cpuchat.telemetry.speech import Speech, SpeechMeter

INSTALL = 'Run `uv tool install ".[speech]"` in the checkout of cpuchat, or put piper on the PATH and set its voice.'


@dataclass(frozen=True)
class VoiceChoice:
    """The engine to use, and for piper its voice file; `speed` 1 is normal."""

    engine: EngineName
    file: str = ""
    speed: float = 1.0

    def command(self, cpus: Collection[int] = ()) -> list[str]:
        """Return the command that starts the speech process on `cpus` (none given: on all)."""
        options = ["--engine", self.engine, "--speed", str(self.speed), "--voice", self.file]
        return python_command("-m", "cpuchat.speech", *options, "--cpus", format_cpu_list(cpus))


def choose_voice(section: SpeechSection) -> VoiceChoice:
    """Return the engine of the settings; "auto" is hibari if it is installed, else piper with its voice. Raises
    SpeechFailed: it is not installed, or piper's voice is missing.
    """
    hibari, piper = importlib.util.find_spec("hibari") is not None, shutil.which("piper") is not None
    engine: EngineName
    match section.engine:
        case "auto" if hibari or not (piper and section.voice):
            engine = "hibari"
        case "auto":
            engine = "piper"
        case name:
            engine = name
    if engine == "hibari":
        if not hibari:
            raise SpeechFailed("No voice is installed.", INSTALL)
        return VoiceChoice("hibari", speed=section.speed)
    if not piper:
        raise SpeechFailed("piper is not on the PATH.", INSTALL)
    file = expanded(section.voice)
    if not section.voice or not file.is_file():
        what = f"{shown(file)} is not a file." if section.voice else "piper needs a voice file."
        raise SpeechFailed(what, "Set speech.voice to an .onnx voice of piper, with its .onnx.json beside it.")
    return VoiceChoice("piper", str(Path(file).absolute()), section.speed)


AHEAD_SECONDS = 6.0
_PIECE = 8192
"""Characters of a long text that are divided at once."""
_PAUSE_SECONDS = 0.12
"""Silence after a sentence, beside the little that the voice itself leaves."""


@dataclass
class _Reading:
    """One text. None comes after the last one of its sentences, and of its sounds."""

    splitter: SentenceSplitter = field(default_factory=SentenceSplitter)
    sentences: asyncio.Queue[str | None] = field(default_factory=asyncio.Queue)
    sounds: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    complete: bool = False


class Speaker:
    """Use from one event loop. Nothing is started before `prepare` or the first sentence.

    Args:
        voice: what speaks.
        player: makes the player of a reading.
        tell: called with what went wrong; the reading is over then.
        ended: called when a reading is over by itself.
    """

    def __init__(
        self,
        voice: VoiceChoice,
        player: Callable[[], Awaitable[Player]],
        *,
        tell: Callable[[CpuchatError], None] = lambda error: None,
        ended: Callable[[], None] = lambda: None,
        meter: SpeechMeter | None = None,
    ) -> None:
        self.voice = voice
        self.meter = meter or SpeechMeter()
        self._new_player = player
        self._tell = tell
        self._ended = ended
        self._cpus: tuple[int, ...] = ()
        self._process: LineProcess[Answer] | None = None
        self._loading: asyncio.Task[VoiceReady] | None = None
        self._reading: _Reading | None = None
        self._task: asyncio.Task[None] | None = None
        self._player: Player | None = None
        self._last_id = 0
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Return whether a text is being read."""
        return self._task is not None and not self._task.done()

    @property
    def pid(self) -> int | None:
        """Return the PID of the speech process; None while it does not run."""
        return self._process.pid if self._process is not None and self._process.alive else None

    def figures(self) -> Speech:
        return self.meter.figures(time.monotonic())

    def prepare(self, cpus: tuple[int, ...] = (), *, shared: bool = False) -> None:
        """Start the speech process on `cpus` (none given: on all) and load the voice, in the background.

        `shared`: a model computes on all of them. A process on other CPUs is replaced, unless it is reading.
        """
        running = self._loading is not None and not self._failed()
        if running and (cpus == self._cpus or self.busy):
            return
        self.meter.shared = shared
        self._cpus = cpus
        self._end_process()
        self._loading = asyncio.ensure_future(self._load(cpus))
        self._loading.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def ready(self) -> VoiceReady:
        """Return the voice's facts once it is loaded. Raises SpeechFailed."""
        if self._loading is None or self._failed():
            self.prepare(self._cpus, shared=self.meter.shared)
        assert self._loading is not None
        return await asyncio.shield(self._loading)

    def begin(self, asked: float | None = None) -> None:
        """Begin to read a text, whose request was sent at `asked` of the clock; what is being read is stopped."""
        self.stop()
        self._reading = _Reading()
        self.meter.begin(asked)
        self._task = asyncio.ensure_future(self._read(self._reading))
        self._task.add_done_callback(partial(self._is_over, self._reading))

    async def feed_whole(self, text: str) -> None:
        """Read all of a text that is there; returns when it is divided into sentences, or the reading was stopped."""
        reading = self._reading
        try:
            for at in range(0, len(text), _PIECE):
                self.feed(text[at : at + _PIECE])
                await asyncio.sleep(0)
                if self._reading is not reading:
                    return
        finally:
            if self._reading is reading:
                self.finish()

    def feed(self, text: str) -> None:
        """Read more text; without a reading nothing happens."""
        reading = self._reading
        if reading is None or reading.complete or not text:
            return
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
        if task is not None and not task.done():
            task.cancel()
        player, self._player = self._player, None
        if player is not None:
            player.stop()
        self.meter.end()

    async def wait(self) -> None:
        """Return when everything was heard, or the reading was stopped."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """Stop, and end the speech process."""
        task = self._task
        self.stop()
        self._end_process()
        ending = [*self._ending, *([task] if task is not None else [])]
        if ending:
            await asyncio.wait(ending)

    def _is_over(self, reading: _Reading, task: asyncio.Task[None]) -> None:
        """Forget a reading that nothing has stopped, and tell."""
        if self._reading is reading:
            self._reading = None
            self.meter.end()
            self._ended()

    def _failed(self) -> bool:
        """Return whether the process did not start, or has ended."""
        if self._process is not None:
            return not self._process.alive
        return self._loading is None or self._loading.done()

    def _end_process(self) -> None:
        process, self._process = self._process, None
        loading, self._loading = self._loading, None
        if loading is not None:
            loading.cancel()
        if process is not None:
            task = asyncio.ensure_future(process.end())
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _load(self, cpus: tuple[int, ...]) -> VoiceReady:
        process = LineProcess[Answer](self.voice.command(cpus), "speech process", Answer, SpeechFailed)
        await process.__aenter__()
        self._process = process
        try:
            ready = await process.receive()
            assert isinstance(ready, VoiceReady)
        except CpuchatError:
            self._process = None
            await process.end()
            raise
        self.meter.engine, self.meter.cpus = ready.engine, ready.cpus
        return ready

    def _add(self, reading: _Reading, sentences: list[str]) -> None:
        if sentences:
            self.meter.sentence(time.monotonic())
        for sentence in sentences:
            reading.sentences.put_nowait(sentence)

    async def _read(self, reading: _Reading) -> None:
        both = [asyncio.ensure_future(one) for one in (self._synthesize(reading), self._play(reading))]
        try:
            await asyncio.gather(*both)
        except CpuchatError as error:
            self._tell(error)
        except Exception as error:
            self._tell(SpeechFailed(f"Cannot speak: {error!r}."))
        finally:
            for one in both:
                one.cancel()
            await asyncio.wait(both)

    async def _synthesize(self, reading: _Reading) -> None:
        """Turn the sentences into sound, not too far ahead of what is heard."""
        while (text := await reading.sentences.get()) is not None:
            ready = await self.ready()
            while self._paced and (ahead := self.meter.queued(time.monotonic()) - AHEAD_SECONDS) > 0:
                await asyncio.sleep(ahead)
            sound = await self._sound(text)
            seconds = len(sound.samples) / (2 * ready.rate)
            if seconds:
                self.meter.synthesized(seconds, sound.seconds)
                reading.sounds.put_nowait(sound.samples)
        reading.sounds.put_nowait(None)

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

    @property
    def _paced(self) -> bool:
        return self._player is None or self._player.paced

    async def _play(self, reading: _Reading) -> None:
        """Play the sounds in order; return when the last was heard."""
        player: Player | None = None
        rate = 0
        try:
            while (samples := await reading.sounds.get()) is not None:
                if player is None:
                    rate = (await self.ready()).rate
                    player = await self._new_player()
                    await player.start(rate)
                    self._player = player
                pause = bytes(2 * int(rate * _PAUSE_SECONDS))
                self.meter.played(len(samples) / (2 * rate), time.monotonic(), paced=player.paced)
                await player.play(samples + pause)
            if player is not None:
                await player.finish()
        finally:
            if player is not None:
                player.stop()
                if self._player is player:
                    self._player = None


async def read_aloud(speaker: Speaker, text: str) -> None:
    """Read a whole text. Cancelling this stops it."""
    speaker.begin()
    try:
        await speaker.feed_whole(text)
        await speaker.wait()
    finally:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            speaker.stop()


MOST_CORES = 2
"""piper computes with as many threads as it has CPUs; one core is enough for either engine."""


def speech_cpus(topology: Topology, computing: Collection[int]) -> tuple[int, ...]:
    """Return the CPUs of cores that compute nothing, the last ones, else SMT siblings of those that do.

    () where every CPU computes: then the scheduler chooses, because a fixed CPU would hold back the same thread always.
    """
    allowed, busy = set(topology.allowed), set(computing)
    idle = [core.cpus for core in topology.allowed_cores if busy.isdisjoint(core.cpus)]
    if idle:
        return tuple(sorted(cpu for cpus in idle[-MOST_CORES:] for cpu in cpus if cpu in allowed))
    return tuple(sorted(allowed - busy))[-MOST_CORES:]


def beside_model(topology: Topology, cores: str, model: ModelInfo | None) -> tuple[tuple[int, ...], bool]:
    """Return the same as `beside`. A server on this machine may compute on every CPU: it does not say on which."""
    if model is None:
        return beside(topology, cores, ())
    return beside(topology, cores, topology.allowed if computes_here(model.path) else model.compute_cpus)


def beside(topology: Topology, cores: str, computing: Collection[int]) -> tuple[tuple[int, ...], bool]:
    """Return the CPUs for `cores` of the settings beside a model that computes on `computing`, and whether the model
    computes on all of them too. Those that this process may not use are left out.
    """
    if cores == "auto":
        cpus = speech_cpus(topology, computing)
    else:
        cpus = tuple(cpu for cpu in parse_cpu_list(cores) if cpu in topology.allowed)
    return cpus, bool(computing) and set(cpus or topology.allowed) <= set(computing)
