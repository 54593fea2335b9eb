"""Tests files of chats that are damaged, strange, or not ours: nothing locks the user out, nothing sound is lost."""

from __future__ import annotations

import contextlib
import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cpuchat.base.errors import ChatsError, ChatsForeign, ChatsTooNew
from cpuchat.chats import schema
from cpuchat.chats.store import ChatStore

SECRET = "Wolpertinger"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a database with two chats of two messages each."""
    path = tmp_path / "chats.db"
    with closing(ChatStore(path)) as store:
        for title in ("First", "Second"):
            chat = store.create_chat("m", "Be brief.", title=title)
            store.add_message(chat.id, "user", f"Question about {title}")
            store.add_message(chat.id, "assistant", f"Answer about {title}", stop_reason="end")
    return path


def change(path: Path, *statements: str) -> None:
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA foreign_keys = OFF")
    db.execute("PRAGMA secure_delete = OFF")
    db.execute("PRAGMA ignore_check_constraints = ON")
    for statement in statements:
        db.execute(statement)
    db.close()


def texts(store: ChatStore) -> list[str]:
    """Return all messages; calls every other read method of the store."""
    assert all(-1 < chat.updated < 1e12 for chat in store.chats())
    store.search("about")
    return sorted(m.content for chat in store.chats() for m in store.messages(chat.id))


QUESTIONS = ["Question about First", "Question about Second"]
ALL = ["Answer about First", "Answer about Second", *QUESTIONS]
FIRST = "WHERE id = (SELECT id FROM chats WHERE title = 'First')"


@pytest.mark.parametrize(
    ("statement", "left"),
    [
        (f"UPDATE chats SET updated = 9e999 {FIRST}", ALL),
        (f"UPDATE chats SET created = -5, updated = 'soon' {FIRST}", ALL),
        (f"UPDATE chats SET title = x'00ff1b5d' {FIRST}", ALL),
        (f"UPDATE chats SET title = CAST(x'41ff42' AS TEXT) {FIRST}", ALL),
        (f"UPDATE chats SET version = 'x', model = 7, system_prompt = x'', leaf = 'x' {FIRST}", ALL),
        ("UPDATE messages SET timings = CAST(x'ff' AS TEXT), stop_reason = CAST(x'ff' AS TEXT)", ALL),
        ("UPDATE messages SET parent = 'x' || id, created = 'x', model = x'ff', stop_reason = x'ff'", ALL),
        ("UPDATE messages SET parent = 1e300 WHERE role = 'assistant' AND content LIKE '%First'", ALL),
        ("UPDATE messages SET parent = -7, settings = x'ff'", ALL),
        ("UPDATE messages SET content = x'ff41', reasoning = 5 WHERE role = 'assistant'", ["\ufffdA"] * 2 + QUESTIONS),
        ("UPDATE messages SET content = CAST(x'ff41' AS TEXT) WHERE role = 'assistant'", ["\ufffdA"] * 2 + QUESTIONS),
    ],
)
def test_values_that_make_no_sense_are_replaced_as_they_are_read(path, statement, left):
    before = sqlite3.connect(path).execute("SELECT content FROM messages ORDER BY id").fetchall()
    change(path, statement)
    with closing(ChatStore(path)) as store:
        assert texts(store) == sorted(left)
        for chat in store.chats():
            order = [m.content for m in store.messages(chat.id)]
            assert order == [content for (content,) in before if content in order] or "\ufffd" in str(order)
            more = store.add_message(chat.id, "user", "more").id
            store.delete_branch(store.chat(chat.id), more)
        assert texts(store) == sorted(left) and store.take_notices() == []


@pytest.mark.parametrize(
    "timings", ["[oops", "[" * 100_000, '{"predicted_n": 1e400}', "{}" * 9, '{"ttft_ms": 1e300}', b"\xff"]
)
def test_figures_that_make_no_sense_are_left_out(path, timings):
    db = sqlite3.connect(path)
    db.execute("UPDATE messages SET timings = ?", (timings,))
    db.commit()
    db.close()
    with closing(ChatStore(path)) as store:
        assert {m.timings for chat in store.chats() for m in store.messages(chat.id)} == {None}
        assert store.take_notices() == []


@pytest.mark.parametrize(
    "statements",
    [
        ["DROP INDEX chats_by_time"],
        ["CREATE TRIGGER bad AFTER INSERT ON messages BEGIN DELETE FROM messages; END"],
        ["CREATE UNIQUE INDEX bad ON messages (role, model, created)"],
        ["PRAGMA user_version = 0"],
        ["PRAGMA user_version = -3"],
        ["PRAGMA user_version = 99999"],
        ["CREATE TABLE theirs (x)"],
    ],
)  # fmt: skip
def test_what_can_be_made_again_is(path, statements):
    change(path, *statements)
    with closing(ChatStore(path)) as store:
        assert texts(store) == ALL
        chat = store.create_chat("m")
        store.add_message(chat.id, "user", SECRET)
        assert [hit.id for hit in store.search(SECRET[:5])] == [chat.id]
        assert texts(store) == [*ALL, SECRET] and store.take_notices() == []


@pytest.mark.parametrize(
    ("statements", "left"),
    [
        (["DROP TABLE drafts"], ALL),
        ([f"UPDATE chats SET id = NULL {FIRST}"], ALL),
        ([f"UPDATE chats SET id = '../../x' {FIRST}"], ALL),
        ([f"UPDATE chats SET id = CAST(x'41ff' AS TEXT) {FIRST}"], ALL),
        (["DELETE FROM chats"], ALL),
        (["UPDATE messages SET chat_id = CAST(chat_id AS BLOB)"], ALL),
        (["UPDATE messages SET role = 'bot' WHERE role = 'assistant'"], QUESTIONS),
        (["ALTER TABLE chats DROP COLUMN model"], ALL),
        (["ALTER TABLE messages DROP COLUMN reasoning"], ALL),
        (["CREATE TABLE c AS SELECT * FROM chats", "DROP TABLE chats", "ALTER TABLE c RENAME TO chats",
          "INSERT INTO chats SELECT * FROM chats"], ALL),
        (["CREATE TABLE c AS SELECT * FROM messages", "DROP TABLE messages", "ALTER TABLE c RENAME TO messages",
          "UPDATE messages SET id = 1"], ALL),
        (["ALTER TABLE chats RENAME TO c", "CREATE VIEW chats AS SELECT * FROM c"], ALL),
        (["ALTER TABLE messages RENAME TO m", "CREATE VIEW messages AS WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL"
          " SELECT n FROM r) SELECT n AS id, 'a' AS chat_id, n AS position, 'user' AS role, '' AS content FROM r"], []),
        (["DROP TABLE messages"], []),
        (["DROP TABLE chats"], ALL),
        (["DROP TABLE chats", "DROP TABLE messages"], []),
    ],
)  # fmt: skip
def test_from_tables_and_keys_that_are_not_ours_any_more_the_rows_are_taken(path, statements, left):
    change(path, *statements)
    before = path.read_bytes()
    with closing(ChatStore(path)) as store:
        assert texts(store) == sorted(left)
        (notice,) = store.take_notices()
        (aside,) = path.parent.glob("chats.db.damaged-*[0-9]")
        assert str(aside) in notice and ("without 2 messages of an unknown role" in notice) == ("bot" in statements[0])
        assert aside.read_bytes() == before
    with closing(ChatStore(path)) as store:
        assert texts(store) == sorted(left)
        assert store.take_notices() == []


def contradict_index(path: Path) -> None:
    """Change the messages, but not the index of their parents."""
    place = "name = 'messages_by_chat'"
    db = sqlite3.connect(path)
    index = db.execute(f"SELECT * FROM sqlite_master WHERE {place}").fetchone()
    db.close()
    for statements in (
        [(f"DELETE FROM sqlite_master WHERE {place}", ())],
        [("UPDATE messages SET parent = parent + 7, created = 'soon'", ())],
        [("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", index)],
    ):
        db = sqlite3.connect(path, isolation_level=None)
        db.execute("PRAGMA writable_schema = ON")
        for statement, values in statements:
            db.execute(statement, values)
        db.close()


def test_damage_that_only_a_change_meets_is_repaired_by_the_next_start(path):
    """The quick check of a start does not see an index that contradicts its table."""
    contradict_index(path)
    with closing(ChatStore(path)) as store:
        assert texts(store) == ALL
        with pytest.raises(ChatsError, match="damaged") as failed:
            for chat in store.chats():
                store.delete(chat.id)
        assert "Restart" in failed.value.hint
    with closing(ChatStore(path)) as store:
        assert texts(store) == ALL
        assert any("The chat database was damaged" in notice for notice in store.take_notices())
    assert ChatStore(path).take_notices() == []
    assert list(path.parent.glob("*.salvage")) == []


_OTHER_APP = """
import sys
from cpuchat.chats.store import ChatStore
store = ChatStore(__import__("pathlib").Path(sys.argv[1]))
chat = store.chats()[0]
print("open", flush=True)
for line in sys.stdin:
    store.add_message(chat.id, "assistant", line.strip(), stop_reason="end")
    print("saved", flush=True)
