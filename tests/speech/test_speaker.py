"""Tests reading aloud with the real speech process and the real voice."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from cpuchat.base.errors import CpuchatError, SpeechFailed
from cpuchat.config.settings import SpeechSection
from cpuchat.speech.player import Player, ProgramPlayer, WavPlayer, playing_program, unused_file
from cpuchat.speech.speaker import Speaker, choose_voice, read_aloud
from tests.support.listening import listen
from tests.support.sound_program import SoundProgram, no_sound_program

pytestmark = pytest.mark.slow
STORY = "Each weight is read once per token. " * 8
HANG_GUARD = 180


class Reading:
    def __init__(self, make: Callable[[], Player]) -> None:
        self.problems: list[CpuchatError] = []
        self.over = asyncio.Event()

        async def player() -> Player:
            return make()

        self.speaker = Speaker(
            choose_voice(SpeechSection()), player, tell=self.problems.append, ended=self.over.set
        )  # fmt: skip


@asynccontextmanager
async def reading(make: Callable[[], Player]) -> AsyncIterator[Reading]:
    found = Reading(make)
    try:
        async with asyncio.timeout(HANG_GUARD):
            yield found
    finally:
        await found.speaker.close()


async def test_a_text_becomes_a_wav_file_that_can_be_heard(tmp_path: Path) -> None:
    file = tmp_path / "new" / "answer.wav"
    async with reading(lambda: WavPlayer(file)) as one:
        await read_aloud(one.speaker, "It runs at 41.3 tok/s. That is fast, I think. Is it?")
        figures = one.speaker.figures()
    assert not one.problems
    heard = listen(file)
    assert heard.rate == 24_000
    assert 4 < heard.seconds < 12
    assert heard.seconds == pytest.approx(figures.sound_s, abs=0.6)  # and the pauses between
    assert 0.02 < heard.loudness < 0.3
    assert heard.clipped == 0
    assert heard.silent < 0.5
    assert heard.pause < 0.8
    assert figures.engine == "hibari"
    assert figures.real_time_factor is not None
    assert figures.after_sentence_s is not None


async def test_reading_begins_before_the_text_is_complete(tmp_path: Path) -> None:
    file = tmp_path / "a.wav"
    async with reading(lambda: WavPlayer(file)) as one:
        one.speaker.begin()
        one.speaker.feed("The first sentence is here. And")
        while not file.exists() or file.stat().st_size < 10_000:
            await asyncio.sleep(0.01)
        first = listen(file).seconds
        one.speaker.feed(" another one.")
        one.speaker.finish()
        await one.speaker.wait()
        assert listen(file).seconds > first + 0.5
        assert one.over.is_set()


async def test_the_voice_is_kept_for_the_next_text_and_gone_at_the_end(tmp_path: Path) -> None:
    files = iter(tmp_path / f"{number}.wav" for number in range(2))
    async with reading(lambda: WavPlayer(next(files))) as one:
        await read_aloud(one.speaker, "One.")
        pid = one.speaker.pid
        assert pid is not None
        await read_aloud(one.speaker, "One.")
        assert one.speaker.pid == pid
    assert not psutil.pid_exists(pid)
    assert (tmp_path / "0.wav").read_bytes() == (tmp_path / "1.wav").read_bytes()


async def test_the_process_keeps_to_its_cpus(tmp_path: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    async with reading(lambda: WavPlayer(tmp_path / "a.wav")) as one:
        one.speaker.prepare((cpu,))
        ready = await one.speaker.ready()
        assert ready.cpus == (cpu,)
        assert one.speaker.pid is not None
        assert os.sched_getaffinity(one.speaker.pid) == {cpu}
        assert os.getpriority(os.PRIO_PROCESS, one.speaker.pid) >= 5
        before = one.speaker.pid
        one.speaker.prepare((cpu,))
        assert one.speaker.pid == before
        one.speaker.prepare(())
        await one.speaker.ready()
        assert one.speaker.pid != before


async def test_what_is_played_is_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with reading(lambda: WavPlayer(tmp_path / "a.wav")) as one:
        await read_aloud(one.speaker, "Hello. How are you?")
    program = SoundProgram(tmp_path / "bin", monkeypatch)
    assert await playing_program() == "aplay"
    program.file.unlink()
    async with reading(lambda: ProgramPlayer("aplay")) as one:
        await read_aloud(one.speaker, "Hello. How are you?")
    assert not one.problems
    assert program.seconds() == pytest.approx(listen(tmp_path / "a.wav").seconds)


async def test_stopping_is_silence_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = SoundProgram(tmp_path / "bin", monkeypatch, paced=True)
    async with reading(lambda: ProgramPlayer("aplay")) as one:
        one.speaker.begin()
        one.speaker.feed(STORY)
        one.speaker.finish()
        while not program.seconds():
            await asyncio.sleep(0.01)
        players = [p for p in psutil.Process().children() if "aplay" in " ".join(p.cmdline())]
        assert len(players) == 1
        assert one.speaker.figures().queued_s > 1
        one.speaker.stop()
        assert not one.speaker.busy
        assert one.speaker.figures().queued_s == 0
        while players[0].is_running():
            await asyncio.sleep(0.01)
        heard = program.seconds()
        # The next text is read from its start, with nothing of the one before.
        monkeypatch.undo()
        file = tmp_path / "next.wav"
        one.speaker._new_player = lambda: _made(WavPlayer(file))
        await read_aloud(one.speaker, "One.")
        assert listen(file).seconds < 3
        assert program.seconds() == heard


async def _made(player: Player) -> Player:
    return player


async def test_sound_is_made_a_few_seconds_ahead_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = SoundProgram(tmp_path / "bin", monkeypatch, paced=True)
    async with reading(lambda: ProgramPlayer("aplay")) as one:
        one.speaker.begin()
        one.speaker.feed("This sentence takes about three seconds to be read aloud, I guess. " * 100)
        while program.seconds() < 1:
            assert one.speaker.figures().queued_s < 15
            await asyncio.sleep(0.02)
        assert one.speaker.figures().sound_s < 25


def process(speaker: Speaker) -> psutil.Process:
    assert speaker.pid is not None
    return psutil.Process(speaker.pid)


async def test_a_voice_that_dies_is_reported_and_the_next_text_starts_it_again(tmp_path: Path) -> None:
    files = iter(tmp_path / f"{number}.wav" for number in range(9))
    async with reading(lambda: WavPlayer(next(files))) as one:
        await read_aloud(one.speaker, "One.")
        process(one.speaker).kill()
        while one.speaker.pid is not None:
            await asyncio.sleep(0.01)
        await read_aloud(one.speaker, "Two.")  # it was idle: nothing is lost
        assert not one.problems
        assert one.speaker.figures().sound_s > 0
        one.speaker.begin()
        process(one.speaker).suspend()
        one.speaker.feed("Three. ")
        one.speaker.finish()
        while one.speaker._last_id < 3:  # asked for
            await asyncio.sleep(0.01)
        process(one.speaker).kill()
        await one.speaker.wait()
        assert [type(problem) for problem in one.problems] == [SpeechFailed]


async def test_a_player_that_ends_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SoundProgram(tmp_path / "bin", monkeypatch, status=1)
    assert await playing_program() == ""
    async with reading(lambda: ProgramPlayer("aplay")) as one:
        await read_aloud(one.speaker, "One.")
        assert "exit status 1" in one.problems[0].message
        no_sound_program(tmp_path / "empty", monkeypatch)
        await read_aloud(one.speaker, "One.")
        assert "Cannot start aplay" in one.problems[1].message
        one.speaker._new_player = lambda: _made(1 / 0)  # type: ignore[arg-type]
        await read_aloud(one.speaker, "One.")
        assert "ZeroDivisionError" in one.problems[2].message


async def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with reading(lambda: WavPlayer(tmp_path / "file" / "a.wav")) as one:
        await read_aloud(one.speaker, "One.")
        assert "Cannot write" in one.problems[0].message


async def test_a_text_without_words_starts_nothing(tmp_path: Path) -> None:
    async with reading(lambda: WavPlayer(tmp_path / "a.wav")) as one:
        await read_aloud(one.speaker, "---\n\n🎉")
        assert one.speaker.pid is None
    assert not list(tmp_path.iterdir())


def test_files_are_not_overwritten(tmp_path: Path) -> None:
    for expected in ("a.wav", "a-2.wav", "a-3.wav"):
        file = unused_file(tmp_path, "a")
        assert file.name == expected
        file.touch()
