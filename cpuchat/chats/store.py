"""Chats on disk, in SQLite.

Every change is committed when the method returns: a killed app loses only what it had not told the store. Write-ahead
logging lets a second instance read and write the same file; methods may be called from any thread, one at a time. What
is deleted is overwritten in the file and the log. Search reads all messages, about 5 MB in 0.1 s.
"""

from __future__ import annotations

import re
import sqlite3
import time
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, Literal

import msgspec

from cpuchat.base.errors import ChatsChanged
from cpuchat.base.text import clean_line
from cpuchat.chats import schema
from cpuchat.chats.database import Database, insert
from cpuchat.chats.records import (
    CHAT_COLUMNS,
    MESSAGE_COLUMNS,
    Attachment,
    Chat,
    Deleted,
    Excerpt,
    SearchHit,
    StoredMessage,
    Tree,
    chat_of,
    column,
    from_json,
    message_of,
    new_chat_id,
    storable,
)
from cpuchat.protocol.messages import Role, ToolStep

_CHAT = ", ".join(CHAT_COLUMNS)
_MESSAGE = ", ".join(MESSAGE_COLUMNS)
_FORK = "Fork: "  # first, so that a narrow list does not cut it off
_PER_CHAT = 3  # messages
MAX_CHATS = 100
"""Chats that a search returns, at most."""
_LONGEST = 2000  # characters that are looked for
_AROUND = 40  # characters on each side of a hit
_LETTER = r"[^\W_]"  # of a word


class _Folded(dict[int, str]):
    """For `str.translate`: lower case without accents, one for one; Korean and the voicing marks of kana stay."""

    def __missing__(self, code: int) -> str:
        letter, *marks = unicodedata.normalize("NFD", chr(code))
        is_accented = all("\u0300" <= mark <= "\u036f" for mark in marks)
        self[code] = (letter if is_accented else chr(code)).lower()[0]
        return self[code]


_FOLDED = _Folded()
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")


def _folded(text: str) -> str:
    if text.isascii():
        return text.lower()
    return _BEYOND_ASCII.sub(lambda run: run[0].translate(_FOLDED), text).lower()


