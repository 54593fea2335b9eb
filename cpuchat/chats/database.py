"""The file of the chat database: opening, repairing, transactions, erasing what was deleted."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from cpuchat.chats import repair, schema
from cpuchat.chats.records import decoded
from cpuchat.errors import ChatsError

_BUSY_MS = 5000
_CHECK_LIMIT = 64 << 20  # bytes; larger files are not checked through at each start

T = TypeVar("T")


class Database:
    """An open database; see `store.ChatStore`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._notices: list[str] = []
        self._full_text = False
        self._erase_due = False
        try:
            _make_private(path)
            notice = repair.salvage_if_requested(path)
            inode = path.stat().st_ino
            try:
                self._db = self._opened()
            except (sqlite3.Error, OverflowError, UnicodeError) as error:
                if not repair.is_damage(error):
                    raise
                notice = repair.salvage(path, inode)
                self._db = self._opened()
            self._notices += [notice] if notice else []
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
            db.execute("PRAGMA cache_size = -512")  # KB; 2 MB, the default, would fill in hours and make nothing faster
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

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Open a transaction; the write lock is taken at once, so that a second instance waits instead of failing. May
        be nested.
        """
        with self._guarded():
            if self._db.in_transaction:
                yield
                return
            self._db.execute("BEGIN IMMEDIATE")
            try:
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
            except (OverflowError, UnicodeError) as error:  # a value that was given: the file is sound
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
