"""The schema of the chat database.

`PRAGMA user_version` is the version of the tables. The tables themselves decide: a number that contradicts them is put
right.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Iterator

from cpuchat.base.errors import ChatsForeign, ChatsTooNew
from cpuchat.chats.records import INTERRUPTED

VERSION = 12
"""Raise it with every change of the tables, and upgrade those of released versions."""
_CREATE = (
    # sides: those of a comparison (compare.kept), as JSON; '' for a chat. leaf: of the open branch (`tree.Tree`).
    # when_full: what to do when the chat no longer fits into the context: 'drop', 'compact' or 'stop'; '' is to ask.
    # preset (`presets.Preset`): as it was when it was chosen, as JSON. reasoning: 'on', 'off', or '' as set elsewhere;
    # reasoning_budget: its tokens, NULL as set elsewhere. pinned: 1 is listed before all others.
    """
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
        preset TEXT,
        reasoning TEXT NOT NULL DEFAULT '',
        reasoning_budget INTEGER,
        pinned INTEGER NOT NULL DEFAULT 0
    )
    """,
    # As JSON: settings of an answer (`records.AnswerSettings`), texts sent with a message (`records.Attachment`), steps
    # on the way to an answer (`tool_calls.ToolStep`), and its recording, when the tokens of a compared answer came, and
    # what the other side predicts (`runner.KeptTokens`).
    """
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
    # Rows that made no sense, as they were found: JSON of column names and values, bytes as {"hex": ...}.
    """
    CREATE TABLE quarantine (
        id INTEGER PRIMARY KEY,
        chat_id TEXT REFERENCES chats (id) ON DELETE CASCADE,
        source TEXT NOT NULL,
        row TEXT NOT NULL,
        found REAL NOT NULL
    )
    """,
    # Unsent texts (`drafts.DraftSaver`) of a chat, NULL for a new one, in parts, by the window that they belong to.
    """
    CREATE TABLE drafts (
        chat_id TEXT REFERENCES chats (id) ON DELETE CASCADE, window TEXT, name TEXT, text TEXT
    )
    """,
)
TABLES = ("chats", "messages", "quarantine", "drafts")
_OUR_COLUMNS = {
    "chats": {"title", "created", "updated", "model", "system_prompt"},
    "messages": {"chat_id", "role", "content", "reasoning", "stop_reason", "timings"},
}
_ANYBODYS = ("sqlite_", "quarantine", "drafts", "messages_fts")  # left of our file without its two tables
_BELIEVABLE = 1000  # versions ahead of this one; a number beyond was not written by any cpuchat

# What can be made again from the tables at any time. An answer is indexed once it is finished: while it is written
# it is saved over and over.
_INDEXED = "({0}.role <> 'assistant' OR {0}.stop_reason IS NOT NULL)"
_ADD = f"INSERT INTO messages_fts (rowid, content) SELECT new.id, new.content WHERE {_INDEXED.format('new')};"
_REMOVE = (
    "INSERT INTO messages_fts (messages_fts, rowid, content)"
    f" SELECT 'delete', old.id, old.content WHERE {_INDEXED.format('old')};"
)
_INDEXES = {
    "chats_by_time": "CREATE INDEX chats_by_time ON chats (updated)",
    "messages_by_chat": "CREATE INDEX messages_by_chat ON messages (chat_id, parent)",
    "messages_unfinished": (
        "CREATE INDEX messages_unfinished ON messages (id) WHERE role = 'assistant' AND stop_reason IS NULL"
    ),
    "messages_attached": "CREATE INDEX messages_attached ON messages (id) WHERE attachments IS NOT NULL",
    "messages_called": "CREATE INDEX messages_called ON messages (id) WHERE steps IS NOT NULL",
}
_SEARCH = {
    "messages_fts": (
        "CREATE VIRTUAL TABLE messages_fts USING fts5 (content, content='messages', content_rowid='id',"
        " tokenize='unicode61 remove_diacritics 2', prefix='1')"  # all words with a letter need not be merged
    ),
    "fts_insert": f"CREATE TRIGGER fts_insert AFTER INSERT ON messages BEGIN {_ADD} END",
    "fts_delete": f"CREATE TRIGGER fts_delete AFTER DELETE ON messages BEGIN {_REMOVE} END",
    "fts_update": (
        f"CREATE TRIGGER fts_update AFTER UPDATE OF content, stop_reason ON messages BEGIN {_REMOVE} {_ADD} END"
    ),
}


class UnexpectedLayout(sqlite3.DatabaseError):
    """Raised when the tables match no version, or a page of them is damaged."""


def make_tables(db: sqlite3.Connection) -> None:
    """Create the tables in an empty file. Another instance may do the same at the same time.

    Raises:
        ChatsTooNew: the file is ahead of this program.
        ChatsForeign: it is another program's database.
        UnexpectedLayout, sqlite3.Error
    """
    if _version(db) == VERSION and _structure(db) == _expected():
        return
    with transaction(db):
        if not _has_tables(db):  # now that nobody else can change it
            _create_tables(db)
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


def _has_tables(db: sqlite3.Connection) -> bool:
    version, structure = _version(db), _structure(db)
    names = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")}
    names = {name for name in names if not name.startswith(_ANYBODYS)}
    if names and not any(len(columns & column_names(db, table)) > 2 for table, columns in _OUR_COLUMNS.items()):
        raise _foreign(names)
    if VERSION < version <= VERSION + _BELIEVABLE:
        raise ChatsTooNew(
            "The chat database was written by a newer version of cpuchat.", "Update cpuchat; nothing was changed."
        )
    if any(structure) and structure != _expected():
        raise UnexpectedLayout("unknown table layout")
    return any(structure)


