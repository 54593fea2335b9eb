"""Chats in the store of an app."""

from __future__ import annotations

from cpuchat.session.conversation import Conversation


def three_chats(conversation: Conversation) -> None:
    for title in ("Regex for dates", "TOML schema", "What is a [roofline]?"):
        chat = conversation.history.store.create_chat("m", title=title)
        conversation.history.store.add_message(chat.id, "user", f"About {title}")
