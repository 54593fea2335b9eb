"""Exports chats of the store, and imports chats into it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from cpuchat.chats.records import Chat, is_chat_id, repaired_chat, valid_time
from cpuchat.chats.store import ChatStore
from cpuchat.chats.transfer.portable import PortableChat, portable_chat


@dataclass
class Imported:
    """Results of an import: chats `added` under their ids, `known` were there already, `empty` have no messages."""

    added: list[Chat] = field(default_factory=list)
    known: int = 0
    empty: int = 0


def export_chat(store: ChatStore, chat: Chat) -> PortableChat:
    """Return a chat with all its branches. Raises ChatsError."""
    return portable_chat(chat, store.all_messages(chat.id))


def import_chats(store: ChatStore, chats: Iterable[PortableChat]) -> Imported:
    """Add the chats that the store does not have, all or none of them; nothing in it is changed.

    A chat keeps its id; when another one has it, or it comes from another program, its id is made of its content. So a
    file that is imported again adds only what is new in it, as chats of their own.

    Raises:
        ChatsError: nothing was added.
    """
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
            known[id] = _add(store, one, id)
            done.added.append(known[id])
    return done


def _add(store: ChatStore, one: PortableChat, id: str) -> Chat:
    chat = Chat(**repaired_chat(msgspec.structs.asdict(one.chat(id))))
    messages = [
        msgspec.structs.replace(message, created=valid_time(message.created, chat.created))
        for message in one.stored_messages(id)
    ]
    store.add_copy(chat, messages)
    return chat
