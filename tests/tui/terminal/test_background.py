"""Tests what the terminal's background and name choose: the default theme, and the colors."""

from __future__ import annotations

import pytest
from rich.console import Console

from cpuchat.config import settings
from cpuchat.config.settings import read_state
from cpuchat.tui.terminal.background import BackgroundReported, is_light_at_start, remember, set_colorterm
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


@pytest.mark.parametrize(
    ("term", "colorterm", "colors"),
    [
        ("foot", "", "truecolor"),
        ("xterm-direct", "", "truecolor"),
        ("foot", "no", "standard"),
        ("xterm", "", "standard"),
        ("xterm-256color", "", "256"),
    ],
)
def test_a_terminal_that_only_its_name_describes_has_its_colors(
    term: str, colorterm: str, colors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLORTERM", colorterm)
    set_colorterm()
    assert Console(force_terminal=True).color_system == colors
