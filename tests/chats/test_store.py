from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing

import pytest

from cpuchat.base.errors import ChatsError
from cpuchat.chats.records import Attachment
from cpuchat.chats.store import ChatStore, Matcher
from cpuchat.protocol.messages import ToolCall, ToolResult, ToolStep
from cpuchat.protocol.timings import Timings


@pytest.fixture
def path(tmp_path):
    return tmp_path / "data" / "chats.db"


@pytest.fixture
def store(path):
    store = ChatStore(path)
    yield store
    store.close()


def titles(store: ChatStore) -> list[str]:
    return [chat.title for chat in store.chats()]


def test_a_chat_and_its_messages_come_back(path):
    store = ChatStore(path)
    chat = store.create_chat("Qwen", "Be brief.", title="Hello")
    timings = Timings(predicted_n=7, ttft_ms=12.5)
    mine = store.add_message(chat.id, "user", "Hi 🙂\x00<b>")
    answer = store.add_message(chat.id, "assistant", "", model="Qwen")
    assert (answer.stop_reason, answer.timings, answer.parent) == (None, None, mine.id)
    store.update_message(answer.id, content="Hel", reasoning="hm")
    store.update_message(answer.id, content="Hello", stop_reason="end", timings=timings)
    store.close()
    store.close()

    with closing(ChatStore(path)) as again:
        assert again.chat(chat.id) == again.chats()[0]
        assert (chat.title, chat.model, chat.system_prompt) == ("Hello", "Qwen", "Be brief.")
        first, second = again.messages(chat.id)
        assert first == mine
        assert (second.content, second.reasoning, second.stop_reason) == ("Hello", "hm", "end")
        assert (second.timings, second.model) == (timings, "Qwen")


def test_chats_are_listed_by_their_last_change(store):
    a, b, c = (store.create_chat("m", title=title) for title in "abc")
    assert titles(store) == ["c", "b", "a"]
    store.add_message(a.id, "user", "x")
    assert titles(store) == ["a", "c", "b"]
    store.rename(b.id, "B")
    assert titles(store) == ["a", "c", "B"]
    store.delete(c.id)
    assert titles(store) == ["a", "B"]


def test_deleting(store):
    chat, other = store.create_chat("m"), store.create_chat("m")
    for text in ("one", "two", "three"):
        store.add_message(chat.id, "user", text)
    store.add_message(other.id, "user", "one")
    version = store.chat(chat.id).version
    first, second, _ = store.messages(chat.id)
    store.delete_branch(store.chat(chat.id), second.id)
    assert [m.content for m in store.messages(chat.id)] == ["one"]
    assert store.chat(chat.id).version > version
    assert store.add_message(chat.id, "user", "new").parent == first.id
    store.delete(chat.id)
    assert store.messages(chat.id) == []
    assert [found.id for found in store.search("one")] == [other.id]


def test_a_chat_that_another_instance_deleted(store, path):
    chat = store.create_chat("m")
    message = store.add_message(chat.id, "user", "x")
    with closing(ChatStore(path)) as other:
        other.delete(chat.id)
    for call in (
        lambda: store.chat(chat.id),
        lambda: store.rename(chat.id, "x"),
        lambda: store.add_message(chat.id, "user", "y"),
        lambda: store.delete_branch(chat, message.id),
        lambda: store.fork(chat.id, message.id),
    ):
        with pytest.raises(ChatsError, match="no longer exists"):
            call()
    store.update_message(message.id, content="y")
    store.delete(chat.id)
    assert store.messages(chat.id) == []


