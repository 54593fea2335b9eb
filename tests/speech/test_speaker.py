"""Tests reading aloud with the real speech process and the real voice."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio

from cpuchat.base.errors import CpuchatError, SpeechFailed
from cpuchat.speech.player import ProgramPlayer, playing_program
from cpuchat.speech.speaker import Speaker, read_aloud
from tests.support.sound_program import SoundProgram, no_sound_program

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
STORY = "Each weight is read once per token. " * 8
HANG_GUARD = 180


class Reading:
    """A speaker that plays with the `aplay` of the test."""

    def __init__(self) -> None:
        self.program = "aplay"
        self.problems: list[CpuchatError] = []
        self.over = asyncio.Event()
        make = lambda: ProgramPlayer(self.program)  # noqa: E731
        self.speaker = Speaker(1.0, make, tell=self.problems.append, ended=self.over.set)

    async def read(self, text: str) -> None:
        await read_aloud(self.speaker, text)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def voice() -> AsyncIterator[Reading]:
    """A voice for all tests, which leave it as it was; its process ends with the speaker."""
    found = Reading()
    found.speaker.prepare()
    yield found
    pid = found.speaker.pid
    await found.speaker.close()
    assert pid is None or not psutil.pid_exists(pid)


@pytest_asyncio.fixture(loop_scope="module")
async def shared(voice: Reading) -> AsyncIterator[Reading]:
    voice.problems.clear()
    voice.over.clear()
    async with asyncio.timeout(HANG_GUARD):
        yield voice
        voice.speaker.stop()


async def test_a_text_becomes_sound_while_it_comes_and_the_voice_is_kept_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Reading
) -> None:
    program, speaker = SoundProgram(tmp_path / "bin", monkeypatch), shared.speaker
    assert await playing_program() == "aplay"
    program.file.unlink()
    speaker.begin()
    speaker.feed("The first sentence is here. And ")
    while program.seconds() < 1:
        await asyncio.sleep(0.01)
    first = program.seconds()
    speaker.feed("it runs at 41.3 tok/s. Is that fast?")
    speaker.finish()
    await speaker.wait()
    assert shared.over.is_set() and not shared.problems
    samples = program.samples
    assert first + 0.5 < program.seconds() < 12
    assert 0.02 < np.sqrt((samples**2).mean()) < 0.3 and np.abs(samples).max() < 0.999
    pid = speaker.pid
    assert pid is not None and os.getpriority(os.PRIO_PROCESS, pid) >= 5
    heard = []
    for _ in range(2):
        program.file.unlink()
        await shared.read("Hello. How are you?")
        heard.append(program.file.read_bytes())
    assert speaker.pid == pid and heard[0] == heard[1]


async def test_stopping_is_silence_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Reading) -> None:
    program, speaker = SoundProgram(tmp_path / "bin", monkeypatch, paced=True), shared.speaker
    speaker.begin()
    speaker.feed(STORY)
    speaker.finish()
    while not program.seconds():
        await asyncio.sleep(0.01)
    players = [p for p in psutil.Process().children() if "aplay" in " ".join(p.cmdline())]
    assert len(players) == 1
    speaker.stop()
    assert not speaker.busy
    while players[0].is_running():
        await asyncio.sleep(0.01)
    heard = program.seconds()
    # The next text is read from its start, with nothing of the one before.
    other = SoundProgram(tmp_path / "other", monkeypatch)
    await shared.read("One.")
    assert other.seconds() < 3 and program.seconds() == heard


async def test_a_voice_that_dies_is_reported_and_the_next_text_starts_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Reading
) -> None:
    program, speaker = SoundProgram(tmp_path / "bin", monkeypatch), shared.speaker

    def process() -> psutil.Process:
        assert speaker.pid is not None
        return psutil.Process(speaker.pid)

    await shared.read("One.")
    process().kill()
    while speaker.pid is not None:
        await asyncio.sleep(0.01)
    heard = program.seconds()
    await shared.read("Two.")  # it was idle: nothing is lost
    assert not shared.problems and program.seconds() > heard
    speaker.begin()
    process().suspend()
    speaker.feed("Three. ")
    speaker.finish()
    await asyncio.sleep(0)
    process().kill()
    await speaker.wait()
    assert [type(problem) for problem in shared.problems] == [SpeechFailed]


async def test_a_player_that_cannot_play_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Reading
) -> None:
    SoundProgram(tmp_path / "bin", monkeypatch, status=1)
    with pytest.raises(SpeechFailed, match="No sound device"):
        await playing_program()
    await shared.read("One.")
    assert "exit status 1" in shared.problems[0].message
    no_sound_program(tmp_path / "empty", monkeypatch)
    await shared.read("One.")
    assert "Cannot start aplay" in shared.problems[1].message
    shared.program = "unheard of"
    await shared.read("One.")
    shared.program = "aplay"
    assert "KeyError" in shared.problems[2].message
