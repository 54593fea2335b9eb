"""Chats outside the database: the document of an export, and what the exports of other programs become.

A document is a JSON object: `format` "cpuchat-chats", `version` 1, and `chats`. Times are seconds since the epoch.
Messages are numbered from 1 within their chat, `parent` 0 is its beginning: a chat gives the same document from any
database.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from cpuchat.chats.records import Chat, PortableMessage, StoredMessage
from cpuchat.chats.tree import Tree
from cpuchat.presets import StoredPreset

VERSION = 1


class PortableChat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A chat with the messages of all its branches, as `Chat`. `id` "": it comes from another program."""

    id: str = ""
    title: str = ""
    created: float = 0.0
    updated: float = 0.0
    model: str = ""
    system_prompt: str = ""
    sides: str = ""
    leaf: int | None = None
    when_full: str = ""
    preset: StoredPreset | None = None
    reasoning: str = ""
    reasoning_budget: int | None = None
    pinned: bool = False
    messages: list[PortableMessage] = []

    @property
    def digest(self) -> str:
        """Return an id for what was said in it, the same each time it is read."""
        said = [(one.id, one.parent, one.role, one.content, one.reasoning) for one in self.messages]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    @property
    def branch(self) -> list[PortableMessage]:
        """Return the messages of the open branch."""
        path = set(self.tree.path(self.tree.leaf))
        return [message for message in self.messages if message.id in path]

    @property
    def tree(self) -> Tree:
        return Tree(((message.id, message.parent) for message in self.messages), self.leaf)

    def chat(self, id: str) -> Chat:
        """Return the chat without its messages, under this id."""
        return Chat(id=id, **{name: getattr(self, name) for name in _CHAT_FIELDS if name != "id"})

    def stored_messages(self, chat_id: str) -> list[StoredMessage]:
        """Return the messages as a store takes them, still with their own numbers."""
        return [StoredMessage(chat_id=chat_id, **msgspec.structs.asdict(message)) for message in self.messages]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    format: Literal["cpuchat-chats"] = "cpuchat-chats"
    version: int = VERSION
    chats: list[PortableChat] = []


_CHAT_FIELDS = tuple(name for name in PortableChat.__struct_fields__ if name != "messages")
_MESSAGE_FIELDS = PortableMessage.__struct_fields__


def portable_chat(chat: Chat, messages: Sequence[StoredMessage]) -> PortableChat:
    """Return a stored chat with these messages, which are all that it has, oldest first."""
    tree = Tree((message.id, message.parent) for message in messages)
    number = {0: 0} | {message.id: at for at, message in enumerate(messages, 1)}
    numbered = [
        msgspec.structs.replace(
            PortableMessage(**{name: getattr(message, name) for name in _MESSAGE_FIELDS}),
            id=number[message.id],
            parent=number[tree.parent(message.id)],
        )
        for message in messages
    ]
    whole = PortableChat(**{name: getattr(chat, name) for name in _CHAT_FIELDS})
    return msgspec.structs.replace(whole, leaf=number.get(chat.leaf or -1), messages=numbered)


def encoded(chats: Iterable[PortableChat]) -> bytes:
    """Return the document, indented and with a line break at its end."""
    return msgspec.json.format(msgspec.json.encode(Document(chats=list(chats))), indent=1) + b"\n"
