"""The command palette: everything that has a key or an action, the stored chats, and the themes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from textual.app import SystemCommand
from textual.command import DiscoveryHit, Hit, Hits, Provider
from textual.content import Content
from textual.fuzzy import Matcher
from textual.screen import Screen

from cpuchat.errors import CpuchatError
from cpuchat.text import clean_line
from cpuchat.tui import keys

if TYPE_CHECKING:
    from cpuchat.tui.app import ChatApp

# Which keys of the table belong to which screen class; "app" ones are everywhere.
_PLACES = {"ChatScreen": "chat", "ModelsScreen": "models", "DraftModelsScreen": "draft_models",
           "RepositoryScreen": "repository", "DownloadsScreen": "downloads", "HardwareScreen": "hardware",
           "SettingsScreen": "settings", "HelpScreen": "help"}  # fmt: skip


def system_commands(app: ChatApp, screen: Screen[Any]) -> Iterable[SystemCommand]:
    """Commands of the screen that the palette was opened on, in the order of the key table."""
    place = _PLACES.get(type(screen).__name__, "")
    for key in keys.KEYS:
        if not key.palette or key.place not in (place, "app"):
            continue
        node = app if key.place == "app" else screen
        name = key.action.partition("(")[0]
        if key.place != "app" and not screen.check_action(name, ()):
            continue
        title = key.help.partition(" (")[0]
        about = f"{keys.display_all(key.keys)} · {key.group}" if key.keys else key.group
        yield SystemCommand(title, about, partial(node.run_action, key.action))  # type: ignore[arg-type]


def _highlighted(matcher: Matcher, text: str) -> Content:
    """As `Matcher.highlight`, which would take brackets in a title for markup."""
    content = Content(text)
    for offset in matcher.fuzzy_search.match(matcher.query, text)[1]:
        content = content.stylize(matcher.match_style, offset, offset + 1)
    return content


class ChatProvider(Provider):
    """Stored chats by title, once something is typed."""

    async def search(self, query: str) -> Hits:
        app = cast("ChatApp", self.app)
        chat_screen = app.chat_screen
        if self.screen is not chat_screen:
            return
        try:
            chats = await app.conversation.list_chats()
        except CpuchatError:
            return
        matcher = self.matcher(query)
        for chat in chats:
            title = clean_line(chat.title)
            score = matcher.match(title)
            if score > 0:
                shown = _highlighted(matcher, title)
                yield Hit(score, shown, partial(chat_screen.open_chat, chat.id), help="Open this chat")


class ThemeProvider(Provider):
    """Themes; the app shows the marked one at once."""

    def _themes(self) -> list[tuple[str, str]]:
        app = cast("ChatApp", self.app)
        # Ours and the user's first; Textual's own after them.
        own = sorted(app.own_themes)
        rest = sorted(name for name in app.available_themes if name not in app.own_themes)
        return [(name, "cpuchat") for name in own] + [(name, "Textual") for name in rest]

    async def discover(self) -> Hits:
        app = cast("ChatApp", self.app)
        for name, origin in self._themes():
            yield DiscoveryHit(name, partial(app.use_theme, name), text=name, help=origin)

    async def search(self, query: str) -> Hits:
        app = cast("ChatApp", self.app)
        matcher = self.matcher(query)
        for name, origin in self._themes():
            if (score := matcher.match(name)) > 0:
                yield Hit(score, _highlighted(matcher, name), partial(app.use_theme, name), text=name, help=origin)
