"""Tests how many colors a terminal counts as having."""

from __future__ import annotations

import pytest
from rich.console import Console

from cpuchat.tui import launch
from cpuchat.tui.app import ChatApp


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
    found: list[str | None] = []

    class Begun(Exception):
        pass

    def make() -> ChatApp:
        found.append(Console(force_terminal=True).color_system)
        raise Begun

    with pytest.raises(Begun):
        launch.run(make)
    assert found == [colors]