"""


@contextlib.contextmanager
def other_app(path: Path) -> Iterator[Callable[[str], None]]:
    """Open the chats in a second process; yields what saves an answer there."""
    command = [sys.executable, "-c", _OTHER_APP, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        requests, replies = other.stdin, other.stdout
        assert replies.readline() == "open\n"

        def answer(text: str) -> None:
            print(text, file=requests, flush=True)
            assert replies.readline() == "saved\n"

        yield answer
        requests.close()


def test_a_value_that_no_database_can_store_is_an_error_and_no_damage(path):
    """Such a value was taken for damage: the next start renamed the sound file, below another app that had it open."""
    with other_app(path) as answer:
        with closing(ChatStore(path)) as store:
            with pytest.raises(ChatsError):
                store.delete("a cut emoji: \ud83d")
            with pytest.raises(ChatsError):
                store.set_options(store.chats()[0].id, {"leaf": 1 << 70})
        with closing(ChatStore(path)) as store:
            answer("Answer of the other app")
            assert texts(store) == sorted([*ALL, "Answer of the other app"])
            assert store.take_notices() == []


def test_no_file_is_repaired_while_another_program_has_it_open(path):
    with other_app(path) as answer:
        path.with_name("chats.db.salvage").touch()  # damage that only reading met
        with closing(ChatStore(path)) as store:
            answer("Answer of the other app")
            assert texts(store) == sorted([*ALL, "Answer of the other app"])
            assert store.take_notices() == []
        change(path, "DROP TABLE drafts")
        with pytest.raises(ChatsError, match="another program has it open") as failed:
            ChatStore(path)
        assert "Close that program" in failed.value.hint
        assert list(path.parent.glob("*.damaged-*")) == []
    with closing(ChatStore(path)) as store:
        assert len(texts(store)) == len(ALL) + 1
        assert any("The chat database was damaged" in notice for notice in store.take_notices())


def test_another_programs_database_is_named_and_left_alone(tmp_path):
    path = tmp_path / "chats.db"
    for statements in (["CREATE TABLE notes (x)"], ["CREATE TABLE messages (id, body)", "PRAGMA user_version = 5"]):
        change(path, *statements)
        before = path.read_bytes()
        with pytest.raises(ChatsForeign, match="belongs to another program"):
            ChatStore(path)
        assert path.read_bytes() == before
        path.unlink()


def test_a_newer_file_with_other_tables_is_left_alone(path):
    change(path, f"PRAGMA user_version = {schema.VERSION + 2}", "ALTER TABLE chats ADD COLUMN color")
    before = path.read_bytes()
    with pytest.raises(ChatsTooNew):
        ChatStore(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("side", ["", "-wal", "-shm"])
def test_what_is_no_file_is_said(tmp_path, side):
    os.mkfifo(tmp_path / f"chats.db{side}")
    with pytest.raises(ChatsError, match="not a regular file"):
        ChatStore(tmp_path / "chats.db")
    ChatStore(tmp_path / "chats.db", or_in_memory=True).close()


def test_on_a_full_disk_what_can_be_read_is_copied_to_memory(path):
    size, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
    try:
        with pytest.raises(ChatsError):
            ChatStore(path)
        with closing(ChatStore(path, or_in_memory=True)) as store:
            assert texts(store) == ALL and "nothing is saved" in store.take_notices()[0] and store.unsaved is not None
            store.add_message(store.create_chat("m").id, "user", "More")
            assert texts(store) == [*ALL[:2], "More", *QUESTIONS]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    with closing(ChatStore(path)) as store:
        assert texts(store) == ALL and store.unsaved is None


def test_a_file_of_another_layout_is_read_in_order_and_set_aside(path):
    change(path, "DROP INDEX messages_by_chat", "ALTER TABLE messages DROP COLUMN parent",
           "ALTER TABLE chats DROP COLUMN own", "PRAGMA user_version = 3")  # fmt: skip
    store = ChatStore(path)
    (notice,) = store.take_notices()
    (aside,) = path.parent.glob("chats.db.earlier-*[0-9]")
    assert "of an earlier version. Kept 2 chats with 4 messages" in notice and str(aside) in notice
    second, first = store.chats()
    for chat, title in ((first, "First"), (second, "Second")):
        assert [one.content for one in store.messages(chat.id)] == [f"Question about {title}", f"Answer about {title}"]
    store.close()


def leftovers(path: Path) -> list[str]:
    """Return the files beside `path`, `path` included, that still contain the secret in one piece, in any case."""
    return [
        file.name for file in path.parent.iterdir() if SECRET[1:].lower() in file.read_bytes().lower().decode("latin-1")
    ]


@pytest.mark.parametrize("how", ["delete", "rename", "branch"])
def test_what_is_deleted_cannot_be_read_in_any_file(path, how):
    with closing(ChatStore(path)) as store:
        chat = store.create_chat("m", title="T")
        if how == "rename":
            store.rename(chat.id, SECRET)
        for number in range(30):
            store.add_message(chat.id, "user", f"filler {number} " * 200)
        text = f"Nobody must read of the {SECRET} again. " * 40 if how != "rename" else "x"
        message = store.add_message(chat.id, "assistant", text, reasoning=text, stop_reason="end")
        other = store.create_chat("m", title="Stays")
        store.add_message(other.id, "user", "What stays")
        assert leftovers(path)
        match how:
            case "delete":
                store.delete(chat.id)
            case "rename":
                store.rename(chat.id, "Another")
            case _:
                store.add_message(chat.id, "assistant", "New.", after=message.parent, stop_reason="end")
                store.delete_branch(store.chat(chat.id), message.id)
        assert leftovers(path) == []
        assert [hit.title for hit in store.search("stays")] == ["Stays"]
    assert leftovers(path) == []


def test_what_is_deleted_beside_a_reader_is_overwritten_when_it_has_gone(path):
    with closing(ChatStore(path)) as store:
        chat = store.create_chat("m", title=SECRET)
        reader = sqlite3.connect(path, isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM chats").fetchall()
        store.delete(chat.id)
        reader.close()
        store.create_chat("m", title="Next")
        assert leftovers(path) == []


def test_unsent_texts_survive_a_salvage(path):
    with closing(ChatStore(path)) as store:
        chat = store.chats()[0]
        store.save_drafts("1:1.0", [(chat.id, "000000000", "of a chat"), (None, "000000000", "of a new one")], set())
    change(path, "UPDATE messages SET chat_id = CAST(chat_id AS BLOB)")
    with closing(ChatStore(path)) as store:
        assert texts(store) == ALL and len(store.take_notices()) == 1
        assert {(id, text) for id, *_, text in store.drafts()} == {(chat.id, "of a chat"), (None, "of a new one")}
