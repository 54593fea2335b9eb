"""Tests reading answers aloud in the app, with the real voice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cpuchat.config import settings
from tests.support.chat_app import RunningApp, loaded, running
from tests.support.scripted_backend import Gate, ScriptedBackend, answer
from tests.support.sound_program import SoundProgram, no_sound_program

ANSWER = "The first sentence is read while the second one is written. Here it is, complete at last."


async def switch_on(app: RunningApp) -> None:
    await app.ready()
    await app.press("ctrl+s")
    await app.until(lambda: "Reading answers aloud (Esc stops)." in app.notices)


async def test_an_answer_is_read_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = SoundProgram(tmp_path / "bin", monkeypatch)
    gate = Gate()
    async with running(ScriptedBackend([answer(ANSWER, gate=gate)])) as app:
        await switch_on(app)
        await app.until(lambda: settings.load().speech.answers)
        await app.count_up_to(gate)
        await app.until(lambda: program.seconds() > 1)
        assert app.chat.session.busy and not app.conversation.logs_speed  # the answer is not complete
        gate.open()
        await app.until(lambda: not app.chat.session.busy and not app.chat.reader.busy)
        heard = program.seconds()
        assert 3 < heard < 12
        assert np.sqrt(np.mean(program.samples**2)) > 0.02
        await app.press("ctrl+s")
        await app.until(lambda: "Reading aloud is off." in app.notices)
        await app.until(lambda: not settings.load().speech.answers)
        await app.send("Again")
        assert program.seconds() == heard
        app.chat.commands.read_answer()  # on request
        await app.until(lambda: app.chat.reader.busy)
        await app.chat.reader.settings_changed(app.conversation.settings.speech)
        assert app.chat.reader.busy  # of other settings
        await app.until(lambda: not app.chat.reader.busy)
        assert program.seconds() > heard + 2


async def test_escape_silences_what_is_read_after_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = SoundProgram(tmp_path / "bin", monkeypatch, paced=True)
    async with running(ScriptedBackend([answer(" ".join([ANSWER] * 5))])) as app:
        await switch_on(app)
        await app.send("Count")
        await app.until(lambda: program.seconds() > 0.5)
        assert app.chat.reader.busy
        assert not app.chat.pass_probe.is_idle  # nothing is measured beside it
        await app.press("escape")
        assert not app.chat.reader.busy
        assert app.chat.pass_probe.is_idle


async def test_without_a_sound_device_the_reason_is_told_and_answers_are_not_affected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_sound_program(tmp_path / "bin", monkeypatch)
    async with loaded() as app:
        await app.press("ctrl+s")
        await app.until(lambda: any("No sound device" in notice for notice in app.notices))
        assert not app.chat.reader.enabled
        await app.send("Hi")
        assert app.transcript.messages[-1].content == "Hello there."
