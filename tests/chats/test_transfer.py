"""Tests that chats are exported and imported without loss."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cpuchat.base.errors import ChatsTooNew, UsageError
from cpuchat.chats.records import AnswerSettings, StoredMessage
from cpuchat.chats.store import ChatStore
from cpuchat.chats.transfer import Imported, PortableChat, encoded, export_chat, import_chats, read_document
from cpuchat.protocol.messages import Sampling, Speculation
from cpuchat.protocol.timings import DrafterCount, SpeculationFigures, Timings


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChatStore]:
    store = ChatStore(tmp_path / "chats.db")
    yield store
    store.close()


def fill(store: ChatStore) -> None:
    chat = store.create_chat("Qwen", "Be brief.\r\n", title="Café \x1b[1m 漢字")
    question = store.add_message(chat.id, "user", "Why?\n\n```\n\ttab\x00\n```\u2028")
    speculation = SpeculationFigures(
        passes=3, by_position=((3, 2),), by_drafter=(DrafterCount(name="suffix", draft_n=3, draft_n_accepted=2),)
    )
    first = store.add_message(
        chat.id, "assistant", "One.", reasoning="Hm.", model="Qwen", stop_reason="end",
        timings=Timings(predicted_n=7, predicted_ms=0.1 + 0.2, seed=(1 << 63) - 1, speculation=speculation),
        settings=AnswerSettings(
            sampling=Sampling(seed=3), max_tokens=9, speculation=Speculation(drafters=("suffix",)), path="/m/x.gguf"
        ),
    )  # fmt: skip
    other = store.create_chat("m", title="Other", sides="[]")
    store.add_message(other.id, "user", "between the messages of the other")
    store.add_message(chat.id, "assistant", "Two.", after=question.id, stop_reason="cancelled")
    store.add_message(chat.id, "user", "Edited", after=0)
    store.set_options(chat.id, {"leaf": first.id})


def document(store: ChatStore) -> bytes:
    return encoded(export_chat(store, chat) for chat in store.chats())


def added(store: ChatStore, path: Path) -> PortableChat:
    """Import one chat, and return it as it is stored."""
    (chat,) = import_chats(store, read_document(path)).added
    return export_chat(store, store.chat(chat.id))


def said(chat: PortableChat) -> list[tuple[int, int, str, str]]:
    return [(one.id, one.parent, one.role, one.content) for one in chat.messages]


def test_an_export_that_is_imported_elsewhere_gives_the_same_export(store: ChatStore, tmp_path: Path) -> None:
    fill(store)
    file = tmp_path / "chats.json"
    file.write_bytes(document(store))
    elsewhere = ChatStore(tmp_path / "other" / "chats.db")
    there = elsewhere.create_chat("m")
    elsewhere.add_message(there.id, "user", "the ids of the messages are other ones")
    assert len(import_chats(elsewhere, read_document(file)).added) == 2
    elsewhere.delete(there.id)
    assert document(elsewhere) == document(store)
    for chat in store.chats():
        ours, theirs = store.messages(chat.id), elsewhere.messages(chat.id)
        assert [msgspec.structs.replace(one, id=0, parent=0) for one in theirs] == [
            msgspec.structs.replace(one, id=0, parent=0) for one in ours
        ]
    assert [hit.excerpts[0].text for hit in elsewhere.search("between")] == ["between the messages of the other"]
    elsewhere.close()


def test_a_file_that_is_imported_again_adds_only_what_is_new(store: ChatStore, tmp_path: Path) -> None:
    fill(store)
    file = tmp_path / "chats.json"
    file.write_bytes(document(store))
    chat = store.chats()[0]
    store.rename(chat.id, "Renamed")
    store.add_message(chat.id, "user", "More")
    done = import_chats(store, read_document(file))
    assert (len(done.added), done.known) == (1, 1)
    assert done.added[0].id != chat.id and store.chat(chat.id).title == "Renamed"
    assert import_chats(store, read_document(file)) == Imported(known=2)
    store.add_message(done.added[0].id, "user", "Continued")
    assert import_chats(store, read_document(file)) == Imported(known=2)


def test_an_import_is_all_or_nothing_and_takes_no_value_unchecked(store: ChatStore) -> None:
    sound = PortableChat(title="Sound", messages=[StoredMessage(role="user", content="x")])
    with pytest.raises(AttributeError):
        import_chats(store, [sound, None])  # type: ignore[list-item]
    assert store.chats() == []
    wrong = [
        StoredMessage(id=5, parent=9, role="user", content="a\ud800"), StoredMessage(id=5, parent=7, role="user")
    ]  # fmt: skip
    odd = PortableChat(id="../x", created=1e300, updated=-1.0, leaf=77, messages=wrong)
    (chat,) = import_chats(store, [odd]).added
    assert chat.id == odd.digest and [m.content for m in store.messages(chat.id)] == ["a?", ""]
    assert store.chats() == [store.chat(chat.id)] and store.take_notices() == []


_NONE = [b"", b"{}", b"[1, {}]", b"\xff\xfe", b'{"a": 1}\n{"b": 2}', b"PK\x03\x04", b"[" * 99_999]
_OF_OURS = b'{"format": "cpuchat-chats", "version": %d, "chats": %b}'


@pytest.mark.parametrize(
    ("content", "error", "said"),
    [
        *((content, UsageError, "Not an export of cpuchat") for content in _NONE),
        (_OF_OURS % (2, b"7"), ChatsTooNew, "newer version"),
        (_OF_OURS % (1, b'[{"messages": [{"role": "bot"}]}]'), UsageError, "role"),
    ],
)
def test_what_is_no_export_that_can_be_read_is_refused(
    tmp_path: Path, content: bytes, error: type[Exception], said: str
) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content)
    with pytest.raises(error, match=said):
        read_document(file)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le"])
def test_an_export_that_a_shell_has_encoded_anew_is_imported(store: ChatStore, tmp_path: Path, encoding: str) -> None:
    file, chat = tmp_path / "chats.json", store.create_chat("m", title="漢字 🙂")
    file.write_text(encoded([export_chat(store, chat)]).decode(), encoding=encoding, newline="\r\n")
    assert [one.title for one in read_document(file)] == ["漢字 🙂"]


def test_an_answer_that_another_program_wrote_is_complete(store: ChatStore, tmp_path: Path) -> None:
    file = tmp_path / "chats.json"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    file.write_text(json.dumps({"format": "cpuchat-chats", "chats": [{"messages": messages}]}), encoding="utf-8")
    assert [one.stop_reason for one in added(store, file).messages] == [None, "end"]


def test_cut_emoji_are_imported_as_question_marks(store: ChatStore, tmp_path: Path) -> None:
    """A document may have been edited by a program that cuts titles by UTF-16 units."""
    file = tmp_path / "cpuchat.json"
    message = {"id": 1, "role": "user", "content": "A pair: \ud83d\ude00, a half: \udc4d", "model": "\udcff"}
    message["attachments"] = [{"title": "\ud83d", "text": "\ud83d"}]
    chat = {"id": "a", "title": "\ud83d", "messages": [message]}
    file.write_text(json.dumps({"format": "cpuchat-chats", "version": 1, "chats": [chat]}), encoding="utf-8")
    found = added(store, file)
    assert (found.title, found.messages[0].content) == ("?", "A pair: 😀, a half: ?")
    assert found.messages[0].attachments[0].text == "?"
    assert import_chats(store, read_document(file)) == Imported(known=1)
