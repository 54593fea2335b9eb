"""A footer changes only the keys that changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from textual.app import App, ComposeResult
from textual.pilot import Pilot
from textual.widgets._footer import FooterKey

from cpuchat.tui.widgets.key_footer import KeyFooter


class _KeyedApp(App[None]):
    BINDINGS = [("a", "one", "One"), ("b", "two", "Two"), ("c", "three", "Three")]
    ENABLE_COMMAND_PALETTE = False
    states: dict[str, bool | None] = {}
    done = ""

    def compose(self) -> ComposeResult:
        yield KeyFooter()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Enable an action, or disable (None) or hide (False) it."""
        return self.states.get(action, True)

    def action_one(self) -> None:
        self.done = "one"

    def action_two(self) -> None:
        self.done = "two"

    def action_three(self) -> None:
        self.done = "three"

    def shown(self) -> list[FooterKey]:
        return list(self.query_one(KeyFooter).query(FooterKey))


async def _until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(180):
        while not condition():
            await pilot.pause()


def _disabled(app: _KeyedApp) -> list[bool]:
    return [key.has_class("-disabled") for key in app.shown()]


def _text(app: _KeyedApp) -> str:
    return "".join(strip.text for strip in app.screen._compositor.render_strips(app.size)[-1:]).rstrip()


async def test_a_key_that_is_disabled_keeps_its_widget() -> None:
    app = _KeyedApp()
    async with app.run_test() as pilot:
        await _until(pilot, lambda: _disabled(app) == [False, False, False])
        before = app.shown()
        app.states = {"two": None}
        app.refresh_bindings()
        await _until(pilot, lambda: _disabled(app) == [False, True, False])
        assert app.shown() == before
        await pilot.click(before[1])
        assert app.done == ""
        app.states = {}
        app.refresh_bindings()
        await _until(pilot, lambda: _disabled(app) == [False, False, False])
        assert app.shown() == before
        await pilot.click(before[1])
        assert app.done == "two"


async def test_keys_come_and_go_in_their_order() -> None:
    app = _KeyedApp()
    async with app.run_test() as pilot:
        await _until(pilot, lambda: _text(app) == " a One  b Two  c Three")
        app.states = {"one": False}
        app.refresh_bindings()
        await _until(pilot, lambda: _text(app) == " b Two  c Three")
        await pilot.click(app.shown()[0])
        assert app.done == "two"
        app.states = {"three": False}
        app.refresh_bindings()
        await _until(pilot, lambda: _text(app) == " a One  b Two")
        app.states = {}
        app.refresh_bindings()
        await _until(pilot, lambda: _text(app) == " a One  b Two  c Three")
