"""One measurement of one cell, with the loaded model. Answers may be read aloud without being played: what that costs,
and how soon there would be sound.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cpuchat.backend.local import LocalBackend
from cpuchat.base.errors import CpuchatError, MeasureFailed
from cpuchat.bench.matrix import BenchCell, BenchPrompt
from cpuchat.config.settings import SpeculationSection, SpeechSection
from cpuchat.hardware.monitor import Monitor
from cpuchat.hardware.topology import read_topology
from cpuchat.protocol.messages import Failed, Generate, Measure, Message, TextDelta
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.reasons import DraftsOff
from cpuchat.protocol.timings import Timings
from cpuchat.speech.player import Player
from cpuchat.speech.speaker import Speaker, check_voice, cpus_beside
from cpuchat.telemetry.answer import answer_greedily
from cpuchat.telemetry.machine import process_memory
from cpuchat.telemetry.roofline import after_answer

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
        check_voice()
        self._speaker = Speaker(section.speed, self._player, tell=self._fail)

    async def prepare(self, model: ModelInfo) -> None:
        """Load the voice beside `model`. Raises MeasureFailed."""
        cpus, shared = cpus_beside(read_topology(), self._section.cores, model)
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

    def _player(self) -> Player:
        return SilentPlayer()

    def _fail(self, error: CpuchatError) -> None:
        self._problem = error


_PSS = re.compile(r"^Pss: +(\d+) kB", re.MULTILINE)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement: a run of random tokens, or all prompts of a kind, one after the other.

    Attributes:
        seconds: timed, of all prompts together.
        prefill, decode: tok/s over all prompts; None when not a part of the test.
        ttft_ms: mean of the prompts.
        passes: of the target while something was drafted; 0 otherwise.
        bandwidth: bytes per second that decoding reads by the model's header; `utilization` of the measured peak.
        memory: bytes of the worker (PSS: shared pages count in part).
        joules: of the CPU packages, the prompts' prefill included; None without a counter.
        first_audio_ms: from the request to the first sound, mean of the prompts; None without speech.
        real_time_factor: time to synthesize ÷ length of the sound, over all prompts.
        speech_memory: resident bytes of the speech process.
        text: hash of what was written.
        short: fewer tokens than asked for were written.
        drafts_off: why nothing was drafted.
    """

    seconds: float
    prompt_n: int = 0
    predicted_n: int = 0
    prefill: float | None = None
    decode: float | None = None
    ttft_ms: float | None = None
    draft_n: int = 0
    draft_n_accepted: int = 0
    passes: int = 0
    bandwidth: float | None = None
    utilization: float | None = None
    memory: int | None = None
    joules: float | None = None
    first_audio_ms: float | None = None
    real_time_factor: float | None = None
    speech_memory: int | None = None
    text: str = ""
    short: bool = False
    drafts_off: DraftsOff | None = None

    @property
    def rate(self) -> float:
        """Return the tok/s that the test is about."""
        return self.decode or self.prefill or 0.0


async def measure_cell(
    backend: LocalBackend,
    cell: BenchCell,
    prompts: Sequence[BenchPrompt],
    monitor: Monitor | None = None,
    speech: BenchSpeech | None = None,
) -> Sample:
    """Measure a cell once.

    Args:
        prompts: of the cell's kind.
        monitor: reads the energy counters.
        speech: reads the answers of a cell with speech.

    Raises:
        MeasureFailed: the engine failed, was stopped, or no model is loaded.
    """
    model = backend.model
    if model is None:
        raise MeasureFailed("No model is loaded.")
    before = _joules(monitor)
    if cell.test.kind == "prompts":
        sample = await _prompts(backend, model, cell, prompts, speech if cell.speech else None)
    else:
        sample = await _random(backend, model, cell)
    after = _joules(monitor)
    joules = after - before if before is not None and after is not None and after > before else None
    return msgspec.structs.replace(sample, joules=joules, memory=_memory(backend.pid))


def _joules(monitor: Monitor | None) -> float | None:
    if monitor is None:
        return None
    sample = monitor.sample()
    return sample.power.joules if sample.power is not None else 0.0


