"""Chats on disk, in SQLite.

Every change is committed when the method returns, so a killed app loses nothing but what it had not told the store.
Write-ahead logging lets a second instance of the app read and write the same file; methods may be called from any
thread, one at a time.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cpuchat.chats import schema, search
from cpuchat.errors import ChatsDamaged, ChatsError
from cpuchat.protocol import Role, Timings

INTERRUPTED = "interrupted"
_BUSY_SECONDS = 10.0
_CHECK_LIMIT = 64 << 20  # bytes; larger files are not checked through at each start


class Chat(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation. Times in seconds since the epoch."""

    id: str
    title: str
    created: float
    updated: float
    model: str
    system_prompt: str


class Found(Chat, frozen=True, kw_only=True):
    """A chat that a search found; `snippet` is the text around the first hit, on one line."""

    snippet: str


class StoredMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message. `position` orders the messages of a chat.

    `stop_reason` of an answer is a `protocol.StopReason`, the code of an error, "interrupted" when its app died in
    the middle of it, or None while it is being written.
    """

    id: int
    chat_id: str
    position: int
    role: Role
    content: str
    reasoning: str
    model: str
    stop_reason: str | None
    timings: Timings | None
    created: float


_CHAT = ", ".join(search.CHAT_COLUMNS)
_MESSAGE = "id, chat_id, position, role, content, reasoning, model, stop_reason, timings, created"


class ChatStore:
    """The chats of one file, which is made if it is missing.

    Args:
        path: the file. A folder that has to be made for it gets mode 0700, the file 0600.

    Raises:
        ChatsDamaged: the file is no sound database. It has been moved aside, the hint tells where to; trying again
            starts with an empty one.
        ChatsTooNew: a newer version wrote it; it is left as it is.
        ChatsError: the folder or file cannot be used (permissions, full disk). Every method raises it too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        try:
            _make_private(path)
            self._db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise _unusable(path, error) from None
        try:
            self._open()
        except sqlite3.Error as error:
            self._db.close()
            if _is_damage(error):
                raise _moved_aside(path) from None
            raise _unusable(path, error) from None
        except BaseException:
            self._db.close()
            raise

    def _open(self) -> None:
        db = self._db
        db.execute(f"PRAGMA busy_timeout = {int(_BUSY_SECONDS * 1000)}")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA foreign_keys = ON")
        schema.upgrade(db)
        if self.path.stat().st_size <= _CHECK_LIMIT:
            verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise _Damage(verdict)
        self._full_text = schema.make_searchable(db)
        # Nobody will finish these. Should another instance be writing one right now, its last save puts it right.
        with self._write():
            db.execute(
                "UPDATE messages SET stop_reason = ? WHERE role = 'assistant' AND stop_reason IS NULL", (INTERRUPTED,)
            )

    def close(self) -> None:
        """No method may be called afterwards, but `close` again may."""
        with self._lock:
            self._db.close()

    # --- chats ---

    def create_chat(self, model: str, system_prompt: str = "", title: str = "") -> Chat:
        now = time.time()
        chat = Chat(
            id=secrets.token_hex(8),
            title=_storable(title),
            created=now,
            updated=now,
            model=_storable(model),
            system_prompt=_storable(system_prompt),
        )
        with self._write():
            self._db.execute(f"INSERT INTO chats ({_CHAT}) VALUES (?, ?, ?, ?, ?, ?)", msgspec.structs.astuple(chat))
        return chat

    def chats(self, limit: int = -1, offset: int = 0) -> list[Chat]:
        """Last changed first; `limit` -1 means all."""
        with self._read():
            rows = self._db.execute(
                f"SELECT {_CHAT} FROM chats ORDER BY updated DESC, rowid DESC LIMIT ? OFFSET ?", (limit, offset)
            ).fetchall()
        return [_chat(row) for row in rows]

    def chat(self, chat_id: str) -> Chat:
        """Raises ChatsError when there is none."""
        with self._read():
            row = self._db.execute(f"SELECT {_CHAT} FROM chats WHERE id = ?", (chat_id,)).fetchone()
        if row is None:
            raise _no_chat()
        return _chat(row)

    def rename(self, chat_id: str, title: str) -> None:
        """A new title does not make a chat the newest. Raises ChatsError when there is none."""
        self._change_chat("UPDATE chats SET title = ? WHERE id = ?", (_storable(title), chat_id))

    def set_model(self, chat_id: str, model: str) -> None:
        """Remember what the chat goes on with. Raises ChatsError when there is none."""
        self._change_chat("UPDATE chats SET model = ? WHERE id = ?", (_storable(model), chat_id))

    def set_system_prompt(self, chat_id: str, text: str) -> None:
        """Raises ChatsError when there is none."""
        self._change_chat("UPDATE chats SET system_prompt = ? WHERE id = ?", (_storable(text), chat_id))

    def delete(self, chat_id: str) -> None:
        """Delete the chat and its messages; nothing happens when there is none."""
        with self._write():
            self._db.execute("DELETE FROM chats WHERE id = ?", (chat_id,))

    def _change_chat(self, statement: str, values: tuple[Any, ...]) -> None:
        with self._write():
            changed = self._db.execute(statement, values).rowcount
        if not changed:
            raise _no_chat()

    # --- messages ---

    def messages(self, chat_id: str) -> list[StoredMessage]:
        """In order."""
        with self._read():
            rows = self._db.execute(
                f"SELECT {_MESSAGE} FROM messages WHERE chat_id = ? ORDER BY position", (chat_id,)
            ).fetchall()
        return [_message(row) for row in rows]

    def add_message(
        self,
        chat_id: str,
        role: Role,
        content: str,
        *,
        reasoning: str = "",
        model: str = "",
        stop_reason: str | None = None,
        timings: Timings | None = None,
    ) -> StoredMessage:
        """Append. Raises ChatsError when the chat is gone (deleted by another instance)."""
        now = time.time()
        with self._write():
            self._touch(chat_id, now)
            position = self._db.execute(
                "SELECT coalesce(max(position) + 1, 0) FROM messages WHERE chat_id = ?", (chat_id,)
            ).fetchone()[0]
            columns = _MESSAGE.removeprefix("id, ")
            row = self._db.execute(
                f"INSERT INTO messages ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) RETURNING {_MESSAGE}",
                (
                    chat_id,
                    position,
                    role,
                    _storable(content),
                    _storable(reasoning),
                    _storable(model),
                    stop_reason,
                    _timings_json(timings),
                    now,
                ),
            ).fetchone()
        return _message(row)

    def update_message(
        self,
        message_id: int,
        *,
        content: str | None = None,
        reasoning: str | None = None,
        stop_reason: str | None = None,
        timings: Timings | None = None,
        model: str | None = None,
    ) -> None:
        """Change what is given. Nothing happens when the message is gone (deleted by another instance)."""
        given = {
            "content": None if content is None else _storable(content),
            "reasoning": None if reasoning is None else _storable(reasoning),
            "stop_reason": stop_reason,
            "timings": _timings_json(timings),
            "model": None if model is None else _storable(model),
        }
        changes = {name: value for name, value in given.items() if value is not None}
        if not changes:
            return
        columns = ", ".join(f"{name} = ?" for name in changes)
        with self._write():
            self._db.execute(f"UPDATE messages SET {columns} WHERE id = ?", (*changes.values(), message_id))
            self._db.execute(
                "UPDATE chats SET updated = ? WHERE id = (SELECT chat_id FROM messages WHERE id = ?)",
                (time.time(), message_id),
            )

    def delete_messages_from(self, chat_id: str, position: int) -> int:
        """Delete that message and all after it; returns how many."""
        with self._write():
            return self._db.execute(
                "DELETE FROM messages WHERE chat_id = ? AND position >= ?", (chat_id, position)
            ).rowcount

    def _touch(self, chat_id: str, now: float) -> None:
        if not self._db.execute("UPDATE chats SET updated = ? WHERE id = ?", (now, chat_id)).rowcount:
            raise _no_chat()

    def search(self, text: str, limit: int = 100) -> list[Found]:
        """Chats that hold `text` in their title or messages, newest first; see `search.rows`."""
        with self._read():
            rows = search.rows(self._db, self._full_text, _storable(text).strip())
        found: dict[str, Found] = {}
        for *chat, snippet in rows:  # the first row of a chat has its best snippet
            found.setdefault(chat[0], Found(**_chat_fields(chat), snippet=" ".join(snippet.split())))
        return sorted(found.values(), key=lambda chat: -chat.updated)[:limit]

    # --- transactions ---

    @contextlib.contextmanager
    def _read(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                raise _unusable(self.path, error) from None

    @contextlib.contextmanager
    def _write(self) -> Iterator[None]:
        """All or nothing; the write lock is taken at once, so that two instances wait instead of failing."""
        with self._read():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise


class _Damage(sqlite3.DatabaseError):
    """quick_check found something."""


def _is_damage(error: sqlite3.Error) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, _Damage) or (
        code is not None and code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
    )


