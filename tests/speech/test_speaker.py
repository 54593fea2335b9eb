"""Tests reading aloud with the real speech process and the real voice."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from cpuchat.base.errors import CpuchatError, SpeechFailed
from cpuchat.speech.player import Player, ProgramPlayer, WavPlayer, playing_program
from cpuchat.speech.speaker import Speaker, read_aloud
from tests.support.listening import listen
from tests.support.sound_program import SoundProgram, no_sound_program

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
STORY = "Each weight is read once per token. " * 8
HANG_GUARD = 180


class Reading:
    """A speaker whose next text goes to what `make` returns."""

    def __init__(self) -> None:
        self.make: Callable[[], Player] = lambda: 1 / 0  # type: ignore[assignment, return-value]
        self.problems: list[CpuchatError] = []
        self.over = asyncio.Event()
        self.speaker = Speaker(1.0, lambda: self.make(), tell=self.problems.append, ended=self.over.set)


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


async def test_a_text_becomes_a_wav_file_that_can_be_heard(tmp_path: Path, shared: Reading) -> None:
    file = tmp_path / "new" / "answer.wav"
    shared.make = lambda: WavPlayer(file)
    await read_aloud(shared.speaker, "It runs at 41.3 tok/s. That is fast, I think. Is it?")
    assert not shared.problems
    heard = listen(file)
    assert heard.rate == 24_000
    assert 4 < heard.seconds < 12
    assert heard.seconds == pytest.approx(shared.speaker.seconds, abs=0.6)  # and the pauses between
    assert 0.02 < heard.loudness < 0.3
    assert heard.clipped == 0
    assert heard.silent < 0.5
    assert heard.pause < 0.8


async def test_reading_begins_before_the_text_is_complete(tmp_path: Path, shared: Reading) -> None:
    file = tmp_path / "a.wav"
    shared.make = lambda: WavPlayer(file)
    speaker = shared.speaker
    speaker.begin()
    speaker.feed("The first sentence is here. And ")
    while not file.exists() or file.stat().st_size < 10_000:
        await asyncio.sleep(0.01)
    first = listen(file).seconds
    speaker.feed("another one.")
    speaker.finish()
    await speaker.wait()
    assert listen(file).seconds > first + 0.5
    assert shared.over.is_set()


async def test_the_voice_is_kept_for_the_next_text_which_is_played_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Reading
) -> None:
    files = iter(tmp_path / f"{number}.wav" for number in range(2))
    shared.make = lambda: WavPlayer(next(files))
    await read_aloud(shared.speaker, "Hello. How are you?")
    pid = shared.speaker.pid
    assert pid is not None and os.getpriority(os.PRIO_PROCESS, pid) >= 5
    await read_aloud(shared.speaker, "Hello. How are you?")
    assert shared.speaker.pid == pid
    assert (tmp_path / "0.wav").read_bytes() == (tmp_path / "1.wav").read_bytes()

    program = SoundProgram(tmp_path / "bin", monkeypatch)
    assert await playing_program() == "aplay"
    program.file.unlink()
    shared.make = lambda: ProgramPlayer("aplay")
    await read_aloud(shared.speaker, "Hello. How are you?")
    assert not shared.problems
    assert program.seconds() == pytest.approx(listen(tmp_path / "1.wav").seconds)


async def test_stopping_is_silence_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Reading) -> None:
    program = SoundProgram(tmp_path / "bin", monkeypatch, paced=True)
    shared.make = lambda: ProgramPlayer("aplay")
    speaker = shared.speaker
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
    monkeypatch.undo()
    file = tmp_path / "next.wav"
    shared.make = lambda: WavPlayer(file)
    await read_aloud(speaker, "One.")
    assert listen(file).seconds < 3
    assert program.seconds() == heard


def process(speaker: Speaker) -> psutil.Process:
    assert speaker.pid is not None
    return psutil.Process(speaker.pid)


async def test_a_voice_that_dies_is_reported_and_the_next_text_starts_it_again(tmp_path: Path, shared: Reading) -> None:
    files = iter(tmp_path / f"{number}.wav" for number in range(9))
    shared.make = lambda: WavPlayer(next(files))
    speaker = shared.speaker
    await read_aloud(speaker, "One.")
    process(speaker).kill()
    while speaker.pid is not None:
        await asyncio.sleep(0.01)
    await read_aloud(speaker, "Two.")  # it was idle: nothing is lost
    assert not shared.problems
    assert speaker.seconds > 0
    speaker.begin()
    process(speaker).suspend()
    speaker.feed("Three. ")
    speaker.finish()
    await asyncio.sleep(0)
    process(speaker).kill()
    await speaker.wait()
    assert [type(problem) for problem in shared.problems] == [SpeechFailed]


async def test_a_player_that_cannot_play_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Reading
) -> None:
    SoundProgram(tmp_path / "bin", monkeypatch, status=1)
    with pytest.raises(SpeechFailed, match="No sound device"):
        await playing_program()
    shared.make = lambda: ProgramPlayer("aplay")
    await read_aloud(shared.speaker, "One.")
    assert "exit status 1" in shared.problems[0].message
    no_sound_program(tmp_path / "empty", monkeypatch)
    await read_aloud(shared.speaker, "One.")
    assert "Cannot start aplay" in shared.problems[1].message
    shared.make = lambda: 1 / 0  # type: ignore[assignment, return-value]
    await read_aloud(shared.speaker, "One.")
    assert "ZeroDivisionError" in shared.problems[2].message
    (tmp_path / "file").write_text("")
    shared.make = lambda: WavPlayer(tmp_path / "file" / "a.wav")
    await read_aloud(shared.speaker, "One.")
    assert "Cannot write" in shared.problems[3].message