def _memory(pid: int | None) -> int | None:
    if pid is None:
        return None
    with contextlib.suppress(OSError):
        if found := _PSS.search(Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")):
            return int(found[1]) << 10
    memory = process_memory(pid)
    return memory.private + memory.shared if memory is not None else None


async def _random(backend: LocalBackend, model: ModelInfo, cell: BenchCell) -> Sample:
    test = cell.test
    found = await backend.measure(Measure(n_prompt=test.n_prompt, n_gen=test.n_gen, depth=test.depth))
    if isinstance(found, Failed):
        raise MeasureFailed(found.message, found.hint)
    seconds = found.seconds
    if test.kind == "pp":
        return Sample(seconds=seconds, prompt_n=test.n_prompt, prefill=test.n_prompt / seconds)
    timings = Timings(predicted_n=test.n_gen + 1, predicted_ms=1e3 * seconds, n_past=test.depth + test.n_gen)
    roofline = after_answer(model, timings)
    return Sample(
        seconds=seconds,
        predicted_n=test.n_gen,
        decode=test.n_gen / seconds,
        bandwidth=roofline.estimate.value,
        utilization=roofline.utilization.value,
    )


async def _prompts(
    backend: LocalBackend, model: ModelInfo, cell: BenchCell, prompts: Sequence[BenchPrompt], speech: BenchSpeech | None
) -> Sample:
    """Measure greedy answers of exactly as many tokens as the test has, with nothing reused from earlier ones."""
    section = SpeculationSection(drafters=cell.drafters, depth=cell.draft_depth)
    digest, answers, spoken = hashlib.blake2b(digest_size=16), list[Timings](), list[SpeechSample]()

    def take(delta: TextDelta) -> None:
        digest.update(delta.text.encode())
        if speech is not None and delta.channel == "answer":
            speech.feed(delta.text)

    for prompt in prompts:
        if speech is not None:
            speech.begin()
        await backend.forget("")  # neither KV cache nor drafters know the text of the round before
        request = Generate(
            messages=(Message(role="user", content=prompt.text),),
            max_tokens=cell.test.n_gen,
            speculation=section.speculation(),
            ignore_eos=True,
        )
        answers.append(await answer_greedily(backend.generate, request, take))
        digest.update(b"\0")
        if speech is not None:
            spoken.append(await speech.end())
    sample = _summed(model, answers, cell.test.n_gen, digest.hexdigest())
    return _with_speech(sample, spoken, speech.memory) if speech is not None else sample


def _with_speech(sample: Sample, spoken: Sequence[SpeechSample], memory: int | None) -> Sample:
    heard = [one.first_audio_s for one in spoken if one.first_audio_s is not None]
    sound = sum(one.sound_s for one in spoken)
    return msgspec.structs.replace(
        sample,
        first_audio_ms=1e3 * sum(heard) / len(heard) if heard else None,
        real_time_factor=sum(one.took_s for one in spoken) / sound if sound else None,
        speech_memory=memory,
    )


def _summed(model: ModelInfo, answers: Sequence[Timings], tokens: int, text: str) -> Sample:
    """Return the figures of all answers together; bandwidths are weighted with the time of decoding."""
    prompt_ms, predicted_ms = sum(one.prompt_ms for one in answers), sum(one.predicted_ms for one in answers)
    steps, prompt_n = sum(one.predicted_n - 1 for one in answers), sum(one.prompt_n for one in answers)
    rooflines = [after_answer(model, one) for one in answers]
    figures = [one.speculation for one in answers if one.speculation is not None]

    def weighted(values: list[float | None]) -> float | None:
        known = [(value, one.predicted_ms) for value, one in zip(values, answers, strict=True) if value is not None]
        total = sum(ms for _, ms in known)
        return sum(value * ms for value, ms in known) / total if total else None

    return Sample(
        seconds=(prompt_ms + predicted_ms) / 1e3,
        prompt_n=prompt_n,
        predicted_n=sum(one.predicted_n for one in answers),
        prefill=1e3 * prompt_n / prompt_ms if prompt_ms else None,
        decode=1e3 * steps / predicted_ms if predicted_ms else None,
        ttft_ms=sum(one.ttft_ms for one in answers) / len(answers),
        draft_n=sum(one.draft_n for one in answers),
        draft_n_accepted=sum(one.draft_n_accepted for one in answers),
        passes=sum(one.passes for one in figures) if any(one.draft_n for one in answers) else 0,
        bandwidth=weighted([one.estimate.value for one in rooflines]),
        utilization=weighted([one.utilization.value for one in rooflines]),
        text=text,
        short=any(one.predicted_n < tokens for one in answers),
        drafts_off=None
        if any(one.draft_n for one in answers)
        else next((one.off for one in figures if one.off is not None), None),
    )
