"""A footer shows the keys that can be pressed now, and presses those that are clicked."""

from __future__ import annotations

import asyncio

from textual.app import App, ComposeResult
from textual.pilot import Pilot

from cpuchat.tui.widgets.key_footer import KeyFooter


class _KeyedApp(App[None]):
    BINDINGS = [("a", "one", "One"), ("b", "two", "Two"), ("escape", "back", "Back"), ("c", "three", "Three")]
    ENABLE_COMMAND_PALETTE = False
    states: dict[str, bool | None] = {}
    done = ""

    def compose(self) -> ComposeResult:
        yield KeyFooter()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Enable an action, or disable (None) or hide (False) it."""
        return self.states.get(action, True)

    def action_two(self) -> None:
        self.done = "two"


async def _shows(pilot: Pilot[None], app: _KeyedApp, text: str, enabled: list[bool]) -> None:
    footer = app.query_one(KeyFooter)
    async with asyncio.timeout(180):
        while (footer.render().plain.rstrip(), [one.enabled for one in footer.keys]) != (text, enabled):
            await pilot.pause()


async def test_keys_come_and_go_in_their_order_and_only_an_enabled_one_is_pressed() -> None:
    app = _KeyedApp()
    async with app.run_test() as pilot:

        def with_states(**states: bool | None) -> None:
            app.states = dict(states)
            app.refresh_bindings()

        await _shows(pilot, app, " a One  b Two  esc Back  c Three", [True] * 4)
        with_states(two=None)
        await _shows(pilot, app, " a One  b Two  esc Back  c Three", [True, False, True, True])
        await pilot.click(KeyFooter, offset=(8, 0))
        assert app.done == ""
        with_states()
        await _shows(pilot, app, " a One  b Two  esc Back  c Three", [True] * 4)
        await pilot.click(KeyFooter, offset=(8, 0))
        assert app.done == "two"
        with_states(two=False, back=False, three=False)
        await _shows(pilot, app, " a One", [True])
        await pilot.resize_terminal(26, 24)
        with_states()
        await _shows(pilot, app, " a One  esc Back  c Three", [True] * 3)  # left out before the last, but not Esc
        with_states(back=None)
        await _shows(pilot, app, " a One  b Two  c Three", [True] * 3)  # unless it does nothing
