"""A screen has the classes of its breakpoints when it is first laid out."""

from __future__ import annotations

import pytest
from textual.app import App, ComposeResult
from textual.widgets import Label

from cpuchat.tui.terminal.painter import LeanScreen

SIZES = {"-narrow", "-wide", "-low", "-high"}


class _Sized(LeanScreen[None]):
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-low"), (30, "-high")]
    composed: frozenset[str] = frozenset()

    def compose(self) -> ComposeResult:
        yield Label("text")

    def on_mount(self) -> None:
        self.composed = self.classes & SIZES


@pytest.mark.parametrize(
    ("size", "classes"),
    [((120, 40), {"-wide", "-high"}), ((99, 29), {"-narrow", "-low"}), ((100, 29), {"-wide", "-low"})],
)
async def test_classes_are_there_before_the_first_layout_and_stay(size: tuple[int, int], classes: set[str]) -> None:
    screen = _Sized()
    async with App[None]().run_test(size=size) as pilot:
        await pilot.app.push_screen(screen)
        assert screen.composed == classes
        await pilot.pause()
        assert screen.classes & SIZES == classes
        await pilot.resize_terminal(40, 50)
        await pilot.pause()
        assert screen.classes & SIZES == {"-narrow", "-high"}
