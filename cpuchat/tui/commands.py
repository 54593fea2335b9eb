"""The command palette: everything that has a key or an action, by group, and the themes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from textual.app import App
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.fuzzy import Matcher

from cpuchat.text import clean_line
from cpuchat.tui import keys

GROUPS = (
    "Recent",
    keys.ANSWER,
    keys.CHATS,
    keys.MODELS,
    keys.DOWNLOADS,
    keys.COMPARE,
    keys.HARDWARE,
    keys.SETTINGS,
    keys.VIEW,
    keys.APP,
)
"""In the order in which the palette lists them."""
_WIDEST, _SHARE, _FRAME = 76, 0.96, 6  # of the palette, in cells: app.tcss


@dataclass
class Listed(DiscoveryHit):
    """A command that stands with those of its group, whenever its provider yields it."""

    group: str = ""

    @property
    def score(self) -> float:
        return -float(GROUPS.index(self.group))


def line(app: App[Any], group: str, title: Content, key: str = "") -> Content:
    """`Answer     Regenerate          Ctrl+R`, as wide as the palette; group and key dim."""
    room = min(_WIDEST, int(_SHARE * app.size.width)) - _FRAME
    key = clean_line(key)
    name = title.truncate(max(room - 12 - len(key), 8), ellipsis=True)
    space = " " * (room - 11 - name.cell_length - len(key))
    # Not a color of the theme: it must be readable on the highlighted line, too.
    return Content.assemble((f"{group:<11}", "dim"), name, space, (key, "dim"))


class Commands(Provider):
    """Commands of the screen that the palette was opened on."""

    def _commands(self) -> list[tuple[keys.Key, str, Callable[[], Any]]]:
        place = getattr(self.screen, "KEYS", "")
        found: list[tuple[keys.Key, str, Callable[[], Any]]] = []
        for key in keys.KEYS:
            if not key.palette or key.place not in (place, "app"):
                continue
            node = self.app if key.place == "app" else self.screen
            if not node.check_action(key.action.partition("(")[0], ()):
                continue
            found.append((key, key.help.partition(" (")[0], partial(node.run_action, key.action)))
        return sorted(found, key=lambda one: GROUPS.index(one[0].group))

    async def discover(self) -> Hits:
        before = ""
        for key, title, run in self._commands():
            group = key.group if key.group != before else ""  # once, over its commands
            shown = line(self.app, group, Content(title), keys.display_all(key.keys))
            yield Listed(shown, run, text=title, group=key.group)
            before = key.group

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for key, title, run in self._commands():
            if (score := max(matcher.match(title), matcher.match(f"{key.group} {title}"))) > 0:
                shown = line(self.app, key.group, highlighted(matcher, title), keys.display_all(key.keys))
                yield Hit(score, shown, run, text=title)


def highlighted(matcher: Matcher, text: str) -> Content:
    """Highlight as `Matcher.highlight`, which would take brackets in a title for markup."""
    content = Content(text)
    for offset in matcher.fuzzy_search.match(matcher.query, text)[1]:
        content = content.stylize(matcher.match_style, offset, offset + 1)
    return content


def theme_provider(own: frozenset[str], use: Callable[[str], None]) -> type[Provider]:
    """Themes, `own` (cpuchat's and the user's) first; `use` is called with the chosen one."""

    class ThemeProvider(Provider):
        def _themes(self) -> list[tuple[str, str]]:
            rest = sorted(name for name in self.app.available_themes if name not in own)
            return [(name, "cpuchat") for name in sorted(own)] + [(name, "Textual") for name in rest]

        async def discover(self) -> Hits:
            before = ""
            for name, origin in self._themes():
                shown = line(self.app, origin if origin != before else "", Content(name))
                yield DiscoveryHit(shown, partial(use, name), text=name)
                before = origin

        async def search(self, query: str) -> Hits:
            matcher = self.matcher(query)
            for name, origin in self._themes():
                if (score := matcher.match(name)) > 0:
                    shown = line(self.app, origin, highlighted(matcher, name))
                    yield Hit(score, shown, partial(use, name), text=name)

    return ThemeProvider
