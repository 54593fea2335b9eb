"""The command palette: everything that has a key or an action, by group."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

from textual import events, on
from textual.app import App
from textual.await_complete import AwaitComplete
from textual.command import CommandList, CommandPalette, DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.dom import DOMNode
from textual.screen import Screen
from textual.widgets import Input
from textual.worker import Worker, WorkerError

from cpuchat.base.text import clean_line
from cpuchat.tui import keys
from cpuchat.tui.terminal.painter import only_current

GROUPS = ("Answer", "Chats", "Models", "Downloads", "Compare", "Hardware", "Settings", "View", "App")
"""In the order in which the palette lists them."""
T = TypeVar("T")
_WIDEST, _SHARE, _FRAME = 76, 0.96, 6  # of the palette, in cells: app.tcss


class ActionPalette(CommandPalette):
    """Textual's palette, whose Enter acts on the rows of the text, even if they are still being searched."""

    _search: Worker[None]

    def on_resize(self, event: events.Resize) -> None:
        only_current(self, event)

    def dismiss(self, result: None = None) -> AwaitComplete:
        """Close, unless it is closed already, lies below another screen or still opens, as `Dismissable`."""
        return super().dismiss(result) if self.is_active and self.is_mounted else AwaitComplete.nothing()

    def _gather_commands(self, search_value: str) -> Worker[None]:
        if self in self.app.screen_stack:  # else it is closed, and this was typed just before
            self._search = super()._gather_commands(search_value)
        return self._search

    @on(Input.Submitted)
    async def _act_on_the_text(self, event: Input.Submitted) -> None:
        event.prevent_default()
        event.stop()
        rows = self.query_one(CommandList)
        with getattr(self.app, "keys_held", nullcontext)():  # what follows is meant for what the command opens
            try:
                await self._search.wait()
            except WorkerError:  # the palette was closed
                return
            if (index := rows.highlighted) is not None:
                self._select_command(CommandList.OptionSelected(rows, rows.get_option_at_index(index), index))
            elif self._list_visible:
                rows.action_cursor_down()


def line(app: App[Any], group: str, title: Content, key: str = "") -> Content:
    """`Answer     Regenerate          Ctrl+R`, as wide as the palette; group and key dim."""
    room = min(_WIDEST, int(_SHARE * app.size.width)) - _FRAME
    key = clean_line(key)
    name = title.truncate(max(room - 12 - len(key), 8), ellipsis=True)
    space = " " * (room - 11 - name.cell_length - len(key))
    # Not a color of the theme: it must be readable on the highlighted line, too.
    return Content.assemble((f"{group:<11}", "dim"), name, space, (key, "dim"))


def offered(screen: Screen[Any]) -> list[tuple[keys.Key, str, Callable[[], Any]]]:
    """Return the commands of a screen and of the app that can be used now, by group: key, title, and what runs it."""
    usable: list[tuple[keys.Key, str, Callable[[], Any]]] = []
    for key in getattr(screen.app, "moved_keys", keys.KEYS):
        if key.palette and key.place in (getattr(screen, "KEYS", ""), "app"):
            node = screen.app if key.place == "app" else screen
            if node.check_action(key.action.partition("(")[0], ()):
                usable.append((key, key.title, partial(node.run_action, key.action)))
    return sorted(usable, key=lambda command: GROUPS.index(command[0].group))


def matches(query: str, rows: Iterable[tuple[str, str, T]]) -> list[tuple[float, str, T]]:
    """Return the rows (title, other words, anything) with all words of a query; those with all in the title first,
    above all where they begin words of it."""
    words = query.casefold().split()
    found = list[tuple[float, str, T]]()
    for title, others, row in rows:
        folded = title.casefold()
        if all(word in folded or word in others.casefold() for word in words):
            in_title = all(word in folded for word in words) + all(f" {word}" in f" {folded}" for word in words)
            found.append((1.0 + in_title, title, row))
    return found


def run_on_screen(node: DOMNode, action: str, *parameters: object) -> None:
    """Run an action of the screen that `node` is on, once what it handles now is done."""
    node.call_later(node.app.run_action, ("", action, parameters), node.screen)


class Commands(Provider):
    """Commands of the screen that the palette was opened on, filtered by what is typed."""

    async def discover(self) -> Hits:
        before = ""
        for key, title, run in offered(self.screen):
            group = key.group if key.group != before else ""  # once, over its rows
            shown = line(self.app, group, Content(title), keys.display_all(key.keys))
            yield DiscoveryHit(shown, run, text=title)
            before = key.group

    async def search(self, query: str) -> Hits:
        words = re.compile("|".join(map(re.escape, query.split())), re.IGNORECASE)
        rows = [(title, key.found_by, (key, run)) for key, title, run in offered(self.screen)]
        for score, title, (key, run) in matches(query, rows):
            shown = Content(title).highlight_regex(words, style=self.match_style or "bold")
            yield Hit(score, line(self.app, key.group, shown, keys.display_all(key.keys)), run, text=title)
