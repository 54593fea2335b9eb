"""The command palette: everything that has a key or an action, and the themes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from textual.app import App, SystemCommand
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.fuzzy import Matcher
from textual.screen import Screen

from cpuchat.tui import keys


def system_commands(app: App[Any], screen: Screen[Any]) -> Iterable[SystemCommand]:
    """Commands of the screen that the palette was opened on, each behind its group: `Chats: Start a new chat`."""
    place = getattr(screen, "KEYS", "")
    for key in keys.KEYS:
        if not key.palette or key.place not in (place, "app"):
            continue
        node = app if key.place == "app" else screen
        name = key.action.partition("(")[0]
        if key.place != "app" and not screen.check_action(name, ()):
            continue
        title = f"{key.group}: {key.help.partition(' (')[0]}"
        yield SystemCommand(title, keys.display_all(key.keys), partial(node.run_action, key.action))  # type: ignore[arg-type]


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
            for name, origin in self._themes():
                yield DiscoveryHit(name, partial(use, name), text=name, help=origin)

        async def search(self, query: str) -> Hits:
            matcher = self.matcher(query)
            for name, origin in self._themes():
                if (score := matcher.match(name)) > 0:
                    yield Hit(score, highlighted(matcher, name), partial(use, name), text=name, help=origin)

    return ThemeProvider
