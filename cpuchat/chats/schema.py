"""The schema of the chat database and its upgrades.

`PRAGMA user_version` counts the steps of `UPGRADES` that a file has gone through. A step is never changed once it
has been released; a new one is added. The tables themselves decide: a number that contradicts them is put right.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Iterator
from itertools import chain

from cpuchat.base.errors import ChatsForeign, ChatsTooNew
from cpuchat.chats.records import INTERRUPTED

UPGRADES: tuple[tuple[str, ...], ...] = (
    (
        """
        CREATE TABLE chats (
            id TEXT PRIMARY KEY,
            title TEXT NOT NULL DEFAULT '',
            created REAL NOT NULL,
            updated REAL NOT NULL,
            model TEXT NOT NULL DEFAULT '',
            system_prompt TEXT NOT NULL DEFAULT ''
        )
        """,
        """
        CREATE TABLE messages (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            chat_id TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
            position INTEGER NOT NULL,
            role TEXT NOT NULL CHECK (role IN ('system', 'user', 'assistant')),
            content TEXT NOT NULL DEFAULT '',
            reasoning TEXT NOT NULL DEFAULT '',
            model TEXT NOT NULL DEFAULT '',
            stop_reason TEXT,
            timings TEXT,
            created REAL NOT NULL,
            UNIQUE (chat_id, position)
        )
        """,
    ),
    (
        "ALTER TABLE chats ADD COLUMN version INTEGER NOT NULL DEFAULT 0",
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
    ),
    # The two sides of a comparison, as JSON (compare.kept); '' for a chat.
    ("ALTER TABLE chats ADD COLUMN sides TEXT NOT NULL DEFAULT ''",),
    # Branches (`tree.Tree`): messages in a line, ordered by their position, become a tree with one branch. And the
    # settings of an answer (`records.AnswerSettings`), as JSON.
    (
        "ALTER TABLE chats ADD COLUMN leaf INTEGER",
        """
        CREATE TABLE tree (
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
            created REAL NOT NULL
        )
        """,
        """
        INSERT INTO tree (id, chat_id, parent, role, content, reasoning, model, stop_reason, timings, created)
        SELECT id, chat_id, coalesce(lag(id) OVER (PARTITION BY chat_id ORDER BY position), 0), role, content,
            reasoning, model, stop_reason, timings, created FROM messages ORDER BY id
        """,
        "DROP TABLE messages",
        "ALTER TABLE tree RENAME TO messages",
    ),
    # What to do when the chat no longer fits into the context: 'drop', 'compact' or 'stop'; '' is to ask.
    ("ALTER TABLE chats ADD COLUMN when_full TEXT NOT NULL DEFAULT ''",),
    # The preset of the chat (`presets.Preset`) as it was when it was chosen, as JSON.
    ("ALTER TABLE chats ADD COLUMN preset TEXT",),
    # Texts sent with a message (`records.Attachment`), as JSON.
    ("ALTER TABLE messages ADD COLUMN attachments TEXT",),
    # Whether the chat's model reasons ('on', 'off'; '' is as set elsewhere), and for how many tokens (NULL: as set).
    (
        "ALTER TABLE chats ADD COLUMN reasoning TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE chats ADD COLUMN reasoning_budget INTEGER",
    ),
    # 1: listed before all others.
    ("ALTER TABLE chats ADD COLUMN pinned INTEGER NOT NULL DEFAULT 0",),
    # Calls of tools on the way to an answer (`tool_calls.ToolStep`), as JSON.
    ("ALTER TABLE messages ADD COLUMN steps TEXT",),
    # When the tokens of a compared answer came, and what the other side predicts (`runner.KeptTokens`), as JSON.
    ("ALTER TABLE messages ADD COLUMN recording TEXT",),
    # Unsent texts (`drafts.DraftSaver`) of a chat, NULL for a new one, in parts, by the window that they belong to.
    (
        """
        CREATE TABLE drafts (
            chat_id TEXT REFERENCES chats (id) ON DELETE CASCADE, window TEXT, name TEXT, text TEXT
        )
        """,
    ),
)
TABLES = ("chats", "messages", "quarantine", "drafts")
_OUR_COLUMNS = {
    "chats": {"title", "created", "updated", "model", "system_prompt"},
    "messages": {"chat_id", "role", "content", "reasoning", "stop_reason", "timings"},
}
_ANYBODYS = ("sqlite_", "quarantine", "drafts", "messages_fts", "found")  # left of our file without its two tables
_BELIEVABLE = 1000  # versions ahead of ours; a number beyond was not written by any cpuchat

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


def upgrade(db: sqlite3.Connection) -> bool:
    """Upgrade the tables to the current version, all or nothing. Another instance may do the same at the same time.

    Returns whether it was of an older version.

    Raises:
        ChatsTooNew: the file is ahead of this program.
        ChatsForeign: it is another program's database.
        UnexpectedLayout, sqlite3.Error
    """
    if _version(db) == len(UPGRADES) and _structure(db) == _expected(len(UPGRADES)):
        return False
    try:
        with transaction(db):
            step = _step(db)  # now that nobody else can change it
            for statement in chain(*UPGRADES[step:]):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {len(UPGRADES)}")
    except sqlite3.IntegrityError as error:  # rows that the newer tables do not take
        raise UnexpectedLayout(str(error)) from None
    return 0 < step < len(UPGRADES)


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


def _step(db: sqlite3.Connection) -> int:
    version, structure = _version(db), _structure(db)
    names = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")}
    names = {name for name in names if not name.startswith(_ANYBODYS)}
    if names and not any(len(columns & column_names(db, table)) > 2 for table, columns in _OUR_COLUMNS.items()):
        raise _foreign(names)
    if len(UPGRADES) < version <= len(UPGRADES) + _BELIEVABLE:
        raise ChatsTooNew(
            "The chat database was written by a newer version of cpuchat.", "Update cpuchat; nothing was changed."
        )
    for step in range(len(UPGRADES) + 1):
        if structure == _expected(step):
            return step
    raise UnexpectedLayout("unknown table layout")


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
def _expected(step: int) -> tuple[object, ...]:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        for statement in chain(*UPGRADES[:step]):
            db.execute(statement)
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
        _drop(db, "name IN ('messages_fts', 'found')")
    except sqlite3.OperationalError as error:
        if "fts5" in str(error):
            raise
        # One without its own tables cannot be dropped as it should be.
        db.execute("PRAGMA writable_schema = ON")
        db.execute("DELETE FROM sqlite_master WHERE name IN ('messages_fts', 'found')")
        db.execute("PRAGMA writable_schema = RESET")
        _drop(
            db, "type = 'table' AND (name LIKE 'messages\\_fts\\_%' ESCAPE '\\' OR name LIKE 'found\\_%' ESCAPE '\\')"
        )


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
