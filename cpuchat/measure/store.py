"""The record of everything that was measured: one table of one SQLite file, `measured.db` of the cache folder.

Losing it costs time and is never an error: where the file cannot be written, nothing is kept; one that is damaged is
set aside, and measured anew. Several programs may use it at once; nothing waits for the disk.
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
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from cpuchat.base import paths
from cpuchat.base.decoding import prepared
from cpuchat.measure.subject import Subject

MAX_ENTRIES: Final = 1000
"""Of one `what`; the latest are kept."""
_WAIT_SECONDS: Final = 2.0
"""For another program that writes, which takes milliseconds; after this it counts as hung, and nothing is read or kept
for `_HUNG_SECONDS`: a start reads a dozen times."""
_HUNG_SECONDS: Final = 60.0
_TABLE: Final = """CREATE TABLE IF NOT EXISTS measured_1 (
    subject TEXT NOT NULL, what TEXT NOT NULL, value BLOB NOT NULL, error REAL, n INTEGER, disturbed INTEGER, at REAL,
    PRIMARY KEY (subject, what))"""

T = TypeVar("T")


class Reading(NamedTuple, Generic[T]):
    """A measured `value` of `what` (`"read bandwidth"`), a number or a struct.

    `n` is how often it was measured, `at` seconds since 1970. `disturbed`: other programs ran meanwhile."""

    subject: Subject
    what: str
    value: T
    n: int = 1
    disturbed: bool = False
    at: float = 0.0


def find(subject: Subject, what: str, kind: type[T]) -> Reading[T] | None:
    """Return what was measured last; None if nothing was, or what is kept is no valid `kind`."""
    return next(_rows(what, kind, "AND subject = ?", subject.key), None)


def find_all(what: str, kind: type[T]) -> list[Reading[T]]:
    """Return what was measured of all subjects, the latest last."""
    return list(_rows(what, kind))


def stamp() -> object:
    """Return what changes whenever something is kept, by whatever program; None while nothing is. Cheap."""
    return _FILE.run(_FILE.stamp, creates=False)


def _rows(what: str, kind: type[T], where: str = "", *values: str) -> Iterator[Reading[T]]:
    query = f"SELECT subject, value, n, disturbed, at FROM measured_1 WHERE what = ? {where} ORDER BY rowid"
    rows = _FILE.run(lambda db: db.execute(query, (what, *values)).fetchall(), creates=False) or []
    for subject, value, n, disturbed, at in rows:
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError, TypeError):
            found = msgspec.json.decode(value, type=prepared(kind))
            of = msgspec.json.decode(subject, type=prepared(Subject))
            yield Reading(of, what, found, int(n), bool(disturbed), float(at))


def keep(subject: Subject, what: str, value: Any, *, n: int = 1, disturbed: bool = False) -> None:
    """Keep a measurement of now in the place of an earlier one."""
    _FILE.run(lambda db: _put(db, subject, what, value, n, disturbed))


def change(subject: Subject, what: str, kind: type[T], edit: Callable[[T | None], T]) -> None:
    """Keep what `edit` makes of the value that is kept, if any, so that nothing another program measured is lost."""

    def edited(db: sqlite3.Connection) -> None:
        before = find(subject, what, kind)
        _put(db, subject, what, edit(before.value if before is not None else None))

    _FILE.run(edited)


def forget(subject: Subject, what: str) -> None:
    _FILE.run(lambda db: db.execute("DELETE FROM measured_1 WHERE subject = ? AND what = ?", (subject.key, what)))


def _put(db: sqlite3.Connection, on: Subject, what: str, value: Any, n: int = 1, disturbed: bool = False) -> None:
    row = (on.key, what, msgspec.json.encode(value), n, disturbed, time.time())
    db.execute("INSERT OR REPLACE INTO measured_1 VALUES (?, ?, ?, 0, ?, ?, ?)", row)
    db.execute(
        "DELETE FROM measured_1 WHERE what = ?1 AND rowid <= "
        "(SELECT rowid FROM measured_1 WHERE what = ?1 ORDER BY rowid DESC LIMIT 1 OFFSET ?2)",
        (what, MAX_ENTRIES),
    )


class _File:
    """The open file of this process; another one when the cache folder changes, or somebody replaces the file."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._opened: tuple[Path, int] | None = None
        self._hung: tuple[Path, float] | None = None  # the file that another program blocks, and until when

    def run(self, work: Callable[[sqlite3.Connection], T], *, creates: bool = True) -> T | None:
        """Do `work` in a transaction; None where the file cannot be used, or is not there and not to be made."""
        with self._lock:
            file = paths.measured_file()
            if self._hung is not None and self._hung[0] == file and time.monotonic() < self._hung[1]:
                return None
            for _ in range(2):
                try:
                    db = self._open(creates)
                    return None if db is None else self._transaction(db, work) if creates else work(db)
                except sqlite3.OperationalError as error:  # no room, no such folder; or no table, which opening makes
                    if "locked" in str(error):
                        self._hung = file, time.monotonic() + _HUNG_SECONDS
                    if self._db is not None and not self._db.in_transaction:
                        self._close()
                    return None
                except sqlite3.DatabaseError:  # damaged
                    self._close()
                    with contextlib.suppress(OSError):
                        file.replace(file.with_name(f"{file.name}.damaged"))
                except (OSError, UnicodeEncodeError):  # the name of a file may be no text
                    return None
        return None

    def stamp(self, db: sqlite3.Connection) -> object:
        return self._opened, db.total_changes, db.execute("PRAGMA data_version").fetchone()

    def _transaction(self, db: sqlite3.Connection, work: Callable[[sqlite3.Connection], T]) -> T:
        if db.in_transaction:
            return work(db)
        db.execute("BEGIN IMMEDIATE")
        try:
            found = work(db)
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")
        return found

    def _open(self, creates: bool) -> sqlite3.Connection | None:
        file = paths.measured_file()
        try:
            status = file.stat()
        except OSError:
            if not creates:
                return None
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
        else:
            if self._db is not None and self._opened == (file, status.st_ino):
                return self._db
            if not stat.S_ISREG(status.st_mode):
                raise sqlite3.DatabaseError("not a file")
        self._close()
        db = sqlite3.connect(file, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False)
        self._db = db
        db.execute("PRAGMA synchronous = OFF")
        db.execute(_TABLE)
        self._opened = (file, file.stat().st_ino)
        return db

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
        self._db = self._opened = None


_FILE = _File()
