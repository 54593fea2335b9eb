"""Chats outside the database: the document that an export writes and an import reads.

A JSON object: `format` "cpuchat-chats", `version` 1, and `chats`. Times are seconds since the epoch. Messages are
numbered from 1 within their chat, `parent` 0 is its beginning: a chat gives the same document from any database.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import ChatsTooNew, UsageError
from cpuchat.chats.records import Chat, StoredMessage, Tree, is_chat_id, repaired_chat, storable, valid_time
from cpuchat.chats.store import ChatStore

VERSION = 1


class PortableChat(Chat, frozen=True, kw_only=True, omit_defaults=True):
    """A chat with the messages of all its branches, without `version` and `chat_id`; checked when it is stored."""

    when_full: str = ""  # pyright: ignore[reportIncompatibleVariableOverride]
    messages: list[StoredMessage] = []

    @property
    def digest(self) -> str:
        """Return an id for what was said in it, the same each time it is read."""
        said = [(one.id, one.parent, one.role, one.content, one.reasoning) for one in self.messages]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]

    @property
    def branch(self) -> list[StoredMessage]:
        """Return the messages of the open branch."""
        path = set(self.tree.path(self.tree.leaf))
        return [message for message in self.messages if message.id in path]

    @property
    def tree(self) -> Tree:
        return Tree(((message.id, message.parent) for message in self.messages), self.leaf)


class Document(msgspec.Struct, frozen=True, kw_only=True):
    format: Literal["cpuchat-chats"] = "cpuchat-chats"
    version: int = VERSION
    chats: list[PortableChat] = []


def export_chat(store: ChatStore, chat: Chat) -> PortableChat:
    """Return a chat with all its branches. Raises ChatsError."""
    messages = store.all_messages(chat.id)
    tree = Tree((message.id, message.parent) for message in messages)
    number = {0: 0} | {message.id: at for at, message in enumerate(messages, 1)}
    numbered = [
        msgspec.structs.replace(one, id=number[one.id], parent=number[tree.parent(one.id)], chat_id="")
        for one in messages
    ]
    fields = msgspec.structs.asdict(chat) | {"version": 0, "leaf": number.get(chat.leaf or -1), "messages": numbered}
    return PortableChat(**fields)


def encoded(chats: Iterable[PortableChat]) -> bytes:
    """Return the document, indented and with a line break at its end."""
    return msgspec.json.format(msgspec.json.encode(Document(chats=list(chats))), indent=1) + b"\n"


@dataclass
class Imported:
    """Results of an import: chats `added` under their ids, `known` were there already, `empty` have no messages."""

    added: list[Chat] = field(default_factory=list)
    known: int = 0
    empty: int = 0


def import_chats(store: ChatStore, chats: Iterable[PortableChat]) -> Imported:
    """Add the chats that the store does not have, all or none of them; nothing in it is changed. A chat keeps its id;
    when another one has it, its id is made of its content: importing a file again adds only what is new in it, as chats
    of their own. Raises ChatsError: nothing was added."""
    done = Imported()
    with store.transaction():
        known = {chat.id: chat for chat in store.chats()}
        for one in chats:
            if not one.messages:
                done.empty += 1
                continue
            id = one.id if is_chat_id(one.id) else one.digest
            if id in known and id != one.digest and export_chat(store, known[id]).digest != one.digest:
                id = one.digest
            if id in known:
                done.known += 1
                continue
            chat = Chat(**repaired_chat(msgspec.structs.asdict(one) | {"id": id, "version": 0}))
            store.add_copy(chat, (_of_chat(chat, message) for message in one.messages))
            known[id] = chat
            done.added.append(chat)
    return done


def _of_chat(chat: Chat, message: StoredMessage) -> StoredMessage:
    changes: dict[str, Any] = {"created": valid_time(message.created, chat.created), "chat_id": chat.id}
    if message.role == "assistant" and message.settings is None:  # of another program, which need not tell how it ended
        changes["stop_reason"] = message.stop_reason or "end"
    return msgspec.structs.replace(message, **changes)


FILE_BYTES = 256 << 20
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # escaped; msgspec would not take half a pair


def read_document(path: Path) -> list[PortableChat]:
    """Return the chats of a document. Raises UsageError: it cannot be read, or is none; ChatsTooNew: a newer version
    wrote it."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"Cannot read {path}: {error.strerror or error}.") from None
    if len(data) > FILE_BYTES:
        raise UsageError(f"{path} is larger than {FILE_BYTES >> 20} MiB.", "Export fewer chats at once.")
    try:
        text = data.decode(json.detect_encoding(data), "replace")
        value = json.loads(text)
        if _SURROGATE.search(text):  # half a pair, which cut titles end with, becomes "?"
            value = json.loads(storable(json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or value.get("format") != "cpuchat-chats":
        raise UsageError(
            f"Not an export of cpuchat: {path}.", "Choose a JSON file that `cpuchat chats export` has written."
        )
    version = value.get("version")
    if isinstance(version, int) and version > VERSION:
        raise ChatsTooNew(f"{path.name} was exported by a newer version of cpuchat.", "Update cpuchat.")
    try:
        return msgspec.convert(value, prepared(Document)).chats
    except msgspec.ValidationError as error:
        raise UsageError(f"{path.name} is not a valid export of cpuchat: {error}.") from None
