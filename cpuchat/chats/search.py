"""Full-text search over chats."""

from __future__ import annotations

import sqlite3
from typing import Any

from cpuchat.chats.records import CHAT_COLUMNS

_CHATS = ", ".join(f"chats.{name}" for name in CHAT_COLUMNS)
_JOIN = "JOIN chats ON chats.id = messages.chat_id"
_ORDER = "ORDER BY chats.updated DESC, messages.position"
_AROUND = 40  # characters on each side of a hit


def rows(db: sqlite3.Connection, full_text: bool, text: str) -> list[tuple[Any, ...]]:
    """Return hits as (chat columns..., snippet), those in messages before those in titles (whose snippet is empty).

    A message is a hit when it holds all the words of `text`, of which the last may be unfinished. Where the words are
    found nowhere, `text` is looked for letter by letter, which also finds parts of words and languages that are
    written without spaces. `full_text` tells whether the file has its index.
    """
    if not text:
        return []
    pattern = "%" + text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
    titles = db.execute(f"SELECT {_CHATS}, '' FROM chats WHERE title LIKE ? ESCAPE '\\'", (pattern,)).fetchall()
    hits: list[tuple[Any, ...]] = []
    if full_text:
        # quoted, so that nothing in it is taken for a query operator
        words = " ".join('"' + word.replace('"', '""') + '"' for word in text.split())
        hits = db.execute(
            f"SELECT {_CHATS}, snippet(messages_fts, 0, '', '', '…', 16) FROM messages_fts"
            f" JOIN messages ON messages.id = messages_fts.rowid {_JOIN} WHERE messages_fts MATCH ? {_ORDER}",
            (words + "*",),
        ).fetchall()
    if not hits and not titles:
        query = f"SELECT {_CHATS}, content FROM messages {_JOIN} WHERE content LIKE ? ESCAPE '\\' {_ORDER}"
        hits = [(*row[:-1], _around(row[-1], text)) for row in db.execute(query, (pattern,))]
    return hits + titles


def _around(content: str, text: str) -> str:
    at = max(0, content.lower().find(text.lower()))
    start, end = max(0, at - _AROUND), at + len(text) + _AROUND
    return ("…" if start else "") + content[start:end] + ("…" if end < len(content) else "")
