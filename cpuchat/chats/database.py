"""The file of the chat database: opening, transactions, erasing what was deleted, and salvage.

Invalid values are replaced as they are read. From a file whose tables, keys or pages are damaged, every row that can
still be read is copied to a new one, and the file is moved aside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from cpuchat.base import files
from cpuchat.base.errors import ChatsDamaged, ChatsError
from cpuchat.chats import schema
from cpuchat.chats.records import Chat, StoredMessage, column, decoded, new_chat_id, repaired_chat, repaired_message
from cpuchat.telemetry.units import plural

Row = dict[str, Any]
Numbered = tuple[int, Row]

SIDES = ("-wal", "-shm")
"""Suffixes of the files that SQLite keeps beside the database."""
_DEFAULTS: dict[str, Row] = {
    "chats": {name: column(value) for name, value in msgspec.structs.asdict(Chat()).items()},
    "messages": {name: column(value) for name, value in msgspec.structs.asdict(StoredMessage(role="user")).items()}
    | {"role": "", "parent": -1},
    "drafts": dict.fromkeys(("chat_id", "window", "name", "text")),
}
_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
_LOST = """
    SELECT EXISTS (SELECT 1 FROM messages WHERE chat_id NOT IN (SELECT id FROM chats WHERE id IS NOT NULL))
        OR EXISTS (SELECT 1 FROM chats WHERE typeof(id) != 'text' OR id GLOB '*[^A-Za-z0-9_-]*' OR length(id) NOT
                   BETWEEN 1 AND 64)
"""
"""Whether there are messages without a chat, or chats that nothing can name."""
_SHARED_LOCK = 0x40000002, 510
"""Where SQLite locks an open database: offset and length, "SHARED_FIRST" of https://sqlite.org/src/file/src/os.h"""
_QUERIES = 4000  # how often a damaged table is asked for what is behind the damage


class _InUse(ChatsDamaged):
    """The database is damaged, and another program has it open."""


def is_damage(error: BaseException) -> bool:
    # A name in the file that cannot be passed back raises the last two.
    if isinstance(error, schema.UnexpectedLayout | UnicodeError | OverflowError):
        return True
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "unsupported file format" in str(error)


def salvage_if_requested(path: Path) -> str:
    """Salvage the file if that was requested, as `salvage`; returns "" if it was not, the file is gone or in use."""
    if not _request(path).exists():
        return ""
    try:
        notice = salvage(path, path.stat().st_ino) if path.exists() else ""
    except _InUse:
        return ""
    _request(path).unlink(missing_ok=True)
    return notice


def _request(path: Path) -> Path:
    return path.with_name(f"{path.name}.salvage")


def salvage(path: Path, inode: int, *, is_earlier: bool = False) -> str:
    """Replace a damaged file, or one of an earlier version (`is_earlier`), by a new one with everything that can be
    read; returns the message for the user; "" if it is not the one with this `inode` any more. Raises ChatsDamaged:
    another program has it open, the new file cannot be written, or the old one not be moved; it is unchanged."""
    aside = path.with_name(f"{path.name}.{'earlier' if is_earlier else 'damaged'}-{time.strftime('%Y%m%d-%H%M%S')}")
    new = path.with_name(f"{path.name}.new-{os.getpid()}")
    try:
        with contextlib.ExitStack() as cleanup:
            damaged = cleanup.enter_context(path.open("r+b"))
            if os.fstat(damaged.fileno()).st_ino != inode:
                return ""
            _lock_out(damaged, path)
            cleanup.callback(new.unlink, missing_ok=True)
            rows = _readable(path, damaged, cleanup)
            new.unlink(missing_ok=True)
            os.close(os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as db:
                schema.make_tables(db)
                with schema.transaction(db):
                    n_lost = _put_rows(db, rows)
                n_chats, n_messages = (
                    db.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("chats", "messages")
                )
            for side in SIDES:
                if (file := path.with_name(path.name + side)).exists():
                    file.rename(aside.with_name(aside.name + side))
            path.rename(aside)
            new.rename(path)
    except (OSError, sqlite3.Error) as error:
        raise ChatsDamaged(
            f"The chat database is damaged: {path}.",
            f"Replacing it failed ({error}). Move the file away, then restart.",
        ) from None
    counts = f"{plural(n_chats, 'chat')} with {plural(n_messages, 'message')}"
    found = f"Recovered {counts}" if n_chats else "Nothing could be recovered"
    lost = f", without {plural(n_lost, 'message')} of an unknown role" if n_lost else ""
    if is_earlier:
        return f"The chat database was of an earlier version. Kept {counts}{lost}; the old file is now {aside}."
    return f"The chat database was damaged. {found}{lost}; the damaged file is kept as {aside}."


def _lock_out(damaged: BinaryIO, path: Path) -> None:
    """Keep other programs out until `damaged` or any other handle of it is closed. Raises _InUse: one has it open."""
    try:
        if files.fcntl is not None:
            offset, length = _SHARED_LOCK
            files.fcntl.lockf(damaged, files.fcntl.LOCK_EX | files.fcntl.LOCK_NB, length, offset)
    except (BlockingIOError, PermissionError):
        raise _InUse(
            f"The chat database is damaged, and another program has it open: {path}.",
            "Close that program, then restart to repair the file.",
        ) from None
    except OSError:  # a file system without locks
        pass


def _put_rows(db: sqlite3.Connection, rows: dict[str, list[Numbered]]) -> int:
    """Write rows, repaired where needed. Messages whose chat is lost get another one, unsent texts go to a new one.
    Returns how many messages were left out: their role is unknown."""
    new_ids: dict[object, str] = {}
    n_lost = 0

    def put_chat(row: Row, **more: object) -> None:
        repaired = repaired_chat(row)
        if repaired["id"] in new_ids.values():  # a table without its key
            repaired["id"] = new_chat_id()
        new_ids.setdefault(row["id"], repaired["id"])
        insert(db, "chats", {**repaired, **more})

    for rowid, row in rows["chats"]:
        put_chat(row, rowid=rowid)
    for rowid, row in rows["messages"]:
        repaired = repaired_message(row)
        if repaired is None:
            n_lost += 1
            continue
        if row["chat_id"] not in new_ids:
            times = dict.fromkeys(("created", "updated"), row["created"])
            put_chat(_DEFAULTS["chats"] | {"id": row["chat_id"], "title": "Recovered chat"} | times)
        insert(db, "messages", {**repaired, "id": rowid, "chat_id": new_ids[row["chat_id"]]})
    for _, row in rows["drafts"]:
        if all(isinstance(row[name], str) for name in ("window", "name", "text")):
            insert(db, "drafts", {**row, "chat_id": new_ids.get(row["chat_id"])})
    return n_lost


def insert(db: sqlite3.Connection, table: str, row: Row) -> int:
    """Add a row, and return its rowid."""
    marks = ", ".join("?" * len(row))
    done = db.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))
    return done.lastrowid or 0