def _create_tables(db: sqlite3.Connection) -> None:
    for statement in _CREATE:
        db.execute(statement)


def _structure(db: sqlite3.Connection) -> tuple[object, ...]:
    """Return columns, keys and references of each table; () for a missing one."""
    found: list[object] = []
    for table in TABLES:
        kind = db.execute("SELECT type FROM sqlite_master WHERE name = ? COLLATE NOCASE", (table,)).fetchone()
        unique = [
            [column for (column,) in db.execute("SELECT name FROM pragma_index_info(?)", (name,))]
            for _, name, is_unique, origin, *_ in db.execute(f"PRAGMA index_list({table})")
            if is_unique and origin != "c"
        ]
        columns = _columns(db, table)
        keys = db.execute(f"PRAGMA foreign_key_list({table})").fetchall()
        found.append((kind, columns, sorted(unique), keys) if kind else ())
    return tuple(found)


def column_names(db: sqlite3.Connection, table: str) -> set[str]:
    """Return the columns of `table`; empty when there is no such table."""
    return {str(column[1]) for column in _columns(db, table)}


def _columns(db: sqlite3.Connection, table: str) -> list[tuple[object, ...]]:
    try:
        return db.execute(f"PRAGMA table_xinfo({table})").fetchall()
    except sqlite3.OperationalError:  # a view of something that is not there
        return []


@functools.cache
def _expected() -> tuple[object, ...]:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        _create_tables(db)
        return _structure(db)


def _foreign(names: set[str]) -> ChatsForeign:
    shown = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
    return ChatsForeign(
        f"The chat database belongs to another program (tables: {shown}).",
        "Move the file away, then restart; nothing was changed.",
    )


def make_derived(db: sqlite3.Connection) -> bool:
    """Create missing or altered indexes, drop unknown ones; returns whether this SQLite can have a full-text index."""
    if _derived(db) == {**_INDEXES, **_SEARCH} and _has_its_tables(db):
        try:
            db.execute("SELECT rowid FROM messages_fts LIMIT 0")
        except sqlite3.OperationalError:  # made by another SQLite, one that has FTS5: its triggers would fail here
            drop_triggers(db)
            return False
        return True
    return remake_derived(db)


def remake_derived(db: sqlite3.Connection) -> bool:
    """Recreate the indexes and the full-text index, as `make_derived`."""
    with transaction(db):
        # Another instance may have done it meanwhile, but it may also be damaged in a way that cannot be seen.
        drop_triggers(db)
        mark_interrupted(db)
        _drop(db, "type = 'index' AND tbl_name IN ('chats', 'messages') AND sql IS NOT NULL")
        for statement in _INDEXES.values():
            db.execute(statement)
        try:
            _drop_index(db)
            for statement in _SEARCH.values():
                db.execute(statement)
            db.execute("INSERT INTO messages_fts (messages_fts) VALUES ('rebuild')")
        except sqlite3.OperationalError as error:
            if "fts5" not in str(error):
                raise
            return False
    return True


def _drop_index(db: sqlite3.Connection) -> None:
    try:
        _drop(db, "name = 'messages_fts'")
    except sqlite3.OperationalError as error:
        if "fts5" in str(error):
            raise
        # One without its own tables cannot be dropped as it should be.
        db.execute("PRAGMA writable_schema = ON")
        db.execute("DELETE FROM sqlite_master WHERE name = 'messages_fts'")
        db.execute("PRAGMA writable_schema = RESET")
        _drop(db, "type = 'table' AND name LIKE 'messages\\_fts\\_%' ESCAPE '\\'")


def mark_interrupted(db: sqlite3.Connection) -> None:
    """Mark unfinished answers as interrupted. One that another instance is writing is corrected by its last save."""
    unfinished = "role = 'assistant' AND stop_reason IS NULL"
    if db.execute(f"SELECT EXISTS (SELECT 1 FROM messages WHERE {unfinished})").fetchone()[0]:
        db.execute(f"UPDATE messages SET stop_reason = ? WHERE {unfinished}", (INTERRUPTED,))


def drop_triggers(db: sqlite3.Connection) -> None:
    _drop(db, "type = 'trigger'")


def _drop(db: sqlite3.Connection, where: str) -> None:
    for kind, name in db.execute(f"SELECT type, name FROM sqlite_master WHERE {where}").fetchall():
        quoted = name.replace('"', '""')
        db.execute(f'DROP {kind} "{quoted}"')


def _has_its_tables(db: sqlite3.Connection) -> bool:
    names = [f"messages_fts_{part}" for part in ("config", "data", "docsize", "idx")]
    query = "SELECT count(*) FROM sqlite_master WHERE name IN (?, ?, ?, ?)"
    return db.execute(query, names).fetchone()[0] == len(names)


def _derived(db: sqlite3.Connection) -> dict[str, str]:
    return dict(
        db.execute(
            "SELECT name, sql FROM sqlite_master WHERE name = 'messages_fts' OR type = 'trigger' OR"
            " type = 'index' AND tbl_name IN ('chats', 'messages') AND sql IS NOT NULL"
        )
    )


def _version(db: sqlite3.Connection) -> int:
    return db.execute("PRAGMA user_version").fetchone()[0]
