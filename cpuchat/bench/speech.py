"""Reads the answers of a benchmark aloud without playing them: what it costs, and how soon there would be sound."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from cpuchat.errors import CpuchatError, MeasureFailed
from cpuchat.hardware.topology import read_topology
from cpuchat.model_info import ModelInfo
from cpuchat.settings import SpeechSection
from cpuchat.speech.cores import beside_model
from cpuchat.speech.engines import choose_voice
from cpuchat.speech.player import Player
from cpuchat.speech.speaker import Speaker
from cpuchat.telemetry.process import process_memory

_BUFFER_SECONDS = 0.5
_LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class SpeechSample:
    """One answer. `first_audio_s` from the request (None: nothing to say), `sound_s` synthesized in `took_s`."""

    first_audio_s: float | None
    sound_s: float
    took_s: float


class SilentPlayer:
    """See `Player`: plays nothing. `paced`: takes as long as the sound is."""

    name = "nothing"

    def __init__(self, *, paced: bool = True) -> None:
        self.paced = paced
        self._rate = 1
        self._until = 0.0

    async def start(self, rate: int) -> None:
        self._rate = rate

    async def play(self, samples: bytes) -> None:
        if not self.paced:
            return
        now = time.monotonic()
        self._until = max(self._until, now) + len(samples) / (2 * self._rate)
        await asyncio.sleep(max(0.0, self._until - now - _BUFFER_SECONDS))

    async def finish(self) -> None:
        await asyncio.sleep(max(0.0, self._until - time.monotonic()))

    def stop(self) -> None: ...


class BenchSpeech:
    """The speech process of a benchmark, on the cores that an app would choose."""

    def __init__(self, section: SpeechSection) -> None:
        self._section = section
        self._problem: CpuchatError | None = None
        self._speaker = Speaker(choose_voice(section), self._player, tell=self._fail)

    async def prepare(self, model: ModelInfo) -> None:
        """Load the voice beside `model`. Raises MeasureFailed."""
        cpus, shared = beside_model(read_topology(), self._section.cores, model)
        self._speaker.prepare(cpus, shared=shared)
        try:
            await self._speaker.ready()
        except CpuchatError as error:
            raise MeasureFailed(error.message, error.hint) from None

    def begin(self) -> None:
        """Begin with an answer that is asked for now."""
        self._problem = None
        self._speaker.begin(time.monotonic())

    def feed(self, text: str) -> None:
        self._speaker.feed(text)

    async def end(self) -> SpeechSample:
        """Return the figures of an answer that is complete; what is left of it is not waited for, except the first
        sound. Raises MeasureFailed.
        """
        self._speaker.finish()
        while self._speaker.busy and self._speaker.figures().first_audio_s is None:
            await asyncio.sleep(_LOOK_SECONDS)
        found = self._speaker.figures()
        self._speaker.stop()
        if self._problem is not None:
            raise MeasureFailed(self._problem.message, self._problem.hint)
        return SpeechSample(found.first_audio_s, found.sound_s, (found.real_time_factor or 0.0) * found.sound_s)

    @property
    def memory(self) -> int | None:
        """Return the resident bytes of the speech process."""
        pid = self._speaker.pid
        memory = process_memory(pid) if pid is not None else None
        return memory.private + memory.shared if memory is not None else None

    async def close(self) -> None:
        await self._speaker.close()

    async def _player(self) -> Player:
        return SilentPlayer()

    def _fail(self, error: CpuchatError) -> None:
        self._problem = error
