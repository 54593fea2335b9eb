"""Chats on disk, in SQLite.

Every change is committed when the method returns, so a killed app loses nothing but what it had not told the store.
Write-ahead logging lets a second instance of the app read and write the same file; methods may be called from any
thread, one at a time. What is deleted or replaced is overwritten in the file, the search index and the log.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cpuchat.chats import repair, schema, search
from cpuchat.chats.records import (
    CHAT_COLUMNS,
    MESSAGE_COLUMNS,
    Chat,
    Deleted,
    SearchHit,
    StoredMessage,
    chat_of,
    column,
    decoded,
    message_of,
    new_chat_id,
    storable,
)
from cpuchat.chats.tree import Tree
from cpuchat.errors import ChatsChanged, ChatsError
from cpuchat.protocol import Role, Sampling
from cpuchat.timings import Timings

_BUSY_MS = 5000
_CHECK_LIMIT = 64 << 20  # bytes; larger files are not checked through at each start
_CHAT = ", ".join(CHAT_COLUMNS)
_MESSAGE = ", ".join(MESSAGE_COLUMNS)

T = TypeVar("T")


class ChatStore:
    """Stores chats in one file, which is created if missing and repaired if damaged; `notices` reports repairs.

    Args:
        path: the file. A folder that has to be made for it gets mode 0700, the file 0600.

    Raises:
        ChatsDamaged: the file is damaged and cannot be replaced by a sound one.
        ChatsForeign: it is another program's database.
        ChatsTooNew: a newer version wrote it; it is left as it is.
        ChatsError: the folder or file cannot be used (permissions, full disk). Every method raises it too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._notices: list[str] = []
        self._full_text = False
        self._erase_due = False
        try:
            _make_private(path)
            try:
                self._db = self._opened()
            except (sqlite3.Error, OverflowError, UnicodeError) as error:
                if not repair.is_damage(error):
                    raise
                self._notices.append(repair.salvage(path))
                self._db = self._opened()
        except (OSError, OverflowError, UnicodeError, sqlite3.Error) as error:
            raise _unusable(path, error) from None

    def _opened(self) -> sqlite3.Connection:
        with contextlib.ExitStack() as on_error:
            db = sqlite3.connect(self.path, timeout=_BUSY_MS / 1000, isolation_level=None, check_same_thread=False)
            on_error.callback(db.close)
            db.text_factory = decoded
            db.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA secure_delete = ON")
            db.execute("PRAGMA temp_store = MEMORY")
            db.execute("PRAGMA foreign_keys = ON")
            was_older = schema.upgrade(db)
            db.execute("PRAGMA journal_mode = WAL")
            if self.path.stat().st_size <= _CHECK_LIMIT:
                self._report_repairs(repair.check(db))
            self._full_text = schema.make_derived(db)
            schema.mark_interrupted(db)
            if was_older:  # what was deleted before stood readable in unused pages
                with contextlib.suppress(sqlite3.OperationalError):
                    db.execute("VACUUM")
                    db.execute("PRAGMA wal_checkpoint (TRUNCATE)")
            if repair.has_orphans(db):
                self._repair_rows(db)
            on_error.pop_all()
            return db

    def close(self) -> None:
        """Close the file. Calling `close` again is allowed, any other method is not."""
        with self._lock, contextlib.suppress(sqlite3.Error):
            if self._erase_due:
                self._truncate_log()
            self._db.close()

    def take_notices(self) -> list[str]:
        """Return messages about repaired damage, each once."""
        notices, self._notices = self._notices, []
        return notices

    # --- chats ---

    def create_chat(self, model: str, system_prompt: str = "", title: str = "", sides: str = "") -> Chat:
        now = time.time()
        chat = Chat(
            id=new_chat_id(),
            title=storable(title),
            created=now,
            updated=now,
            model=storable(model),
            system_prompt=storable(system_prompt),
            sides=storable(sides),
        )
        with self.transaction():
            values = msgspec.structs.astuple(chat)
            self._db.execute(f"INSERT INTO chats ({_CHAT}) VALUES ({', '.join('?' * len(values))})", values)
        return chat

    def chats(self) -> list[Chat]:
        """Return all chats, last changed first."""
        return self._select(chat_of, f"SELECT {_CHAT} FROM chats ORDER BY updated DESC, rowid DESC")

    def chat(self, chat_id: str) -> Chat:
        """Return a chat. Raises ChatsChanged if it does not exist."""
        found = self._select(chat_of, f"SELECT {_CHAT} FROM chats WHERE id = ?", (chat_id,))
        if not found:
            raise _no_chat()
        return found[0]

    def require_unchanged(self, chat: Chat) -> None:
        """Raise ChatsChanged if the chat is gone or its messages are not those of this version."""
        if self.chat(chat.id).version != chat.version:
            raise ChatsChanged("This chat was changed in another window and has been reloaded.", "Try again.")

    def rename(self, chat_id: str, title: str) -> None:
        """Change the title without changing the chat's place in the list. Raises ChatsChanged if the chat does not
        exist.
        """
        with self.transaction():
            if not self._db.execute("UPDATE chats SET title = ? WHERE id = ?", (storable(title), chat_id)).rowcount:
                raise _no_chat()
            self._erase()

    def fork(self, chat_id: str, message_id: int) -> Chat:
        """Copy the messages up to this one into a new chat. Raises ChatsChanged if it does not exist."""
        with self.transaction():
            chat, tree = self.chat(chat_id), self.tree(chat_id)
            if message_id not in tree:
                raise _no_message()
            fork = self.create_chat(chat.model, chat.system_prompt, f"{chat.title} (fork)")
            copied = [name for name in MESSAGE_COLUMNS if name not in ("id", "chat_id", "parent")]
            columns, parent = ", ".join(copied), 0
            copy = (
                f"INSERT INTO messages (chat_id, parent, {columns}) SELECT ?, ?, {columns} FROM messages WHERE id = ?"
            )
            for message in tree.path(message_id):
                parent = self._db.execute(copy, (fork.id, parent, message)).lastrowid
        return fork

    def delete(self, chat_id: str) -> Deleted:
        """Delete the chat and its messages; nothing happens when there is none."""
        with self.transaction():
            rows = {table: self._rows_of(table, chat_id) for table in schema.TABLES}
            self._db.execute("DELETE FROM chats WHERE id = ?", (chat_id,))
            self._erase()
        return Deleted(chat_id, 0, rows)

    def delete_branch(self, chat_id: str, message_id: int) -> Deleted:
        """Delete a message and all that follow from it; the branch beside it is open then.

        Raises:
            ChatsChanged: the chat or the message is gone.
        """
        with self.transaction():
            self._touch(chat_id, time.time())
            tree = self.tree(chat_id)
            if message_id not in tree:
                raise _no_message()
            gone = set(tree.branch(message_id))
            rows = [row for row in self._rows_of("messages", chat_id) if row[0] in gone]
            self._db.executemany("DELETE FROM messages WHERE id = ?", [(id,) for id in gone])
            self.set_leaf(chat_id, tree.after_deletion(message_id))
            self._erase()
        return Deleted(chat_id, message_id, {"messages": rows})

    def undelete(self, deleted: Deleted) -> None:
        """Put back what was deleted. Raises ChatsChanged if it was a branch of a chat that is gone."""
        with self.transaction():
            if deleted.message_id:
                self._touch(deleted.chat_id, time.time())
            for table, rows in deleted.rows.items():
                for row in rows:
                    self._db.execute(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(row))})", row)

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

    def set_leaf(self, chat_id: str, leaf: int) -> None:
        """Open the branch that ends with this message. Nothing happens when the chat is gone."""
        with self.transaction():
            self._db.execute("UPDATE chats SET leaf = ? WHERE id = ?", (leaf, chat_id))

    def add_message(
        self,
        chat_id: str,
        role: Role,
        content: str,
        *,
        after: int | None = None,
        reasoning: str = "",
        model: str = "",
        stop_reason: str | None = None,
        timings: Timings | None = None,
        sampling: Sampling | None = None,
    ) -> StoredMessage:
        """Add a message, and open its branch.

        Args:
            after: id of the message that it follows, 0 at the beginning of the chat; None: the last one of the open
                branch.

        Raises:
            ChatsChanged: the chat or the message that it follows is gone (deleted by another instance).
        """
        now = time.time()
        with self.transaction():
            self._touch(chat_id, now)
            if after is None:
                after = self.tree(chat_id).leaf
            elif after and not self._db.execute("SELECT 1 FROM messages WHERE id = ?", (after,)).fetchone():
                raise _no_message()
            added = StoredMessage(
                id=0,
                chat_id=chat_id,
                parent=after,
                role=role,
                content=storable(content),
                reasoning=storable(reasoning),
                model=storable(model),
                stop_reason=stop_reason,
                timings=timings,
                sampling=sampling,
                created=now,
            )
            values = [column(getattr(added, name)) for name in MESSAGE_COLUMNS[1:]]
            marks = ", ".join("?" * len(values))
            row = self._db.execute(f"INSERT INTO messages ({_MESSAGE}) VALUES (NULL, {marks})", values)
            self._db.execute("UPDATE chats SET leaf = NULL WHERE id = ?", (chat_id,))
        return msgspec.structs.replace(added, id=row.lastrowid)

    def update_message(self, message_id: int, **changes: object) -> int | None:
        """Update the columns of a growing answer that are given and not None.

        Returns the version that its chat has now. None: the message is gone (deleted by another instance), and
        nothing happened.
        """
        given = {name: column(value) for name, value in changes.items() if value is not None}
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
            raise _no_chat()
        return row[0][0]

    def search(self, text: str, limit: int = 100) -> list[SearchHit]:
        """Find chats that hold `text` in their title or messages, last changed first; see `search.find`."""
        with self._guarded():
            rows = search.find(self._db, self._full_text, storable(text).strip())
        chats = [(chat_of(row), found) for row, found in rows]
        hits = [SearchHit(**msgspec.structs.asdict(chat), found=found) for chat, found in chats if chat is not None]
        return hits[:limit]

    # --- transactions ---

    @contextlib.contextmanager
    def transaction(self, unchanged: Chat | None = None) -> Iterator[None]:
        """Open a transaction; the write lock is taken at once, so that a second instance waits instead of failing. May
        be nested.

        Args:
            unchanged: see `require_unchanged`.
        """
        with self._guarded():
            if self._db.in_transaction:
                yield
                return
            self._db.execute("BEGIN IMMEDIATE")
            try:
                if unchanged is not None:
                    self.require_unchanged(unchanged)
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            if self._erase_due:
                self._truncate_log()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                if getattr(error, "sqlite_errorcode", 0) & 0xFF in _BAD_INDEX and not self._db.in_transaction:
                    with contextlib.suppress(sqlite3.Error):
                        self._full_text = schema.remake_derived(self._db)
                # In the search index it is repaired by now.
                if repair.is_damage(error) and getattr(error, "sqlite_errorcode", 0) != sqlite3.SQLITE_CORRUPT_VTAB:
                    repair.request_salvage(self.path)
                raise _unusable(self.path, error) from None
            except (OverflowError, UnicodeError) as error:  # values that cannot be put back as they were read
                repair.request_salvage(self.path)
                raise _unusable(self.path, error) from None

    def _select(
        self, convert: Callable[[tuple[Any, ...]], T | None], query: str, values: tuple[Any, ...] = ()
    ) -> list[T]:
        """Return the rows, after repairing invalid ones."""
        with self._guarded():
            records = [convert(row) for row in self._db.execute(query, values)]
            if None in records and not self._db.in_transaction:
                self._repair_rows(self._db)
                records = [convert(row) for row in self._db.execute(query, values)]
        return [record for record in records if record is not None]

    def _repair_rows(self, db: sqlite3.Connection) -> None:
        self._report_repairs(repair.repair_rows(db))
        self._full_text = schema.make_derived(db)

    def _report_repairs(self, n_repaired: int) -> None:
        if not n_repaired:
            return
        entries = "entry" if n_repaired == 1 else "entries"
        self._notices.append(
            f"Repaired or quarantined {n_repaired} damaged {entries} in the chat database; the originals are in the"
            f" table “quarantine” of {self.path}."
        )

    def _erase(self) -> None:
        """Overwrite deleted text in the search index; the log follows after the transaction."""
        if self._full_text:
            self._db.execute("INSERT INTO messages_fts (messages_fts) VALUES ('optimize')")
        self._erase_due = True

    def _truncate_log(self) -> None:
        """Truncate the log. Fails while another instance reads; then it is retried after the next change."""
        self._db.execute("PRAGMA busy_timeout = 100")
        with contextlib.suppress(sqlite3.OperationalError):
            self._erase_due = bool(self._db.execute("PRAGMA wal_checkpoint (TRUNCATE)").fetchone()[0])
        self._db.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")


