"""Full-text search over chats."""

from __future__ import annotations

import re
import sqlite3
import unicodedata
from collections.abc import Iterable
from typing import Any

import msgspec

from cpuchat.chats.records import CHAT_COLUMNS, Excerpt

_CHAT = ", ".join(CHAT_COLUMNS)
_IDS = "(SELECT value FROM json_each(?))"
_MOST = 2000  # messages with the words, the newest; that many chats are not read anyway
_PER_CHAT = 3
_AROUND = 40  # characters on each side of a hit
_LETTER = r"[^\W_]"  # of a word, as the index divides a text into words


class _Folded(dict[int, str]):
    """For `str.translate`: letters in lower case without accents, one for one."""

    def __missing__(self, code: int) -> str:
        self[code] = (unicodedata.normalize("NFD", chr(code))[0].lower() or chr(code))[0]
        return self[code]


_FOLDED = _Folded()


class Matcher:
    """Finds what was searched for in a text, as `find` finds messages: words, or the text letter by letter."""

    def __init__(self, text: str) -> None:
        folded = text.strip().translate(_FOLDED)
        *words, last = [re.escape(word) for word in re.findall(f"{_LETTER}+", folded)] or [re.escape(folded)]
        whole = f"(?:{'|'.join(words)})(?!{_LETTER})|" if words else ""
        self._words = re.compile(f"(?<!{_LETTER})(?:{whole}{last})")
        self._letters = re.compile(re.escape(folded))

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return where it is found, from character to before character."""
        folded = text.translate(_FOLDED)
        found = [match.span() for match in self._words.finditer(folded)]
        return found or [match.span() for match in self._letters.finditer(folded)]

    def excerpt(self, message_id: int, content: str) -> Excerpt:
        """Return the text around the first hit, on one line."""
        first, last = next(iter(self.spans(content)), (0, 0))
        start, end = max(0, first - _AROUND), last + _AROUND
        text = " ".join(content[start:end].split())
        text = ("…" if start else "") + text + ("…" if end < len(content) else "")
        return Excerpt(message_id, text, tuple(self.spans(text)))


def find(
    db: sqlite3.Connection, full_text: bool, text: str, limit: int
) -> list[tuple[tuple[Any, ...], tuple[Excerpt, ...]]]:
    """Return the chats that hold `text`, last changed first: their columns, and where their messages hold it.

    A message is a hit when it holds all the words of `text`, of which the last may be unfinished. Where the words are
    found nowhere, `text` is looked for letter by letter, which also finds parts of words and languages that are
    written without spaces. `full_text` tells whether the file has its index.
    """
    if not text:
        return []
    pattern = "%" + text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
    by_title = {id for (id,) in db.execute("SELECT id FROM chats WHERE title LIKE ? ESCAPE '\\'", (pattern,))}
    hits: list[tuple[int, str]] = []
    if full_text:
        # quoted, so that nothing in it is taken for a query operator
        words = " ".join('"' + word.replace('"', '""') + '"' for word in text.split())
        hits = db.execute(
            "SELECT messages.id, chat_id FROM messages_fts JOIN messages ON messages.id = messages_fts.rowid"
            " WHERE messages_fts MATCH ? ORDER BY messages_fts.rowid DESC LIMIT ?",
            (words + "*", _MOST),
        ).fetchall()
    if not hits and not by_title:
        query = "SELECT id, chat_id FROM messages WHERE content LIKE ? ESCAPE '\\' ORDER BY id DESC LIMIT ?"
        hits = db.execute(query, (pattern, _MOST)).fetchall()
    by_chat: dict[str, list[int]] = {id: [] for id in by_title}
    for message_id, chat_id in reversed(hits):
        if len(ids := by_chat.setdefault(chat_id, [])) < _PER_CHAT:
            ids.append(message_id)
    query = f"SELECT {_CHAT} FROM chats WHERE id IN {_IDS} ORDER BY updated DESC LIMIT ?"
    chats = db.execute(query, (_json(by_chat), limit)).fetchall()
    ids = _json(message_id for chat_id, *_ in chats for message_id in by_chat[chat_id])
    contents: dict[int, str] = dict(db.execute(f"SELECT id, content FROM messages WHERE id IN {_IDS}", (ids,)))
    matcher = Matcher(text)
    return [(row, tuple(matcher.excerpt(id, contents[id]) for id in by_chat[row[0]])) for row in chats]


def _json(ids: Iterable[int | str]) -> str:
    return msgspec.json.encode(list(ids)).decode()