def test_search(store):
    a = store.create_chat("m", title="Cooking")
    b = store.create_chat("m", title="Vectors")
    store.add_message(a.id, "user", "How long do I cook quinoa?\nAnd rice?")
    store.add_message(a.id, "assistant", "Quinoa takes fifteen minutes.", stop_reason="end")
    message = store.add_message(b.id, "user", 'std::vector<int> or 漢字テスト, 100% "sure"')
    (found,) = store.search("quinoa")
    assert (found.id, [one.text for one in found.excerpts]) == (
        a.id, ["How long do I cook quinoa? And rice?", "Quinoa takes fifteen minutes."]
    )  # fmt: skip
    assert [one.text[slice(*one.marks[0])] for one in found.excerpts] == ["quinoa", "Quinoa"]
    assert [f.title for f in store.search("QUIN")] == ["Cooking"]
    assert [f.title for f in store.search("fifteen quinoa")] == ["Cooking"]
    assert [f.title for f in store.search("cooki")] == ["Cooking"]  # the title
    assert [f.title for f in store.search("字テ")] == ["Vectors"]  # no spaces between the words
    assert [f.title for f in store.search("00%")] == ["Vectors"]
    assert store.search("nowhere") == store.search("  ") == []
    for text in (*'"*(^', "\0", "\ud800", "a:b", "'; DROP TABLE chats", "-x", "a" * 100_000, "%a " * 50_000):
        store.search(text)
    store.update_message(message.id, content="something else")
    assert store.search("漢字") == []
    assert [f.title for f in store.search("something")] == ["Vectors"]


def test_search_finds_what_is_attached(store):
    chat = store.create_chat("m", title="Pasted")
    attached = (Attachment(mark="", title="t.py", text='one "two"\nthree 漢字'),)
    message = store.add_message(chat.id, "user", "See this", attachments=attached)
    for words in ('"two"', "hree 漢", "THREE"):
        (hit,) = store.search(words)
        assert [(one.message_id, one.text) for one in hit.excerpts] == [(message.id, "See this")]
    (hit,) = store.search("see")
    assert len(hit.excerpts) == 1
    assert store.search("title") == store.search("t.py") == []  # the names of the fields, and of the file
    call = ToolCall(name="look", arguments={"at": "elsewhere"})
    step = ToolStep(said="Let me see.", calls=(call,), results=(ToolResult(text="four 100 %"),))
    answer = store.add_message(chat.id, "assistant", "Done.", steps=(step,))
    for words in ("our 100 %", "LET ME"):
        (hit,) = store.search(words)
        assert [(one.message_id, one.text) for one in hit.excerpts] == [(answer.id, "Done.")]
    assert store.search("elsewhere") == store.search("results") == []
    with sqlite3.connect(store.path) as other:
        other.execute("UPDATE messages SET attachments = '[damaged', steps = '[damaged'")
    assert store.search("three") == store.search("four") == []


