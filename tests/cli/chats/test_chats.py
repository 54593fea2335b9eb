"""Tests `cpuchat chats`."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuchat.base import paths
from cpuchat.chats.records import Chat
from cpuchat.chats.store import ChatStore
from cpuchat.protocol.timings import Timings
from tests.cli.program import refused, run


@contextlib.contextmanager
def stored() -> Iterator[ChatStore]:
    with contextlib.closing(ChatStore(paths.chats_db())) as store:
        yield store


@pytest.fixture
def chats() -> list[Chat]:
    """Two chats, last changed first, the second with a branch beside the open one."""
    with stored() as store:
        first = store.create_chat("Qwen", "Be brief.", title="Band\x1b[1mwidth")
        question = store.add_message(first.id, "user", "Why is decoding slow?")
        store.add_message(first.id, "assistant", "Hm?", stop_reason="cancelled")
        store.add_message(
            first.id, "assistant", "Because of the pangolin.", after=question.id, reasoning="Hm.\nBytes.", model="Qwen",
            stop_reason="end", timings=Timings(predicted_n=3, predicted_ms=100.0, ttft_ms=210.0),
        )  # fmt: skip
        second = store.create_chat("m", title="Second")
        store.add_message(second.id, "user", "x")
        return [store.chat(second.id), store.chat(first.id)]


def test_list(chats: list[Chat]) -> None:
    done = run("chats", "list")
    heading, *rows = done.stdout.splitlines()
    assert heading.split() == ["ID", "UPDATED", "MESSAGES", "MODEL", "TITLE"]
    assert [row.split()[0] for row in rows] == [chat.id[:8] for chat in chats]
    assert "\x1b" not in done.stdout and "  3  Qwen" in rows[1]
    assert run("chats", "list", "the", "pangolin").stdout.splitlines()[1:] == rows[1:]
    listed = json.loads(run("chats", "list", "--json").stdout)
    assert [(one["id"], one["title"], one["messages"]) for one in listed] == [
        (chat.id, chat.title, count) for chat, count in zip(chats, (1, 3), strict=True)
    ]


def test_markdown(chats: list[Chat], tmp_path: Path) -> None:
    file = tmp_path / "chat.md"
    run("chats", "export", chats[1].id[:6], "-o", str(file))
    title, facts, *rest = file.read_text().split("\n\n")
    assert title.startswith("# Band") and "\x1b" not in title
    assert facts.startswith("*Qwen · ") and facts.endswith(" · 2 messages*")
    assert rest == [
        "## System prompt", "Be brief.", "## You", "Why is decoding slow?", "## Qwen (2 of 2)", "> Hm.\n> Bytes.",
        "Because of the pangolin.", "*3 tokens · 20.0 tok/s · first token 0.21 s*\n",
    ]  # fmt: skip
    document = json.loads(run("chats", "export", chats[1].id).stdout)
    assert [one["content"] for one in document["chats"][0]["messages"]] == [
        "Why is decoding slow?", "Hm?", "Because of the pangolin.",
    ]  # fmt: skip


def test_a_database_that_cannot_be_read_is_not_exported_as_an_empty_one() -> None:
    paths.chats_db().mkdir(parents=True)
    assert "not a regular file" in refused(11, "chats", "export")


def test_an_unknown_or_ambiguous_id(chats: list[Chat]) -> None:
    assert "No chats have ids that begin with 'nowhere'" in refused(3, "chats", "export", "nowhere")
    with contextlib.closing(sqlite3.connect(paths.chats_db())) as db, db:
        for table, key in (("chats", "id"), ("messages", "chat_id")):
            db.execute(f"UPDATE {table} SET {key} = 'aa' || {key}")
    assert "2 chats have ids that begin with 'aa'" in refused(3, "chats", "export", "aa")


def test_everything_is_exported_and_comes_back(chats: list[Chat], tmp_path: Path) -> None:
    file = tmp_path / "chats.json"
    done = run("chats", "export", "-o", str(file))
    assert done.stdout == f"Exported 2 chats to {file}.\n" and file.stat().st_mode & 0o777 == 0o600
    assert json.loads(run("chats", "export").stdout) == json.loads(file.read_text())
    with stored() as store:
        for chat in chats:
            store.delete(chat.id)
    done = run("chats", "import", str(file))
    assert (done.returncode, done.stdout) == (0, "2 chats added.\n")
    assert json.loads(run("chats", "export").stdout) == json.loads(file.read_text())
    assert run("chats", "import", str(file)).stdout == "0 chats added, 2 already here.\n"


def test_markdown_files_and_what_cannot_be_written_or_read(chats: list[Chat], tmp_path: Path) -> None:
    file = tmp_path / "chat.md"
    run("chats", "export", "-o", str(file))
    assert file.read_text().splitlines()[0] == "# Second" and "\n# Band" in file.read_text()
    for kept, why in ((file, "exists"), (tmp_path / "none" / "x.md", "no folder")):
        assert why in refused(2, "chats", "export", chats[1].id, "-o", str(kept))
    assert sorted(tmp_path.glob("*.md")) == [file] and file.read_text().startswith("# Second")
    run("chats", "export", chats[1].id, "-o", str(file), "--force")
    assert file.read_text().startswith("# Band")
    assert "Not an export of cpuchat" in refused(2, "chats", "import", str(Path(__file__)))
    assert run("chats", "import", str(tmp_path / "nowhere.json")).returncode == 2
