"""Tests that the terminal's background chooses the default theme; test_input.py has its reply among keys."""

from __future__ import annotations

import pytest

from cpuchat.config import settings
from cpuchat.config.settings import read_state
from cpuchat.tui.terminal.background import BackgroundReported, is_light_at_start, remember
from tests.support.chat_app import running


async def test_the_default_theme_follows_the_background_which_is_remembered_and_a_chosen_one_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLORFGBG", raising=False)
    monkeypatch.setenv("TERM_PROGRAM", "bright")
    async with running() as app:
        await app.ready()
        assert app.app.theme == "cpuchat" and app.app.asks_background
        app.app.post_message(BackgroundReported(is_light=True))
        await app.until(lambda: app.app.theme == "cpuchat-light" and "bright" in read_state().light_terminals)
        assert settings.load().ui.theme == "auto"
    assert is_light_at_start()
    settings.update({"ui": {"theme": "cpuchat"}})
    async with running() as app:
        await app.ready()
        app.app.post_message(BackgroundReported(is_light=True))
        await app.pilot.pause()
        assert app.app.theme == "cpuchat"
        app.app.services.show_theme("auto")  # chosen in the settings
        assert app.app.theme == "cpuchat-light"
    monkeypatch.setenv("COLORFGBG", "15;0")  # it says so itself
    assert not is_light_at_start()
    monkeypatch.delenv("COLORFGBG")
    remember(False)
    assert not is_light_at_start() and not read_state().light_terminals
