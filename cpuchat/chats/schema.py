"""The tables of the chats, and how an older file becomes a current one.

`PRAGMA user_version` counts the steps of `UPGRADES` that a file has gone through. A step is never changed once it
has been released; a new one is added.
"""

from __future__ import annotations

import sqlite3

from cpuchat.errors import ChatsTooNew

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
        "CREATE INDEX chats_by_time ON chats (updated)",
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
        "CREATE INDEX messages_unfinished ON messages (id) WHERE role = 'assistant' AND stop_reason IS NULL",
    ),
)

_SEARCH = (
    """
    CREATE VIRTUAL TABLE IF NOT EXISTS found USING fts5 (
        content, content='messages', content_rowid='id', tokenize='unicode61 remove_diacritics 2'
    )
    """,
    """
    CREATE TRIGGER IF NOT EXISTS found_insert AFTER INSERT ON messages BEGIN
        INSERT INTO found (rowid, content) VALUES (new.id, new.content);
    END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS found_delete AFTER DELETE ON messages BEGIN
        INSERT INTO found (found, rowid, content) VALUES ('delete', old.id, old.content);
    END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS found_update AFTER UPDATE OF content ON messages BEGIN
        INSERT INTO found (found, rowid, content) VALUES ('delete', old.id, old.content);
        INSERT INTO found (rowid, content) VALUES (new.id, new.content);
    END
    """,
)


def upgrade(db: sqlite3.Connection) -> None:
    """Bring the file to the current version, all or nothing. Another instance may do the same at the same time.

    Raises:
        ChatsTooNew: the file is ahead of this program.
        sqlite3.Error
    """
    if _version(db) == len(UPGRADES):
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        version = _version(db)  # again, now that nobody else can change it
        if version > len(UPGRADES):
            raise ChatsTooNew(
                "Your chats were saved by a newer version of cpuchat.", "Update cpuchat; nothing was changed."
            )
        for step in UPGRADES[version:]:
            for statement in step:
                db.execute(statement)
        db.execute(f"PRAGMA user_version = {len(UPGRADES)}")
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise


def make_searchable(db: sqlite3.Connection) -> bool:
    """Add the full-text index if this SQLite can; False when it cannot."""
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'found'").fetchone():
        try:
            db.execute("SELECT rowid FROM found LIMIT 0")
        except sqlite3.OperationalError:  # made by another SQLite, one that has FTS5: its triggers would fail here
            for name in ("found_insert", "found_delete", "found_update"):
                db.execute(f"DROP TRIGGER IF EXISTS {name}")
            return False
    try:
        db.execute("BEGIN IMMEDIATE")
        triggers = db.execute(
            "SELECT count(*) FROM sqlite_master WHERE name LIKE 'found\\_%' ESCAPE '\\' AND type = 'trigger'"
        )
        complete = triggers.fetchone()[0] == 3
        if not complete:
            for statement in _SEARCH:
                db.execute(statement)
            db.execute("INSERT INTO found (found) VALUES ('rebuild')")
        db.execute("COMMIT")
    except sqlite3.OperationalError as error:
        db.execute("ROLLBACK")
        if "fts5" not in str(error):
            raise
        return False
    return True


def _version(db: sqlite3.Connection) -> int:
    return db.execute("PRAGMA user_version").fetchone()[0]