def _make_private(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives its side files the same mode


def _moved_aside(path: Path) -> ChatsDamaged:
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        for suffix in ("-wal", "-shm", ""):
            side = path.with_name(path.name + suffix)
            if side.exists():
                side.rename(aside.with_name(aside.name + suffix))
    except OSError as error:
        return ChatsDamaged(f"The file of your chats is damaged: {path}.", f"Move it away ({error}), then start again.")
    return ChatsDamaged(
        "The file of your chats is damaged.",
        f"It was moved to {aside}, where the sqlite3 tool's .recover may save what is in it. New chats start empty.",
    )


def _unusable(path: Path, error: Exception) -> ChatsError:
    if isinstance(error, sqlite3.Error) and _is_damage(error):
        return ChatsError(f"The file of your chats is damaged: {path}.", "Start again: it will be moved aside.")
    return ChatsError(f"Cannot use the file of your chats, {path}: {error}.", "Check its permissions and the disk.")


def _no_chat() -> ChatsError:
    return ChatsError("This chat does not exist any more.", "Another cpuchat may have deleted it; open another chat.")


def _chat_fields(row: Sequence[Any]) -> dict[str, Any]:
    return dict(zip(search.CHAT_COLUMNS, row, strict=False))


def _chat(row: tuple[Any, ...]) -> Chat:
    return Chat(**_chat_fields(row))


def _message(row: tuple[Any, ...]) -> StoredMessage:
    fields = dict(zip(_MESSAGE.split(", "), row, strict=True))
    fields["timings"] = _timings(fields["timings"])
    return StoredMessage(**fields)


def _timings_json(timings: Timings | None) -> str | None:
    return None if timings is None else msgspec.json.encode(timings).decode()


def _timings(text: str | None) -> Timings | None:
    try:
        return None if text is None else msgspec.json.decode(text, type=Timings)
    except msgspec.MsgspecError:  # figures are not worth losing a message for
        return None


def _storable(text: str) -> str:
    """SQLite keeps UTF-8: half a surrogate pair (from a broken paste) becomes a question mark."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