class Matcher:
    """Finds what was searched for in a text: its words, of which the last may be unfinished, else the text itself."""

    def __init__(self, text: str) -> None:
        self.letters = _folded(text.strip())
        self._words = list(dict.fromkeys(re.findall(f"{_LETTER}+", self.letters))) or [self.letters]
        *whole, last = map(re.escape, self._words)
        patterns = [*(f"(?<!{_LETTER}){word}(?!{_LETTER})" for word in whole), f"(?<!{_LETTER}){last}"]
        self._each = [re.compile(pattern) for pattern in patterns]
        self._any = re.compile("|".join(patterns))

    def finds(self, text: str) -> bool:
        """Return whether a text has all the words, or what is more than a word in ASCII as it is."""
        folded = _folded(text)
        if all(word in folded for word in self._words) and all(one.search(folded) for one in self._each):
            return True
        return self.letters in folded and not (self.letters.isascii() and self.letters.isalnum())

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return where it is found, from character to before character."""
        folded = _folded(text)
        found = [match.span() for match in self._any.finditer(folded)]
        return found or [match.span() for match in re.finditer(re.escape(self.letters), folded)]

    def excerpt(self, message_id: int, content: str) -> Excerpt:
        """Return the text around the first hit, cleaned and on one line."""
        first, last = next(iter(self.spans(content)), (0, 0))
        start, end = max(0, first - _AROUND), last + _AROUND
        text = clean_line(content[start:end])
        text = ("…" if start else "") + text + ("…" if end < len(content) else "")
        return Excerpt(message_id, text, tuple(self.spans(text)))


def find(db: sqlite3.Connection, text: str, limit: int) -> dict[str, tuple[Excerpt, ...]]:
    """Return the ids of chats that hold `text` in their title or messages, with the first messages that `Matcher.finds`
    in themselves, in an attachment, in a result of a tool, or in what was said before a call."""
    matcher, first = Matcher(text), partial(deque[tuple[int, str]], maxlen=_PER_CHAT)
    titles = db.execute("SELECT id, title FROM chats WHERE typeof(title) = 'text'")
    found = {chat_id: first() for chat_id, title in titles if matcher.letters in _folded(title)}
    rows = db.execute(
        "SELECT id, chat_id, content, attachments, steps FROM messages WHERE typeof(content) = 'text' ORDER BY id DESC"
    )
    for id, chat_id, content, attachments, steps in rows:
        if chat_id not in found and len(found) >= limit:
            continue
        if any(map(matcher.finds, chain((content,), _beside(attachments, steps)))):
            found.setdefault(chat_id, first()).appendleft((id, content))
    return {chat_id: tuple(matcher.excerpt(*hit) for hit in hits) for chat_id, hits in found.items()}


def _beside(attachments: object, steps: object) -> Iterator[str]:
    """Yield the texts that belong to a message beside its own."""
    yield from (one.text for one in from_json(attachments, tuple[Attachment, ...]) or ())
    for step in from_json(steps, tuple[ToolStep, ...]) or ():
        yield step.said
        yield from (result.text for result in step.results)


class ChatStore(Database):
    """Stores chats in one file, which is created if missing and repaired if damaged; `notices` reports repairs.

    A folder that has to be made for it gets mode 0700, the file 0600. Raises ChatsDamaged: it cannot be replaced by a
    sound one; ChatsForeign: it is another program's; ChatsTooNew: a newer version wrote it, and it is left as it is;
    ChatsError: folder or file cannot be used (permissions, full disk). Every method raises that too."""

    def create_chat(self, model: str, system_prompt: str = "", **fields: Any) -> Chat:
        """Add a chat without messages; `fields` are others of `Chat`."""
        now = time.time()
        fields |= {"model": model, "system_prompt": system_prompt}
        chat = Chat(id=new_chat_id(), created=now, updated=now, **_storable(fields))
        with self.transaction():
            self._insert_chat(chat)
        return chat

    def add_copy(self, chat: Chat, messages: Iterable[StoredMessage]) -> None:
        """Store a chat of another file, of which there must be none with this id, with the messages of all branches.
        These get new ids, to which `parent` and `leaf` are changed. A message whose parent does not come before it
        follows the last one that does."""
        added, last = {0: 0}, 0
        with self.transaction():
            self._insert_chat(msgspec.structs.replace(chat, leaf=None))
            for message in messages:
                parent = added.get(message.parent, last)
                last = added[message.id] = self._insert_message(msgspec.structs.replace(message, parent=parent))
            if chat.leaf is not None:
                self.set_options(chat.id, {"leaf": added.get(chat.leaf, last)})

    def _insert_chat(self, chat: Chat) -> None:
        insert(self._db, "chats", {name: column(value) for name, value in msgspec.structs.asdict(chat).items()})

    def chats(self) -> list[Chat]:
        """Return all chats, last changed first."""
        return self._select(chat_of, f"SELECT {_CHAT} FROM chats ORDER BY updated DESC, rowid DESC")

    def chat(self, chat_id: str) -> Chat:
        """Return a chat. Raises ChatsChanged if it does not exist."""
        found = self._select(chat_of, f"SELECT {_CHAT} FROM chats WHERE id = ?", (chat_id,))
        if not found:
            raise _gone("chat")
        return found[0]

    def require_unchanged(self, chat: Chat) -> None:
        """Raise ChatsChanged if the chat is gone or its messages are not those of this version."""
        if self.chat(chat.id).version != chat.version:
            raise ChatsChanged("This chat was changed in another window and has been reloaded.", "Try again.")

    def rename(self, chat_id: str, title: str) -> None:
        """Change the title, not the chat's place in the list. Raises ChatsChanged: the chat does not exist."""
        with self.transaction():
            if not self._db.execute("UPDATE chats SET title = ? WHERE id = ?", (storable(title), chat_id)).rowcount:
                raise _gone("chat")
            self._erase_due = True

    def fork(self, chat_id: str, message_id: int) -> Chat:
        """Copy the messages up to this one into a new chat. Raises ChatsChanged if it does not exist."""
        now = time.time()
        with self.transaction():
            chat, tree = self.chat(chat_id), self.tree(chat_id)
            if message_id not in tree:
                raise _gone("message")
            new = {"id": new_chat_id(), "title": f"{_FORK}{chat.title.removeprefix(_FORK)}", "leaf": message_id}
            fork = msgspec.structs.replace(chat, **new, created=now, updated=now)
            tree.leaf = message_id
            messages = self.messages(chat_id, tree)
            self.add_copy(fork, [msgspec.structs.replace(one, chat_id=fork.id) for one in messages])
            return self.chat(fork.id)

    def delete(self, chat_id: str) -> Deleted:
        """Delete the chat and its messages; nothing happens when there is none."""
        with self.transaction():
            rows = {table: self._rows_of(table, chat_id) for table in schema.TABLES}
            self._db.execute("DELETE FROM chats WHERE id = ?", (chat_id,))
            self._erase_due = True
        return Deleted(chat_id, 0, rows)

    def delete_branch(self, chat: Chat, message_id: int) -> Deleted:
        """Delete a message and all that follow from it (of a summary, that stays); the branch beside it is open then. A
        chat that would be empty is deleted. Raises ChatsChanged: the message is gone, or this version of the chat."""
        with self.transaction():
            self.require_unchanged(chat)
            tree = self.tree(chat.id)
            if message_id not in tree:
                raise _gone("message")
            gone, leaf = set(tree.subtree(message_id)), tree.after_deletion(message_id)
            is_summary = "SELECT 1 FROM messages WHERE id = ? AND role = 'system' AND model != ''"
            moved = set(tree.children(message_id)) if self._db.execute(is_summary, (message_id,)).fetchone() else set()
            if moved:
                gone, leaf = {message_id}, tree.leaf
            if not leaf:
                return self.delete(chat.id)
            self._touch(chat.id, time.time())
            rows = [row for row in self._rows_of("messages", chat.id) if row[0] in gone | moved]
            parent = tree.parent(message_id)
            self._db.executemany("UPDATE messages SET parent = ? WHERE id = ?", [(parent, id) for id in moved])
            self._db.executemany("DELETE FROM messages WHERE id = ?", [(id,) for id in gone])
            self.set_options(chat.id, {"leaf": leaf})
            self._erase_due = True
        return Deleted(chat.id, message_id, {"messages": rows}, tree.leaf if tree.leaf in gone else 0)

    def undelete(self, deleted: Deleted) -> None:
        """Put back what was deleted. Raises ChatsChanged if it was a branch of a chat that is gone."""
        with self.transaction():
            if deleted.message_id:
                self._touch(deleted.chat_id, time.time())
            for table, rows in deleted.rows.items():
                for row in rows:
                    values = [storable(value) if isinstance(value, str) else value for value in row]
                    self._db.execute(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(row))})", values)
            for id, chat_id, parent, *_ in deleted.rows["messages"]:  # those after a summary are there already
                self._db.execute("UPDATE messages SET parent = ? WHERE id = ? AND chat_id = ?", (parent, id, chat_id))
            if deleted.leaf:
                self.set_options(deleted.chat_id, {"leaf": deleted.leaf})

    def _rows_of(self, table: str, chat_id: str) -> list[tuple[Any, ...]]:
        key = "id" if table == "chats" else "chat_id"
        return self._db.execute(f"SELECT * FROM {table} WHERE {key} = ?", (chat_id,)).fetchall()

    # --- messages ---

    def tree(self, chat_id: str) -> Tree:
        """Return the branches of a chat."""
        with self._guarded():
            leaf = self._db.execute("SELECT leaf FROM chats WHERE id = ?", (chat_id,)).fetchone() or (None,)
            rows = self._db.execute("SELECT id, parent FROM messages WHERE chat_id = ? ORDER BY id", (chat_id,))
            return Tree(rows, *leaf)

    def messages(self, chat_id: str, tree: Tree | None = None) -> list[StoredMessage]:
        """Return the messages of the open branch, of which `tree` tells if given, in order."""
        tree = tree or self.tree(chat_id)
        query = f"SELECT {_MESSAGE} FROM messages WHERE id IN (SELECT value FROM json_each(?)) ORDER BY id"
        return self._select(message_of, query, (msgspec.json.encode(tree.path(tree.leaf)).decode(),))

    def all_messages(self, chat_id: str) -> list[StoredMessage]:
        """Return the messages of all branches, oldest first."""
        return self._select(message_of, f"SELECT {_MESSAGE} FROM messages WHERE chat_id = ? ORDER BY id", (chat_id,))

    def message_counts(self) -> dict[str, int]:
        """Return the number of messages on all branches, by chat id."""
        with self._guarded():
            return dict(self._db.execute("SELECT chat_id, count(*) FROM messages GROUP BY chat_id"))

    def set_options(self, chat_id: str, options: Mapping[str, Any]) -> None:
        """Set fields of a `Chat` that say how it is answered, or its `leaf`. Nothing happens when it is gone."""
        assigned = ", ".join(f"{name} = ?" for name in options)
        with self.transaction():
            self._db.execute(
                f"UPDATE chats SET {assigned} WHERE id = ?", (*(column(value) for value in options.values()), chat_id)
            )

    def add_message(
        self, chat_id: str, role: Role, content: str, *, after: int | None = None, **fields: Any
    ) -> StoredMessage:
        """Add a message with these fields of `StoredMessage`, and open its branch. `after`: id of the message before, 0
        at the beginning; None: the last one of the open branch. Raises ChatsChanged: that or the chat is gone."""
        now = time.time()
        with self.transaction():
            self._touch(chat_id, now)
            if after is None:
                after = self.tree(chat_id).leaf
            elif after:
                query = "SELECT 1 FROM messages WHERE id = ? AND chat_id = ?"
                if not self._db.execute(query, (after, chat_id)).fetchone():
                    raise _gone("message")
            written = _storable(fields | {"content": content})
            added = StoredMessage(chat_id=chat_id, parent=after, role=role, created=now, **written)
            id = self._insert_message(added)
            self._db.execute("UPDATE chats SET leaf = NULL WHERE id = ?", (chat_id,))
        return msgspec.structs.replace(added, id=id)

    def _insert_message(self, message: StoredMessage) -> int:
        row = {name: column(getattr(message, name)) for name in MESSAGE_COLUMNS[1:]}  # the database gives the id
        return insert(self._db, "messages", row)

    def update_message(self, message_id: int, **changes: object) -> int | None:
        """Update the columns of a growing answer that are given and hold something. Returns the version that its chat
        has now. None: the message is gone (deleted by another instance), and nothing happened."""
        given = {name: kept for name, value in changes.items() if (kept := column(value)) is not None}
        columns = ", ".join(f"{name} = ?" for name in given)
        with self.transaction():
            chat = self._db.execute("SELECT chat_id FROM messages WHERE id = ?", (message_id,)).fetchone()
            if chat is None:
                return None
            if given:
                self._db.execute(f"UPDATE messages SET {columns} WHERE id = ?", (*given.values(), message_id))
            return self._touch(chat[0], time.time())

    def _touch(self, chat_id: str, now: float) -> int:
        row = self._db.execute(
            "UPDATE chats SET updated = ?, version = version + 1 WHERE id = ? RETURNING version", (now, chat_id)
        ).fetchall()
        if not row:
            raise _gone("chat")
        return row[0][0]

    def drafts(self) -> list[tuple[Any, ...]]:
        """Return the unsent texts of all windows: id of the chat (None: a new one), window, name of the part, text."""
        with self._guarded():
            return self._db.execute("SELECT chat_id, window, name, text FROM drafts").fetchall()

    def save_drafts(
        self, window: str, parts: Iterable[tuple[str | None, str, str | None]], ended: Iterable[str] = ()
    ) -> None:
        """Replace parts of unsent texts of a window (chat, name, text), or delete them (a text of None), and all those
        of `ended` windows. Those of a chat that is gone are not kept."""
        with self.transaction():
            self._db.executemany("DELETE FROM drafts WHERE window = ?", [(one,) for one in ended])
            for chat_id, name, text in parts:
                part = chat_id, window, name
                self._db.execute("DELETE FROM drafts WHERE chat_id IS ? AND window = ? AND name = ?", part)
                self._db.execute(
                    "INSERT INTO drafts SELECT ?1, ?2, ?3, ?4 WHERE ?4 IS NOT NULL AND"
                    " (?1 IS NULL OR EXISTS (SELECT 1 FROM chats WHERE id = ?1))",
                    (*part, text),
                )
                self._erase_due = self._erase_due or text is None

    def search(self, text: str, limit: int = MAX_CHATS) -> list[SearchHit]:
        """Find chats that hold `text` in their title or messages, last changed first; see `find`."""
        wanted = storable(text).replace("\0", " ").strip()[:_LONGEST]
        if not wanted:
            return []
        with self._guarded():
            found = find(self._db, wanted, limit)
        chats = [chat for chat in self.chats() if chat.id in found][:limit]
        return [SearchHit(**msgspec.structs.asdict(chat), excerpts=found[chat.id]) for chat in chats]


def _storable(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: storable(value) if isinstance(value, str) else value for name, value in fields.items()}


def _gone(what: Literal["message", "chat"]) -> ChatsChanged:
    then = "the chat again" if what == "message" else "another chat"
    return ChatsChanged(f"This {what} no longer exists.", f"It may have been deleted in another window; open {then}.")
