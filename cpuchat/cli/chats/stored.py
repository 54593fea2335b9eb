"""Opens the chat database for a command, and finds chats by the beginning of their id."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import click

from cpuchat import paths
from cpuchat.chats.records import Chat
from cpuchat.chats.store import ChatStore
from cpuchat.errors import ChatNotFound
from cpuchat.present.chats import SHORT_ID
from cpuchat.text import clean_line


@contextlib.contextmanager
def opened_store() -> Iterator[ChatStore]:
    """Open the database; what was repaired in it is said on stderr. Raises ChatsError."""
    with contextlib.closing(ChatStore(paths.chats_db())) as store:
        yield store
        for notice in store.take_notices():
            click.echo(f"cpuchat: {notice}", err=True)


def find_chats(store: ChatStore, beginnings: Sequence[str]) -> list[Chat]:
    """Return the chats whose ids begin like this, each once. Raises ChatNotFound unless exactly one does."""
    chats = store.chats()
    return list({chat.id: chat for beginning in beginnings for chat in [_find(chats, beginning)]}.values())


def _find(chats: Sequence[Chat], beginning: str) -> Chat:
    found = [chat for chat in chats if beginning and chat.id.startswith(beginning)]
    found = [chat for chat in found if chat.id == beginning] or found
    if not found:
        raise ChatNotFound(f"No chat has an id that begins with {beginning!r}.", "See cpuchat chats list.")
    if len(found) > 1:
        length = max(SHORT_ID, len(beginning) + 2)
        some = ", ".join(f"{chat.id[:length]} ({clean_line(chat.title)})" for chat in found[:3])
        raise ChatNotFound(f"{len(found)} chats have ids that begin with {beginning!r}: {some}.", "Give more of it.")
    return found[0]
