"""The tables of the chat database. They decide: a `PRAGMA user_version` that contradicts them is put right."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

from cpuchat.base.errors import ChatsForeign, ChatsTooNew
from cpuchat.chats.records import INTERRUPTED

VERSION = 14
"""Raise it with every change of the tables, and upgrade those of released versions."""
# Columns are fields of `records.Chat` and `records.StoredMessage`, records in them as JSON. Drafts are in parts, of a
# chat (NULL: a new one) and of the window that they belong to.
TABLES = {
    "chats": """
    CREATE TABLE chats (
        id TEXT PRIMARY KEY,
        title TEXT NOT NULL DEFAULT '',
        created REAL NOT NULL,
        updated REAL NOT NULL,
        model TEXT NOT NULL DEFAULT '',
        system_prompt TEXT NOT NULL DEFAULT '',
        version INTEGER NOT NULL DEFAULT 0,
        sides TEXT NOT NULL DEFAULT '',
        leaf INTEGER,
        when_full TEXT NOT NULL DEFAULT '',
        own TEXT
    )
    """,
    "messages": """
    CREATE TABLE messages (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        chat_id TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
        parent INTEGER NOT NULL,
        role TEXT NOT NULL CHECK (role IN ('system', 'user', 'assistant')),
        content TEXT NOT NULL DEFAULT '',
        reasoning TEXT NOT NULL DEFAULT '',
        model TEXT NOT NULL DEFAULT '',
        stop_reason TEXT,
        timings TEXT,
        settings TEXT,
        created REAL NOT NULL,
        attachments TEXT,
        steps TEXT,
        recording TEXT
    )
    """,
    "drafts": """
    CREATE TABLE drafts (
        chat_id TEXT REFERENCES chats (id) ON DELETE CASCADE, window TEXT, name TEXT, text TEXT
    )
    """,
}
_OUR_COLUMNS = {
    "chats": {"title", "created", "updated", "model", "system_prompt"},
    "messages": {"chat_id", "role", "content", "reasoning", "stop_reason", "timings"},
}
_ANYBODYS = ("sqlite_", "drafts")  # left of our file without its two tables
_BELIEVABLE = 1000  # versions ahead of this one; a number beyond was not written by any cpuchat

_INDEXES = {
    "chats_by_time": "CREATE INDEX chats_by_time ON chats (updated)",
    "messages_by_chat": "CREATE INDEX messages_by_chat ON messages (chat_id, parent)",
    "messages_unfinished": (
        "CREATE INDEX messages_unfinished ON messages (id) WHERE role = 'assistant' AND stop_reason IS NULL"
    ),
}


class UnexpectedLayout(sqlite3.DatabaseError):
    """Raised when the tables match no version, or a page of them is damaged."""


class EarlierLayout(UnexpectedLayout):
    """Raised when the tables were made by an earlier version."""


def make_tables(db: sqlite3.Connection) -> None:
    """Create the tables in an empty file. Another instance may do the same at the same time. Raises ChatsTooNew: the
    file is ahead of this program; ChatsForeign: it is another program's database; UnexpectedLayout, sqlite3.Error."""
    if _version(db) == VERSION and _is_ours(db):
        return
    with transaction(db):
        # Now that nobody else can change it.
        version = _version(db)
        names = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")}
        names = {name for name in names if not name.startswith(_ANYBODYS)}
        if names and not any(len(columns & column_names(db, table)) > 2 for table, columns in _OUR_COLUMNS.items()):
            shown = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
            raise ChatsForeign(
                f"The chat database belongs to another program (tables: {shown}).",
                "Move the file away, then restart; nothing was changed.",
            )
        if VERSION < version <= VERSION + _BELIEVABLE:
            raise ChatsTooNew(
                "The chat database was written by a newer version of cpuchat.", "Update cpuchat; nothing was changed."
            )
        if not names and not column_names(db, "drafts"):
            for statement in TABLES.values():
                db.execute(statement)
        elif not _is_ours(db):
            raise (EarlierLayout if 0 < version < VERSION else UnexpectedLayout)("unknown table layout")
        db.execute(f"PRAGMA user_version = {VERSION}")


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Take the write lock at once, so that a second instance waits; commit at the end, roll back on an error."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _is_ours(db: sqlite3.Connection) -> bool:
    """Return whether the tables are those that the statements above make."""
    found = dict(db.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'"))
    return all(str(found.get(name)).split() == statement.split() for name, statement in TABLES.items())


def column_names(db: sqlite3.Connection, table: str) -> set[str]:
    """Return the columns of `table`; empty when there is no such table."""
    try:
        return {str(column[1]) for column in db.execute(f"PRAGMA table_xinfo({table})")}
    except sqlite3.OperationalError:  # a view of something that is not there
        return set()


def make_derived(db: sqlite3.Connection) -> None:
    """Create missing or altered indexes; drop unknown ones and triggers."""
    where = "type = 'trigger' OR type = 'index' AND tbl_name IN ('chats', 'messages') AND sql IS NOT NULL"
    if dict(db.execute(f"SELECT name, sql FROM sqlite_master WHERE {where}")) != _INDEXES:
        with transaction(db):
            for kind, name in db.execute(f"SELECT type, name FROM sqlite_master WHERE {where}").fetchall():
                quoted = name.replace('"', '""')
                db.execute(f'DROP {kind} "{quoted}"')
            for statement in _INDEXES.values():
                db.execute(statement)


def mark_interrupted(db: sqlite3.Connection) -> None:
    """Mark unfinished answers as interrupted. One that another instance is writing is corrected by its last save."""
    unfinished = "role = 'assistant' AND stop_reason IS NULL"
    if db.execute(f"SELECT EXISTS (SELECT 1 FROM messages WHERE {unfinished})").fetchone()[0]:
        db.execute(f"UPDATE messages SET stop_reason = ? WHERE {unfinished}", (INTERRUPTED,))


def _version(db: sqlite3.Connection) -> int:
    return db.execute("PRAGMA user_version").fetchone()[0]
