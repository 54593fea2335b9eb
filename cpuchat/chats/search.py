"""Full-text search over chats."""

from __future__ import annotations

import re
import sqlite3
import unicodedata
from collections.abc import Iterable
from typing import Any

import msgspec

from cpuchat.chats.records import CHAT_COLUMNS, Excerpt
from cpuchat.text import clean_line

_CHAT = ", ".join(CHAT_COLUMNS)
_IDS = "(SELECT value FROM json_each(?))"
_PER_CHAT = 3  # messages
MOST_CHATS = 100
"""Chats that a search returns, at most."""
_AROUND = 40  # characters on each side of a hit
_LETTER = r"[^\W_]"  # of a word, as the index divides a text into words
_ATTACHED = """
    SELECT DISTINCT messages.id, chat_id
    FROM messages, json_each(CASE WHEN json_valid(attachments) THEN attachments ELSE '[]' END) AS one
    WHERE attachments IS NOT NULL AND json_extract(attachments, one.fullkey || '.text') LIKE ? ESCAPE '\\'
    ORDER BY messages.id DESC
"""

_CALLED = """
    SELECT DISTINCT messages.id, chat_id
    FROM messages, json_tree(CASE WHEN json_valid(steps) THEN steps ELSE '[]' END) AS one
    WHERE steps IS NOT NULL AND one.type = 'text' AND one.key IN ('said', 'text') AND one.atom LIKE ? ESCAPE '\\'
    ORDER BY messages.id DESC
"""


class _Folded(dict[int, str]):
    """For `str.translate`: letters in lower case without accents, one for one. As in the index, Korean syllables and
    the voicing marks of kana stay.
    """

    def __missing__(self, code: int) -> str:
        letter, *marks = unicodedata.normalize("NFD", chr(code))
        is_accented = all("\u0300" <= mark <= "\u036f" for mark in marks)
        self[code] = (letter if is_accented else chr(code)).lower()[0]
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
        """Return the text around the first hit, cleaned and on one line."""
        first, last = next(iter(self.spans(content)), (0, 0))
        start, end = max(0, first - _AROUND), last + _AROUND
        text = clean_line(content[start:end])
        text = ("…" if start else "") + text + ("…" if end < len(content) else "")
        return Excerpt(message_id, text, tuple(self.spans(text)))


def find(
    db: sqlite3.Connection, full_text: bool, text: str, limit: int
) -> list[tuple[tuple[Any, ...], tuple[Excerpt, ...]]]:
    """Return the chats that hold `text`, last changed first: their columns, and where their messages hold it.

    A message is a hit when it holds all the words of `text`, of which the last may be unfinished. Where the words are
    found nowhere, `text` is looked for letter by letter, which also finds parts of words and languages that are
    written without spaces, and so are attachments, results of tools and what was said before calls of them.
    `full_text` tells whether the file has its index.
    """
    if not text:
        return []
    pattern = "%" + text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
    by_title = db.execute("SELECT id FROM chats WHERE title LIKE ? ESCAPE '\\'", (pattern,))
    by_chat: dict[str, list[int]] = {chat_id: [] for (chat_id,) in by_title}
    if full_text:
        # quoted, so that nothing in it is taken for a query operator
        words = " ".join('"' + word.replace('"', '""') + '"' for word in text.split())
        query = (
            "SELECT messages.id, chat_id FROM messages_fts JOIN messages ON messages.id = messages_fts.rowid"
            " WHERE messages_fts MATCH ? ORDER BY messages_fts.rowid DESC"
        )
        _add_hits(db.execute(query, (words + "*",)), by_chat, limit)
    if not by_chat:
        query = "SELECT id, chat_id FROM messages WHERE content LIKE ? ESCAPE '\\' ORDER BY id DESC"
        _add_hits(db.execute(query, (pattern,)), by_chat, limit)
    found = {message_id for hits in by_chat.values() for message_id in hits}
    for query in (_ATTACHED, _CALLED):
        _add_hits((hit for hit in db.execute(query, (pattern,)) if hit[0] not in found), by_chat, limit)
    query = f"SELECT {_CHAT} FROM chats WHERE id IN {_IDS} ORDER BY updated DESC LIMIT ?"
    chats = db.execute(query, (_json(by_chat), limit)).fetchall()
    shown = {chat_id: by_chat[chat_id][: -_PER_CHAT - 1 : -1] for chat_id, *_ in chats}
    ids = _json(message_id for hits in shown.values() for message_id in hits)
    query = f"SELECT id, content FROM messages WHERE id IN {_IDS} AND typeof(content) = 'text'"
    contents: dict[int, str] = dict(db.execute(query, (ids,)))
    matcher = Matcher(text)
    return [(row, tuple(matcher.excerpt(id, contents[id]) for id in shown[row[0]] if id in contents)) for row in chats]


def _add_hits(hits: Iterable[tuple[int, str]], by_chat: dict[str, list[int]], limit: int) -> None:
    """Add messages and their chats, which come newest first, until there are enough chats."""
    for message_id, chat_id in hits:
        if chat_id not in by_chat and len(by_chat) >= limit:
            return
        by_chat.setdefault(chat_id, []).append(message_id)


def _json(ids: Iterable[int | str]) -> str:
    return msgspec.json.encode(list(ids)).decode()