def _rows(db: sqlite3.Connection, table: str, low: int, high: int, down: bool = False) -> Iterator[Numbered]:
    """Yield the rows with rowids in [low, high]; missing columns get their defaults."""
    present = schema.column_names(db, table)
    columns = [name for name in _DEFAULTS[table] if name in present]
    query = (
        f"SELECT rowid, {', '.join(columns)} FROM {table} WHERE rowid BETWEEN ? AND ?"
        f" ORDER BY rowid {'DESC' if down else 'ASC'}"
    )
    for rowid, *values in db.execute(query, (low, high)):
        yield rowid, _DEFAULTS[table] | dict(zip(columns, values, strict=True))


def _readable(path: Path, damaged: BinaryIO, cleanup: contextlib.ExitStack) -> dict[str, list[Numbered]]:
    """Read the rows of each table of a damaged file as far as SQLite can."""
    copy = path.with_name(f"{path.name}.copy-{os.getpid()}")
    for side in ("", *SIDES):
        cleanup.callback(copy.with_name(copy.name + side).unlink, missing_ok=True)
    with os.fdopen(os.open(copy, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        shutil.copyfileobj(damaged, file)
    if (log := path.with_name(path.name + SIDES[0])).exists():
        shutil.copyfile(log, copy.with_name(copy.name + SIDES[0]))
    db = sqlite3.connect(copy, isolation_level=None)
    cleanup.callback(db.close)
    db.text_factory = decoded
    db.execute("PRAGMA writable_schema = ON")  # read a schema that is invalid in places all the same
    found: dict[str, list[Numbered]] = {}
    for table in _DEFAULTS:
        rows: dict[int, Row] = {}
        with contextlib.suppress(sqlite3.Error):
            # Reading a view or a virtual table may take any time.
            is_table = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ? AND sql LIKE 'CREATE TABLE%'"
            if db.execute(is_table, (table,)).fetchone():
                _read_around_damage(db, table, rows)
        found[table] = sorted(rows.items())
    return found


def _read_around_damage(db: sqlite3.Connection, table: str, rows: dict[int, Row]) -> None:
    """Read rowids from both ends up to the damage, then bisect what lies between."""
    spans = [(_LOWEST, _HIGHEST)]
    for _ in range(_QUERIES):
        if not spans:
            return
        low, high = spans.pop()
        try:
            for rowid, row in _rows(db, table, low, high):
                rows[rowid] = row
                low = rowid + 1
            continue
        except sqlite3.DatabaseError:
            pass
        with contextlib.suppress(sqlite3.DatabaseError):
            for rowid, row in _rows(db, table, low, high, down=True):
                rows[rowid] = row
                high = rowid - 1
        if low < high:
            middle = (low + high) // 2
            spans += [(low, middle), (middle + 1, high)]


_BUSY_MS = 5000
_CHECK_LIMIT = 64 << 20  # bytes; larger files are not checked through at each start

T = TypeVar("T")


class Database:
    """An open database; see `store.ChatStore`. `unsaved` is why it is a copy in memory, None where it is not."""

    def __init__(self, path: Path, *, or_in_memory: bool = False) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._notices: list[str] = []
        self._erase_due = False
        self.unsaved: ChatsError | None = None
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in (path.name, *(path.name + side for side in SIDES)):
                file = path.with_name(name)
                if file.exists() and not stat.S_ISREG(file.stat().st_mode):
                    raise OSError(f"{file.name} is not a regular file")
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives its side files the same mode
            notice = salvage_if_requested(path)
            inode = path.stat().st_ino
            try:
                self._db = self._opened(path)
            except (sqlite3.Error, OverflowError, UnicodeError) as error:
                if not is_damage(error):
                    raise
                notice = salvage(path, inode, is_earlier=isinstance(error, schema.EarlierLayout))
                self._db = self._opened(path)
            self._notices += [notice] if notice else []
        except (OSError, OverflowError, UnicodeError, sqlite3.Error) as error:
            problem, code = _unusable(path, error), getattr(error, "sqlite_errorcode", 0) & 0xFF
            if not or_in_memory or code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) or is_damage(error):
                raise problem from None
            try:
                self._db, self.unsaved = self._opened(":memory:"), problem
            except (OverflowError, UnicodeError, sqlite3.Error):
                raise problem from None
            self._notices.append(f"{problem} Until you restart, nothing is saved; /export writes a chat elsewhere.")

    def _opened(self, place: Path | str) -> sqlite3.Connection:
        """Open a file, or in memory a copy of what the file has that cannot be written."""
        with contextlib.ExitStack() as on_error:
            db = sqlite3.connect(place, timeout=_BUSY_MS / 1000, isolation_level=None, check_same_thread=False)
            on_error.callback(db.close)
            if place != self.path:
                _copy(self.path, db)
            db.text_factory = decoded
            db.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
            db.execute("PRAGMA synchronous = NORMAL")
            db.execute("PRAGMA secure_delete = ON")
            db.execute("PRAGMA temp_store = MEMORY")
            db.execute("PRAGMA cache_size = -512")  # KB; 2 MB, the default, would fill in hours and make nothing faster
            db.execute("PRAGMA foreign_keys = ON")
            schema.make_tables(db)
            db.execute("PRAGMA journal_mode = WAL")
            if place != self.path or self.path.stat().st_size <= _CHECK_LIMIT:
                verdict = str(db.execute("PRAGMA quick_check(1)").fetchone()[0])
                if verdict != "ok":
                    raise schema.UnexpectedLayout(verdict)
            if db.execute(_LOST).fetchone()[0]:
                raise schema.UnexpectedLayout("messages without a chat")
            schema.make_derived(db)
            schema.mark_interrupted(db)
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
        """Open a transaction as `schema.transaction`. May be nested."""
        with self._guarded():
            if self._db.in_transaction:
                yield
                return
            with schema.transaction(self._db):
                yield
            if self._erase_due:
                self._truncate_log()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except sqlite3.Error as error:
                if is_damage(error):  # which no check detects: salvage it at the next start
                    with contextlib.suppress(OSError):
                        _request(self.path).touch(mode=0o600)
                raise _unusable(self.path, error) from None
            except (OverflowError, UnicodeError) as error:  # a value that was given: the file is sound
                raise _unusable(self.path, error) from None

    def _select(
        self, convert: Callable[[tuple[Any, ...]], T | None], query: str, values: tuple[Any, ...] = ()
    ) -> list[T]:
        """Return what `convert` makes of the rows, without None."""
        with self._guarded():
            records = [convert(row) for row in self._db.execute(query, values)]
        return [record for record in records if record is not None]

    def _truncate_log(self) -> None:
        """Truncate the log. Fails while another instance reads; then it is retried after the next change."""
        self._db.execute("PRAGMA busy_timeout = 100")
        with contextlib.suppress(sqlite3.OperationalError):
            self._erase_due = bool(self._db.execute("PRAGMA wal_checkpoint (TRUNCATE)").fetchone()[0])
        self._db.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")


def _copy(path: Path, db: sqlite3.Connection) -> None:
    """Copy what can be read of a file into `db`. In a folder that cannot be written, SQLite may open it only as one
    that nobody changes, without its log."""
    files = [path.with_name(path.name + side) for side in ("", *SIDES)]
    if any(file.exists() and not file.is_file() for file in files):  # a pipe might be read for ever
        return
    for how in ("mode=ro", "immutable=1"):
        with contextlib.suppress(sqlite3.Error):
            with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True)) as file:
                file.backup(db)
            return


def _unusable(path: Path, error: Exception) -> ChatsError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    what = ((isinstance(error, OSError) and error.strerror) or str(error)).rstrip(".")
    match code:
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            return ChatsError(f"The chat database is locked: {path}.", "Close the program that holds the lock.")
        case sqlite3.SQLITE_FULL:
            return ChatsError("Cannot save your chats: the disk is full.", "Free some space.")
        case _ if isinstance(error, sqlite3.Error) and is_damage(error):
            return ChatsError(f"The chat database is damaged: {path}.", "Restart to repair it.")
        case _:
            return ChatsError(
                f"Cannot use the chat database {path}: {what}.",
                "Check its permissions and the disk, or set CPUCHAT_DATA_DIR to another folder.",
            )
