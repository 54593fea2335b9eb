"""Tests tuning from the list of models, what the settings show of it, and the way back."""

from __future__ import annotations

import threading
from pathlib import Path

import msgspec
import pytest

from cpuchat.models.machine import TunedSettings
from cpuchat.tui.models.quantize import TuneScreen
from cpuchat.tui.settings import SettingRow, SettingsScreen
from tests.support.chat_app import SMALL, WIDE, RunningApp, running
from tests.support.models_screen import opened
from tests.support.scripted_backend import MODEL, ScriptedBackend
from tests.support.tuning import make_up_speeds, without_flash_attention

pytestmark = pytest.mark.usefixtures("no_hub_but_a_local_one", "measured_machine")


async def tuning(app: RunningApp) -> TuneScreen:
    await opened(app)
    await app.press("f6")
    await app.until(lambda: isinstance(app.app.screen, TuneScreen))
    screen = app.app.screen
    assert isinstance(screen, TuneScreen)
    return screen


def backend(model: Path) -> ScriptedBackend:
    return ScriptedBackend(model=msgspec.structs.replace(MODEL, path=str(model)))


async def test_tuned_used_and_undone(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_up_speeds(monkeypatch, without_flash_attention)
    async with running(backend(tiny_model), model=tiny_model, folders=(tiny_model.parent,), size=SMALL) as app:
        screen = await tuning(app)
        await app.until(lambda: screen.done and "Used from the next load" in app.screen_text)
        for size in (SMALL, WIDE):
            await app.pilot.resize_terminal(*size)
            for words in ("flash attention", "auto → off", "+25.0 %", "adopted", "F8 in the settings"):
                assert words in app.screen_text
        await app.press("escape")
        await app.until(lambda: len(app.backend.loads) == 2 and app.app.screen is app.chat and not app.chat.busy)
        assert app.backend.loads[1][1].flash_attn == "off"
        assert app.conversation.settings.engine.flash_attn == "auto"

        await app.press("f2")
        await app.until(lambda: isinstance(app.app.screen, SettingsScreen) and app.app.screen.query(SettingRow))
        row = app.app.screen.query_one("#row-engine-flash_attn", SettingRow)
        assert row.text_beside == "tuned: flash attention off, prefill +25.0 % · F8 undoes"
        await app.press("f8")
        await app.until(lambda: row.text_beside.endswith("undone from the next load"))
        assert app.conversation.in_effect.engine.flash_attn == "off"  # of the worker that runs
        assert TunedSettings().find(tiny_model) is None
        await app.press("escape")


async def test_esc_stops_it_the_model_is_loaded_again_and_what_cannot_be_tuned_says_why(tiny_model: Path) -> None:
    async with running(backend(tiny_model), model=tiny_model, folders=(tiny_model.parent,)) as app:
        screen = await tuning(app)
        await app.until(lambda: " of at most " in app.screen_text)
        await app.press("escape")
        await app.until(lambda: screen.done)
        await app.until(lambda: "Esc closes" in app.screen_text)
        await app.press("escape")
        await app.until(lambda: len(app.backend.loads) == 2 and app.app.screen is app.chat and not app.chat.busy)

        app.conversation.settings.engine.n_ctx = 16_777_216
        screen = await tuning(app)
        await app.until(lambda: screen.done and "Not tuned." in app.screen_text)
        await app.press("escape")


async def test_esc_stops_it_before_it_has_begun(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened_chats = threading.Event()

    def slow_disk(file: Path) -> tuple[int, int]:
        opened_chats.wait(180)
        return 0, 0

    monkeypatch.setattr("cpuchat.chats.history.token_counts", slow_disk)
    async with running(backend(tiny_model), model=tiny_model, folders=(tiny_model.parent,)) as app:
        screen = await tuning(app)
        await app.press("escape")
        opened_chats.set()
        await app.until(lambda: screen.done and "Stopped; nothing was changed." in app.screen_text)
        await app.press("escape")


async def test_the_palette_tunes_the_loaded_model_unless_it_answers(tiny_model: Path) -> None:
    async with running(model=None) as app:
        await app.app.run_action("app.tune")
        await app.until(lambda: "Load a model first." in app.notices)