def test_an_answer_that_was_being_written_is_marked_when_the_app_comes_back(path):
    code = (
        "import os, sys; from pathlib import Path; from cpuchat.chats.store import ChatStore\n"
        "store = ChatStore(Path(sys.argv[1])); chat = store.create_chat('m')\n"
        "store.add_message(chat.id, 'user', 'q'); answer = store.add_message(chat.id, 'assistant', '')\n"
        "store.update_message(answer.id, content='half an ans')\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    with closing(ChatStore(path)) as store:
        question, answer = store.messages(store.chats()[0].id)
        assert (question.stop_reason, answer.content, answer.stop_reason) == (None, "half an ans", "interrupted")


def test_a_second_instance_does_not_spoil_the_answer_of_the_first(store, path):
    chat = store.create_chat("m")
    answer = store.add_message(chat.id, "assistant", "ha")
    ChatStore(path).close()
    store.update_message(answer.id, content="half")
    store.update_message(answer.id, stop_reason="end")
    assert store.messages(chat.id)[0].stop_reason == "end"


@pytest.mark.slow
def test_many_instances_start_and_write_at_once(path):
    code = (
        "import sys; from pathlib import Path; from cpuchat.chats.store import ChatStore\n"
        "store = ChatStore(Path(sys.argv[1])); sys.stdin.readline()\n"
        "chat = store.create_chat('m')\n"
        "for i in range(15): store.add_message(chat.id, 'user', f'word{i}')\n"
        "store.close()"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for child in children:
        child.stdin.write(b"\n")
        child.stdin.flush()
    errors = [child.communicate(timeout=180)[1].decode() for child in children]
    assert [child.returncode for child in children] == [0] * 3, errors
    with closing(ChatStore(path)) as store:
        assert len(store.chats()) == 3
        words = [f"word{i}" for i in range(15)]
        assert all([m.content for m in store.messages(c.id)] == words for c in store.chats())


def test_only_the_owner_can_read(store, path):
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}


def fill(path) -> None:
    with closing(ChatStore(path)) as store, store.transaction():
        chat = store.create_chat("m")
        for i in range(200):
            store.add_message(chat.id, "user", f"message {i} " * 50)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "least"), [("not a database", 0), ("cut short", 20), ("page overwritten", 100), ("empty page", 0)]
)
def test_a_damaged_file_is_put_aside_and_what_can_be_read_is_kept(path, how, least):
    fill(path)
    content = bytearray(path.read_bytes())
    if how == "not a database":
        content[:] = b"hello world, this is text" * 100
    elif how == "cut short":
        del content[len(content) // 2 :]
    elif how == "page overwritten":
        content[40960 : 40960 + 12288] = os.urandom(12288)
    else:
        content[4096:8192] = bytes(4096)
    path.write_bytes(content)
    with closing(ChatStore(path)) as store:
        (notice,) = store.take_notices()
        assert "damaged" in notice
        assert store.take_notices() == []
        (aside,) = path.parent.glob("chats.db.damaged-*[0-9]")
        assert str(aside) in notice
        assert aside.read_bytes() == content
        kept = [m for chat in store.chats() for m in store.messages(chat.id)]
        assert len(kept) >= least
        assert all(m.content.startswith("message ") for m in kept)
        chat = store.create_chat("m")
        store.add_message(chat.id, "user", "after it")
        assert [hit.id for hit in store.search("after")] == [chat.id]
    with closing(ChatStore(path)) as store:
        assert store.take_notices() == []
        assert sorted(p.name for p in path.parent.iterdir() if "damaged" not in p.name)[0] == "chats.db"


def test_a_place_that_cannot_be_used_says_so(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ChatsError, match="Cannot use") as refused:
        ChatStore(tmp_path / "file" / "chats.db")
    assert "Errno" not in str(refused.value) and "CPUCHAT_DATA_DIR" in refused.value.hint
    with pytest.raises(ChatsError, match="Cannot use"):
        ChatStore(tmp_path)


def test_the_first_letter_of_a_word_finds_what_is_stored_now(store):
    first, second = store.create_chat("m"), store.create_chat("m")
    changed = store.add_message(first.id, "assistant", "Ürümqi")
    store.add_message(second.id, "user", "about umbrellas")
    store.add_message(second.id, "user", "a plum")
    assert [hit.id for hit in store.search("u")] == [second.id, first.id]
    store.update_message(changed.id, content="elsewhere")
    (hit,) = store.search("ü")
    assert [one.text for one in hit.excerpts] == ["about umbrellas"]


def test_a_word_of_many_messages_finds_the_chats_with_the_newest(store):
    with store.transaction():
        for number in range(12):
            chat = store.create_chat("m", title=f"Chat {number}")
            for _ in range(5):
                store.add_message(chat.id, "user", f"the same word, {number}")
    hits = store.search("word", limit=10)
    assert [hit.title for hit in hits] == [f"Chat {number}" for number in range(11, 1, -1)]
    assert all(len(hit.excerpts) == 3 for hit in hits)
    (hit,) = store.search("word 0")
    assert hit.excerpts[0].message_id == store.messages(store.chats()[-1].id)[0].id


@pytest.mark.parametrize(
    ("text", "wanted", "found"),
    [("나무 너무 나무", "너무", ["너무"]), ("か が", "が", ["が"]), ("Café CAFE", "cafe", ["Café", "CAFE"])],
)
def test_letters_are_told_apart_but_not_their_accents(text: str, wanted: str, found: list[str]) -> None:
    assert [text[start:end] for start, end in Matcher(wanted).spans(text)] == found
