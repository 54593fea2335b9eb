"""Reading aloud: real-time factor on one core, first audio, what it costs the decode, and an hour of it.

    python benchmarks/speech.py [--quick] [--rounds N]

Decoding is that of a model which computes on every core, near 20 tok/s on two; with each of its tokens a word of a
Markdown text is read, as if the model had written it. Answers with and without speech alternate; the player takes as
long as the sound is, and plays nothing. The hour is synthesized as fast as it can be.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import models
import psutil
from common import MeasureError, Row, Target, arguments, machine, report, run_main, say
from paced_worker import DOCUMENT, PROSE
from product import GREEDY, worker

from cpuchat.backend.local import LocalBackend
from cpuchat.base.errors import CpuchatError
from cpuchat.bench.sample import SilentPlayer
from cpuchat.config.settings import SpeechSection
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.hardware.topology import read_topology
from cpuchat.protocol.messages import Failed, Generate, GenerationFinished, LoadOptions, TextDelta
from cpuchat.speech.player import Player
from cpuchat.speech.speaker import Speaker, beside, choose_voice
from cpuchat.telemetry.speech import Speech

SHAPE, QUANTIZATION = "1.5b", "Q8_0"
HOUR = 3600.0
WARM = 300.0  # seconds of sound after which memory must not grow
WORDS = re.findall(r"\S+\s*", (PROSE + DOCUMENT) * 20)


def unpaced() -> Player:
    """Return a player that takes everything at once."""
    return SilentPlayer(paced=False)


@contextlib.asynccontextmanager
async def speaking(
    make: Callable[[], Player], cpus: tuple[int, ...] = (), shared: bool = False
) -> AsyncIterator[tuple[Speaker, psutil.Process]]:
    problems: list[CpuchatError] = []

    async def player() -> Player:
        return make()

    speaker = Speaker(choose_voice(SpeechSection()), player, tell=problems.append)
    try:
        speaker.prepare(cpus, shared=shared)
        await speaker.ready()
        assert speaker.pid is not None
        yield speaker, psutil.Process(speaker.pid)
    except CpuchatError as error:
        raise MeasureError(str(error)) from None
    finally:
        await speaker.close()
    if problems:
        raise MeasureError(str(problems[0]))


async def factor(seconds: float) -> tuple[float, float]:
    """Wall time and CPU time of the speech process on one core ÷ the length of about so much sound."""
    async with speaking(unpaced, own_cpus()[-1:]) as (speaker, process):
        before = sum(process.cpu_times()[:2])
        sound = await say_for(speaker, seconds)
        return speaker.figures().real_time_factor or 0.0, (sum(process.cpu_times()[:2]) - before) / sound


async def say_for(speaker: Speaker, seconds: float, look: Callable[[float], Awaitable[None]] | None = None) -> float:
    """Read until there are so many seconds of sound; `look` is called about once a minute of it."""
    total, looked = 0.0, 0.0
    while total < seconds:
        speaker.begin()
        speaker.feed(DOCUMENT)
        speaker.finish()
        await speaker.wait()
        if not (sound := speaker.figures().sound_s):
            raise MeasureError("nothing was said")
        total += sound
        if look is not None and total - looked > 60:
            looked = total
            await look(total)
    return total


async def hour(seconds: float) -> tuple[list[float], list[float]]:
    """MB of the speech process and of this one, about once a minute of sound, from `WARM` (or a third) on."""
    ours, theirs = psutil.Process(os.getpid()), list[float]()
    mine: list[float] = []
    async with speaking(unpaced) as (speaker, process):

        async def look(total: float) -> None:
            if total >= min(WARM, seconds / 3):
                theirs.append(process.memory_info().rss / 1e6)
                mine.append(ours.memory_info().rss / 1e6)
                say(f"  {total:.0f} s of sound: speech process {theirs[-1]:.1f} MB, reader {mine[-1]:.1f} MB")

        await say_for(speaker, seconds, look)
    return theirs, mine


async def answer(backend: LocalBackend, tokens: int, salt: int, speaker: Speaker | None) -> tuple[float, Speech | None]:
    """Decode tok/s of one answer, and the figures of reading a text beside it."""
    if speaker is not None:
        speaker.begin()
    at = 0
    request = Generate(prompt=models.words(16, salt=salt), sampling=GREEDY, max_tokens=tokens)
    async for event in backend.generate(request):
        if isinstance(event, TextDelta) and speaker is not None:
            speaker.feed("".join(WORDS[at : at + event.n_tokens]))
            at += event.n_tokens
        elif isinstance(event, Failed):
            raise MeasureError(event.message)
        elif isinstance(event, GenerationFinished):
            figures = speaker.figures() if speaker is not None else None
            if speaker is not None:
                speaker.stop()
            return event.timings.predicted_per_second or 0.0, figures
    raise MeasureError("no answer")


async def beside_decoding(file: Path, tokens: int, rounds: int) -> tuple[list[float], list[float], list[Speech]]:
    """Decode tok/s with and without speech in turn, and the figures of speech."""
    spoken, silent, figures = list[float](), list[float](), list[Speech]()
    async with worker(file, LoadOptions(n_ctx=2048)) as backend:
        assert backend.model is not None
        cpus, shared = beside(read_topology(), "auto", backend.model.compute_cpus)
        async with speaking(SilentPlayer, cpus, shared) as (speaker, _):
            await answer(backend, 32, 99, None)
            for number in range(rounds):
                for with_speech in (True, False) if number % 2 else (False, True):
                    await asyncio.sleep(0.3)
                    rate, found = await answer(backend, tokens, number, speaker if with_speech else None)
                    (spoken if with_speech else silent).append(rate)
                    if found is not None:
                        figures.append(found)
                    say(
                        f"  round {number + 1}/{rounds} {'with' if with_speech else 'without'} speech: {rate:.2f} tok/s"
                    )
    return spoken, silent, figures


async def measure(quick: bool, rounds: int) -> list[Row]:
    factors = [await factor(20 if quick else 120) for _ in range(1 if quick else 5)]
    spoken, silent, figures = await beside_decoding(
        models.model(SHAPE, QUANTIZATION), 60 if quick else 400, rounds or (1 if quick else 7)
    )
    first = [one.after_sentence_s for one in figures if one.after_sentence_s is not None]
    if not first:
        raise MeasureError("no answer was long enough to be heard")
    voice, reader = await hour(90 if quick else HOUR)
    at = f"{SHAPE.upper()} {QUANTIZATION}, {statistics.median(silent):.0f} tok/s on {len(own_cpus())} CPUs"
    return [
        Row("real-time factor, one core", "", [wall for wall, _ in factors], target=Target(0.1, False)),
        Row("CPU time ÷ length of the sound, one core", "", [cpu for _, cpu in factors]),
        Row("first audio after the first sentence", "s", first, target=Target(0.4, False), note=f"beside {at}"),
        Row("decode with speech : without", "tok/s", spoken, silent, Target(0.9), note=at),
        Row("an hour of speech: last : first memory, speech process", "MB", voice[-1:], voice[:1], Target(1.05, False)),
        Row("an hour of speech: last : first memory, reader", "MB", reader[-1:], reader[:1], Target(1.05, False)),
    ]


def main() -> None:
    options = arguments(__doc__)
    where = machine()
    rows = asyncio.run(measure(options.quick, options.rounds))
    report("speech", where, rows, quick=options.quick)


if __name__ == "__main__":
    run_main(main)
