from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
from textual.widgets import Input, Static, TextArea

from cpuchat.base import paths
from cpuchat.config import settings
from cpuchat.config.settings import DECLARED, Settings, value_of
from cpuchat.models.machine import Tuned, TunedChoice, keep_tuned
from cpuchat.tui.settings import TABS, SettingsScreen, fields
from cpuchat.tui.widgets.dialogs import ConfirmScreen
from cpuchat.tui.widgets.setting_rows import Field, SettingRow
from tests.support.chat_app import SMALL, RunningApp, running
from tests.support.scripted_backend import MODEL, ScriptedBackend
from tests.support.snapshots import snapshot


async def opened(app: RunningApp) -> SettingsScreen:
    await app.ready()
    await app.press("f2")
    screen = await app.opens(SettingsScreen)
    await app.until(lambda: screen.rows)
    return screen


def row(screen: SettingsScreen, key: str) -> SettingRow:
    return screen.query_one(f"#row-{key.replace('.', '-')}", SettingRow)


FIELDS = [field for tab in TABS for field in fields(tab)]


def test_every_setting_is_in_one_tab() -> None:
    shown = [field.key for field in FIELDS]
    assert len(shown) == len(set(shown))
    # Kept by the app, or only of use on the command line.
    hidden = {"model.last", "engine.poll", "engine.ubatch", "engine.prefill_share"}
    assert set(shown) | hidden == set(DECLARED)
    assert all(field.about and len(field.label) < 20 for field in FIELDS)


@pytest.mark.parametrize("field", FIELDS, ids=lambda f: f.key)
def test_a_field_gives_back_what_it_shows(field: Field) -> None:
    value = value_of(Settings(), field.key)
    assert value == field.default
    assert field.parse(field.shown(value)) == value


