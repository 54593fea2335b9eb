from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from cpuchat.chats.history import token_counts
from cpuchat.chats.store import ChatStore
from cpuchat.protocol.timings import Timings


def test_the_tokens_of_all_answers_are_counted_while_the_store_is_open(tmp_path: Path) -> None:
    file = tmp_path / "chats ü?.db"
    assert token_counts(file) == (0, 0) and not file.exists()
    store = ChatStore(file)
    for _ in range(2):
        chat = store.create_chat("m")
        store.add_message(chat.id, "user", "hello")
        store.add_message(chat.id, "assistant", "hi", timings=Timings(prompt_n=10, predicted_n=5))
        store.add_message(chat.id, "assistant", "stopped")
    assert token_counts(file) == (20, 10)
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("UPDATE messages SET timings = '{' WHERE id = 2")
    assert token_counts(file) == (10, 5)
    store.close()
    file.write_bytes(b"no database" * 100)
    assert token_counts(file) == (0, 0)
