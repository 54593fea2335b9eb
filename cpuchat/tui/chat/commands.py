"""Stored chats in the command palette."""

from __future__ import annotations

from functools import partial

from textual.command import Hit, Hits, Provider

from cpuchat.errors import CpuchatError
from cpuchat.text import clean_line
from cpuchat.tui.commands import highlighted
from cpuchat.tui.services import Services


def chat_provider(services: Services) -> type[Provider]:
    """Stored chats by title, once something is typed."""

    class ChatProvider(Provider):
        async def search(self, query: str) -> Hits:
            try:
                chats = await services.conversation.list_chats()
            except CpuchatError:
                return
            matcher = self.matcher(query)
            for chat in chats:
                title = clean_line(chat.title)
                if (score := matcher.match(title)) > 0:
                    shown = highlighted(matcher, title)
                    yield Hit(score, shown, partial(services.chat.open_chat, chat.id), help="Open this chat")

    return ChatProvider