@pytest.mark.parametrize(
    ("key", "text", "wants"),
    [
        ("sampling.temperature", "hot", "needs a number from 0 to 10"),
        ("sampling.temperature", "11", "needs a number from 0 to 10"),
        ("sampling.temperature", "nan", "needs a number from 0 to 10"),
        ("sampling.repeat_penalty", "0", "needs a number from 0.01 to 10"),
        ("sampling.top_k", "-1", "needs a whole number of 0 or more"),
        ("sampling.top_k", "1.5", "needs a whole number of 0 or more"),
        ("sampling.seed", "-2", "needs a whole number of -1 or more"),
        ("engine.ctx", "99999999999", "needs a whole number from 0 to 16,777,216"),
        ("speculation.depth", "", "needs a whole number from 0 to 31"),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_wanted(key: str, text: str, wants: str) -> None:
    with pytest.raises(ValueError, match=f"^{wants}$"):
        Field.of(key).parse(text)


async def test_changes_are_saved_comments_stay_and_engine_settings_offer_to_load_again() -> None:
    file = paths.settings_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("[sampling]\n# mine\ntop_k = 20\n")
    async with running() as app:
        screen = await opened(app)
        assert row(screen, "sampling.top_k").content == "20"
        row(screen, "sampling.temperature").editor.focus()
        await app.press("ctrl+a", "ctrl+k", *"0.2")
        row(screen, "engine.threads").put(3)
        row(screen, "ui.theme").put("okabe-ito")
        await app.pilot.pause()
        await app.press("ctrl+s")
        await app.confirm()
        await app.loaded(2)
        assert app.backend.specs[1].threads == 3 and app.app.theme == "okabe-ito"
        await app.until(lambda: app.conversation.settings.sampling.temperature == 0.2)
    text = file.read_text()
    assert "# mine" in text and "temperature = 0.2" in text and "top_k = 20" in text


async def test_a_field_is_put_back_an_error_stands_beside_it_and_leaving_with_changes_asks() -> None:
    settings.update({"sampling": {"top_k": 5}})
    async with running() as app:
        screen = await opened(app)
        top_k, top_p = row(screen, "sampling.top_k"), row(screen, "sampling.top_p")
        for one in (row(screen, "ui.motion"), top_k):  # the keys stay in their places
            screen.show_row(one)
            await app.until(lambda one=one: one.editor.has_focus)
            await app.shows("^D reset  ^S save")
        await app.shows("0 or more · default 40 · set in config.toml")
        hint = screen.query_one("#hint", Static)
        for key, is_cut in (("speculation.draft_model", True), ("speculation.drafters", False)):
            screen.show_row(row(screen, key))  # help that is cut beside the field stands below
            await app.until(lambda key=key: row(screen, key).editor.has_focus)
            await app.until(lambda is_cut=is_cut: ("file, repository" in str(hint.content)) == is_cut)
        screen.show_row(top_k)
        await app.until(lambda: top_k.editor.has_focus)
        await app.press("ctrl+d")
        assert top_k.content == "" and top_k.query_one(Input).placeholder == "40" and top_k.changed

        screen.show_row(top_p)
        top_p.put(1.5)
        await app.shows("! needs a number from 0 to 1")
        await app.press("ctrl+s")
        assert app.app.screen is screen and screen.focused is top_p.editor
        for answer, then in (("n", screen), ("y", app.chat)):
            await app.press("escape")
            await app.opens(ConfirmScreen)
            await app.press(answer)
            await app.until(lambda then=then: app.app.screen is then)
    saved = settings.load()
    assert (saved.sampling.top_k, saved.sampling.top_p) == (5, None)


async def test_what_was_tuned_is_told_beside_the_setting(tiny_model: Path) -> None:
    choice = TunedChoice(keys=("engine.flash_attn",), words="flash attention off", decode=0.0, prefill=0.25)
    changes = {"engine": {"flash_attn": "off"}}
    keep_tuned(tiny_model, Tuned(model="tiny", changes=changes, choices=(choice,)))
    backend = ScriptedBackend(model=msgspec.structs.replace(MODEL, path=str(tiny_model)))
    async with running(backend, model=tiny_model) as app:
        beside = row(await opened(app), "engine.flash_attn").text_beside
    assert beside == "tuned: flash attention off, prefill +25.0 % · `cpuchat tune --undo` reverts"


async def test_snapshots() -> None:
    async with running(size=SMALL) as app:
        screen = await opened(app)
        screen.query_one("#form").border_subtitle = "config.toml"
        for field in screen.query(Input):
            field.cursor_blink = False
        screen.show_row(row(screen, "sampling.top_k"))
        row(screen, "sampling.top_k").put("many")
        await app.pilot.pause()
        await snapshot(app.app, "settings-80x24")


async def test_a_closed_form_is_freed_and_what_others_changed_while_it_was_open_stays() -> None:
    async with running() as app:
        areas = [weakref.ref(area) for area in (await opened(app)).query(TextArea)]
        await app.press("escape")
        await opened(app)  # what was closed last may be remembered
        await app.press("escape")
        await app.closes()
        gc.collect()
        assert areas and not any(area() is not None for area in areas)
        screen = await opened(app)
        app.app.services.save_settings({"speech": {"speed": 1.5}})
        settings.update({"chat": {"max_tokens": 50}})  # another instance
        await app.until(lambda: app.conversation.settings.speech.speed == 1.5)
        row(screen, "sampling.top_k").put(7)
        await app.press("ctrl+s")
        await app.until(lambda: app.conversation.settings.sampling.top_k == 7)
    saved = settings.load()
    assert (saved.sampling.top_k, saved.speech.speed, saved.chat.max_tokens) == (7, 1.5, 50)


async def test_leaving_while_the_settings_are_saved_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    saving, may_save, update = threading.Event(), threading.Event(), settings.update

    def slowly(changes: dict[str, dict[str, Any]]) -> Settings:
        saving.set()
        may_save.wait(180)
        return update(changes)

    async with running() as app:
        screen = await opened(app)
        row(screen, "sampling.top_k").put(7)
        await app.pilot.pause()
        monkeypatch.setattr(settings, "update", slowly)
        await app.press("ctrl+s")
        await app.until(saving.is_set)
        await app.press("escape", "f1")
        may_save.set()
        await app.told("Settings saved.")
        await app.press("escape")
        await app.closes()
        assert app.conversation.settings.sampling.top_k == 7
