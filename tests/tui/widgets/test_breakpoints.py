"""A screen has the classes of its breakpoints when it is first laid out, and is laid out once for each size."""

from __future__ import annotations

import pytest
from textual.app import App, ComposeResult
from textual.events import Resize
from textual.geometry import Size
from textual.screen import Screen
from textual.widgets import Label

from cpuchat.tui.commands import ActionPalette
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


async def test_classes_are_there_before_the_first_layout_and_stay() -> None:
    screen = _Sized()
    async with App[None]().run_test(size=(100, 29)) as pilot:
        await pilot.app.push_screen(screen)
        assert screen.composed == {"-wide", "-low"}
        await pilot.resize_terminal(40, 50)
        await pilot.pause()
        assert screen.classes & SIZES == {"-narrow", "-high"}


@pytest.mark.parametrize("kind", [_Sized, ActionPalette])
async def test_a_size_that_is_queued_behind_another_stays(kind: type[Screen[None]]) -> None:
    screen, laid_out = kind(), list[Size]()

    def refresh_layout(size: Size | None = None, scroll: bool = False) -> None:
        laid_out.append(size or screen.size)
        assert len(laid_out) < 9  # they would take turns for ever
        right(size, scroll)

    async with App[None]().run_test(size=(80, 24)) as pilot:
        await pilot.app.push_screen(screen)
        await pilot.pause()
        right, screen._refresh_layout = screen._refresh_layout, refresh_layout  # type: ignore[method-assign]
        screen.post_message(Resize(Size(60, 20), Size(60, 20)))
        screen.call_later(lambda: None)  # Textual merges events that follow each other
        screen.post_message(Resize(Size(80, 24), Size(80, 24)))
        await pilot.pause()
        assert screen.size == Size(80, 24)