# What a damaged full-text index makes of a sound statement. It is made again, so that the next try succeeds.
_BAD_INDEX = (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_CONSTRAINT)


def _make_private(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in (path.name, *(path.name + side for side in repair.SIDES)):
        file = path.with_name(name)
        if file.exists() and not stat.S_ISREG(file.stat().st_mode):
            raise OSError(f"{file.name} is not a regular file")
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives its side files the same mode


def _unusable(path: Path, error: Exception) -> ChatsError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    what = ((isinstance(error, OSError) and error.strerror) or str(error)).rstrip(".")
    match code:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return ChatsError(f"The chat database is locked: {path}.", "Close the program that holds the lock.")
        case sqlite3.SQLITE_FULL:
            return ChatsError("Cannot save your chats: the disk is full.", "Free some space.")
        case _ if isinstance(error, sqlite3.Error) and repair.is_damage(error):
            return ChatsError(f"The chat database is damaged: {path}.", "Restart to repair it.")
        case _:
            return ChatsError(
                f"Cannot use the chat database {path}: {what}.",
                "Check its permissions and the disk, or set CPUCHAT_DATA_DIR to another folder.",
            )


def _no_message() -> ChatsChanged:
    return ChatsChanged(
        "This message no longer exists.", "It may have been deleted in another window; open the chat again."
    )


def _no_chat() -> ChatsChanged:
    return ChatsChanged("This chat no longer exists.", "It may have been deleted in another window; open another chat.")
