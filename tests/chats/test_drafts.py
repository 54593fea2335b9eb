"""Tests what is kept of unsent texts: by chat and by window, in parts, whatever ends the program."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cpuchat.chats import drafts
from cpuchat.chats.drafts import DraftSaver
from cpuchat.chats.store import ChatStore

MARK = "[Pasted text 1: 50 lines]"


@pytest.fixture
def store(tmp_path: Path) -> ChatStore:
    return ChatStore(tmp_path / "chats.db")


def test_drafts_of_this_window_are_taken_again_by_chat(store: ChatStore) -> None:
    chat = store.create_chat("model")
    saver = DraftSaver(store)
    saver.put(None, "a new one", {})
    saver.put(chat.id, f"see {MARK}", {MARK: "pasted", "[Pasted text 2: 1 line]": "not in the text any more"})
    saver.save()
    assert DraftSaver(store).take() == {None: ("a new one", {}), chat.id: (f"see {MARK}", {MARK: "pasted"})}
    saver.put(None, "", {})
    saver.save()
    assert DraftSaver(store).take() == {chat.id: (f"see {MARK}", {MARK: "pasted"})}


def test_a_change_is_saved_soon_without_being_asked_for(store: ChatStore, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = threading.Event()
    write = store.save_drafts
    monkeypatch.setattr(store, "save_drafts", lambda *given: (write(*given), saved.set()))
    assert drafts.PAUSE_SECONDS < 0.5
    DraftSaver(store).put(None, "typed", {})
    assert saved.wait(60) and DraftSaver(store).take() == {None: ("typed", {})}


def window(store: ChatStore, text: str) -> subprocess.Popen[str]:
    """Start another process that has a draft of the new chat, and keeps running."""
    code = (
        "import sys, pathlib\nfrom cpuchat.chats.drafts import DraftSaver\nfrom cpuchat.chats.store import ChatStore\n"
        f"saver = DraftSaver(ChatStore(pathlib.Path({str(store.path)!r})))\nsaver.put(None, {text!r}, {{}})\n"
        "saver.save()\nprint('saved', flush=True)\nsys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "saved\n"
    return process


def test_windows_keep_their_own_drafts_until_they_end(store: ChatStore) -> None:
    first, second = window(store, "of the first"), window(store, "of the second")
    saver = DraftSaver(store)
    assert saver.take() == {}
    os.kill(first.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the list of processes
    assert saver.take() == {None: ("of the first", {})}
    saver.save()
    second.communicate()
    ((text, _),) = DraftSaver(store).take().values()
    assert sorted(text.splitlines()) == ["of the first", "of the second"]
    first.communicate()


def test_a_draft_is_deleted_and_put_back_with_its_chat_and_leaves_nothing_in_the_file(store: ChatStore) -> None:
    chat = store.create_chat("model")
    saver = DraftSaver(store)
    saver.put(chat.id, "a private thought", {})
    saver.save()
    store.undelete(store.delete(chat.id))
    assert DraftSaver(store).take() == {chat.id: ("a private thought", {})}
    store.delete(chat.id)
    saver.put(chat.id, "too late", {})
    saver.save()
    assert DraftSaver(store).take() == {}
    assert not any(b"private" in file.read_bytes() for file in store.path.parent.glob("chats.db*"))


def test_what_could_not_be_saved_is_saved_with_the_next_change(store: ChatStore) -> None:
    chat, saver = store.create_chat("model"), DraftSaver(store)
    with contextlib.closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("ALTER TABLE drafts RENAME TO away")
        saver.put(chat.id, "while there was no place", {})
        saver.save()
        assert saver.problem is not None
        other.execute("ALTER TABLE away RENAME TO drafts")
    saver.put(None, "later", {})
    saver.save()
    assert DraftSaver(store).take() == {None: ("later", {}), chat.id: ("while there was no place", {})}


@pytest.mark.parametrize("row", [(None, "x:y", "0", "text"), (None, None, None, None), ("gone", 1, b"\xff", 2.5)])
def test_rows_that_nobody_wrote_do_no_harm(store: ChatStore, row: tuple[object, ...]) -> None:
    with sqlite3.connect(store.path) as other:  # which does not check keys of other tables
        other.execute("INSERT INTO drafts VALUES (?, ?, ?, ?)", row)
    assert DraftSaver(store).take() == ({None: ("text", {})} if row[1] == "x:y" else {})
    ChatStore(store.path).close()
