"""Tests exports and imports: cpuchat's own without loss, and those of other programs."""

from __future__ import annotations

import json
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cpuchat.base.errors import ChatsTooNew, UsageError
from cpuchat.chats.records import AnswerSettings, StoredMessage
from cpuchat.chats.store import ChatStore
from cpuchat.chats.transfer import formats, importing
from cpuchat.chats.transfer.formats import PortableChat, encoded
from cpuchat.chats.transfer.importing import Imported, export_chat, import_chats, read_exports
from cpuchat.protocol.messages import Sampling, Speculation
from cpuchat.protocol.timings import DrafterCount, SpeculationFigures, Timings

HERE = Path(__file__).parent
CHATGPT, LM_STUDIO = HERE / "chatgpt.json", HERE / "lm_studio.conversation.json"
LLAMA_SERVER = HERE / "llama_server.jsonl"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChatStore]:
    store = ChatStore(tmp_path / "chats.db")
    yield store
    store.close()


def fill(store: ChatStore) -> None:
    chat = store.create_chat("Qwen", "Be brief.\r\n", title="Café \x1b[1m 漢字")
    question = store.add_message(chat.id, "user", "Why?\n\n```\n\ttab\x00\n```\u2028")
    speculation = SpeculationFigures(
        passes=3, by_position=((3, 2),), by_drafter=(DrafterCount(name="lookup", draft_n=3, draft_n_accepted=2),)
    )
    first = store.add_message(
        chat.id, "assistant", "One.", reasoning="Hm.", model="Qwen", stop_reason="end",
        timings=Timings(predicted_n=7, predicted_ms=0.1 + 0.2, seed=(1 << 63) - 1, speculation=speculation),
        settings=AnswerSettings(
            sampling=Sampling(seed=3), max_tokens=9, speculation=Speculation(drafters=("lookup",)), path="/m/x.gguf"
        ),
    )  # fmt: skip
    other = store.create_chat("m", title="Other", sides="[]")
    store.add_message(other.id, "user", "between the messages of the other")
    store.add_message(chat.id, "assistant", "Two.", after=question.id, stop_reason="cancelled")
    store.add_message(chat.id, "user", "Edited", after=0)
    store.set_leaf(chat.id, first.id)


def document(store: ChatStore) -> bytes:
    return encoded(export_chat(store, chat) for chat in store.chats())


def added(store: ChatStore, path: Path) -> PortableChat:
    """Import one chat, and return it as it is stored."""
    (chat,) = import_chats(store, read_exports(path).chats).added
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
    assert len(import_chats(elsewhere, read_exports(file).chats).added) == 2
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
    done = import_chats(store, read_exports(file).chats)
    assert (len(done.added), done.known) == (1, 1)
    assert done.added[0].id != chat.id and store.chat(chat.id).title == "Renamed"
    assert import_chats(store, read_exports(file).chats) == Imported(known=2)
    store.add_message(done.added[0].id, "user", "Continued")
    assert import_chats(store, read_exports(file).chats) == Imported(known=2)


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


def test_chatgpt(store: ChatStore) -> None:
    export = read_exports(CHATGPT)
    assert export.source == "ChatGPT"
    assert len(export.problems) == 1 and "chat 3 of chatgpt.json" in export.problems[0]
    done = import_chats(store, export.chats)
    assert (len(done.added), done.empty) == (1, 1)
    chat = export_chat(store, store.chats()[0])
    assert (chat.title, chat.model) == ("Memory bandwidth", "o3")
    assert (chat.created, chat.updated) == (1736209400.25, 1736209800.5)
    assert said(chat) == [
        (1, 0, "user", "[image]\n\nWhy is decoding slow?"),
        (2, 1, "assistant",
         "```python\nprint(60e9 / 1.6e9)\n```\n\n```\n37.5\n```\n\nBecause memory is read for each token."),
        (3, 2, "user", "And prefill?"),
        (4, 3, "assistant", "That is compute."),
        (5, 1, "assistant", "Bandwidth."),
        (6, 0, "user", "Why is decoding slow on a CPU?"),
    ]  # fmt: skip
    told = chat.messages[1]
    assert (told.reasoning, told.model) == ("Considering bandwidth\n\nEach token reads all weights.", "o3")
    assert (told.stop_reason, told.created) == ("end", 1736209402.0)
    assert [one.id for one in chat.branch] == [1, 2, 3, 4]


def test_lm_studio(store: ChatStore) -> None:
    chat = added(store, LM_STUDIO)
    assert (chat.system_prompt, chat.model, chat.created) == ("Be brief.", "qwen/qwen3-8b", 1761660960.123)
    assert said(chat) == [
        (1, 0, "user", "Name a bird.\n\n[bird.png]"),
        (2, 1, "assistant", "A penguin."),
        (3, 1, "assistant", "A wren, which"),
        (4, 2, "user", "Another?"),
        (5, 4, "assistant", "A robin."),
    ]
    penguin, wren = chat.messages[1:3]
    assert (penguin.reasoning, penguin.stop_reason, wren.stop_reason) == ("A bird that swims.", "end", "cancelled")
    assert penguin.timings is not None and penguin.timings.predicted_per_second == pytest.approx(20.0)
    assert (penguin.timings.ttft_ms, penguin.timings.prompt_n) == (250.0, 31)
    assert [one.id for one in chat.branch] == [1, 2, 4, 5]


def test_llama_server(store: ChatStore) -> None:
    chat = added(store, LLAMA_SERVER)
    assert (chat.title, chat.system_prompt, chat.updated) == ("Rivers", "Be brief.", 1763000060.0)
    assert said(chat) == [
        (1, 0, "user", "Which river is it?\n\nnotes.txt:\n```\nIt is long.\n```\n\n[map.png]"),
        (2, 1, "assistant", "The Nile."),
        (3, 1, "assistant", "The Amazon."),
    ]
    nile = chat.messages[1]
    assert (nile.reasoning, nile.model) == ("Long rivers.", "Qwen3-8B-Q4_K_M")
    assert nile.timings == Timings(
        cache_n=5, prompt_n=40, prompt_ms=160.5, predicted_n=12, predicted_ms=600.25, ttft_ms=160.5
    )
    assert [one.id for one in chat.branch] == [1, 3]


def test_earlier_exports_of_llama_server(store: ChatStore, tmp_path: Path) -> None:
    header, *lines = map(json.loads, LLAMA_SERVER.read_text().splitlines())
    whole = tmp_path / "whole.json"
    whole.write_text(json.dumps([{"conv": header, "messages": [line["message"] for line in lines]}], indent=2))
    assert read_exports(whole).chats == read_exports(LLAMA_SERVER).chats

    content = "<<<reasoning_content_start>>>Hm.<<<reasoning_content_end>>>B"
    numbered = [
        {"id": 1, "convId": "conv-1", "type": "root", "role": "system", "content": "", "parent": -1, "children": [2]},
        {"id": 2, "convId": "conv-1", "type": "text", "role": "user", "content": "A", "parent": 1, "children": [3]},
        {"id": 3, "convId": "conv-1", "type": "text", "role": "assistant", "content": content, "parent": 2},
    ]
    plain = [{"id": 1, "role": "user", "content": "A"}, {"id": 2, "role": "assistant", "content": "B"}]
    for value in (
        {"conv": {"id": "conv-1", "name": "A", "lastModified": 1000, "currNode": 3}, "messages": numbered},
        {"id": "conv-1", "lastModified": 1000, "messages": plain},
    ):
        whole.write_text(json.dumps(value))
        (chat,) = read_exports(whole).chats
        assert (chat.title, said(chat)) == ("A", [(1, 0, "user", "A"), (2, 1, "assistant", "B")])


def test_archives_and_folders(store: ChatStore, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "export.zip", "w") as archive:
        archive.write(CHATGPT, "conversations.json")
        archive.writestr("user.json", '{"id": "user-1"}')
        archive.writestr("chat.html", "<html>")
        archive.write(LLAMA_SERVER, "2025_conv.jsonl")
    export = read_exports(tmp_path / "export.zip")
    assert export.source == "ChatGPT and llama-server"
    assert len(import_chats(store, export.chats).added) == 2
    folder = tmp_path / "conversations" / "Work"
    folder.mkdir(parents=True)
    (folder / "1761660960123.conversation.json").write_bytes(LM_STUDIO.read_bytes())
    (folder / ".DS_Store").write_bytes(b"\x00")
    assert len(import_chats(store, read_exports(folder.parent).chats).added) == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"[1, {}]", b"hello", b"\xff\xfe", b'{"a": 1}\n{"b": 2}', b"PK\x03\x04", b"[" * 99_999],
)
def test_what_is_no_export_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file.json"
    file.write_bytes(content)
    with pytest.raises(UsageError, match="Not an export of chats"):
        read_exports(file)


def test_a_document_of_another_version_or_with_wrong_values_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    file.write_text('{"format": "cpuchat-chats", "version": 2, "chats": 7}')
    with pytest.raises(ChatsTooNew, match="newer version"):
        read_exports(file)
    file.write_text('{"format": "cpuchat-chats", "version": 1, "chats": [{"messages": [{"role": "bot"}]}]}')
    with pytest.raises(UsageError, match=r"role"):
        read_exports(file)


def test_long_branches_and_circles_are_read() -> None:
    """A tree as deep as a chat is long, and one whose nodes follow each other in a circle."""
    from cpuchat.chats.transfer import formats

    def node(parent: str | None, role: str, text: str) -> dict:
        return {"parent": parent, "message": {"author": {"role": role}, "content": {"parts": [text]}}}

    deep = {"0": node(None, "user", "0")}
    deep |= {str(n): node(str(n - 1), "assistant" if n % 2 else "user", str(n)) for n in range(1, 5000)}
    chat = formats.read_chatgpt({"mapping": deep, "current_node": "4999"})
    assert len(chat.branch) == 5000 and chat.messages[-1].content == "4999"
    assert formats.read_chatgpt({"mapping": {"a": node("b", "user", "x"), "b": node("a", "user", "y")}}).messages == []
    assert chat.title == "0"


def test_cut_emoji_are_imported_as_question_marks(store: ChatStore, tmp_path: Path) -> None:
    """ChatGPT cuts titles by UTF-16 units, cpuchat's own exports may have been edited."""
    told = json.loads(CHATGPT.read_text(encoding="utf-8"))
    told[0]["title"] = "Cut \ud83d"
    theirs, ours = tmp_path / "chatgpt.json", tmp_path / "cpuchat.json"
    theirs.write_text(json.dumps(told), encoding="utf-8")
    assert added(store, theirs).title == "Cut ?"
    message = {"id": 1, "role": "user", "content": "A pair: \ud83d\ude00, a half: \udc4d", "model": "\udcff"}
    message["attachments"] = [{"title": "\ud83d", "text": "\ud83d"}]
    chat = {"id": "a", "title": "\ud83d", "preset": {"name": "\ud83d"}, "messages": [message]}
    ours.write_text(json.dumps({"format": "cpuchat-chats", "version": 1, "chats": [chat]}), encoding="utf-8")
    found = added(store, ours)
    assert (found.title, found.messages[0].content) == ("?", "A pair: 😀, a half: ?")
    assert found.messages[0].attachments[0].text == "?"
    assert import_chats(store, read_exports(ours).chats) == Imported(known=1)
    assert list(tmp_path.glob("*.salvage")) == []


def answers_in_parts(n_parts: int, characters: int, *, branching: bool = False) -> dict[str, object]:
    """Return a conversation whose answer has many parts; `branching`: each of them also ends a branch."""
    mapping: dict[str, object] = {}
    for number in range(n_parts):
        content = {"content_type": "text", "parts": [f"{number} ".ljust(characters, "x")]}
        message = {"author": {"role": "assistant"}, "content": content}
        parent = str(number - 1) if number else None
        mapping[str(number)] = {"message": message, "parent": parent}
        if branching:
            mapping[f"{number}b"] = {"message": message, "parent": parent}
    return {"mapping": mapping, "title": "Parts"}


def test_an_answer_in_a_thousand_parts_takes_memory_for_its_text_only(tmp_path: Path) -> None:
    """Each part used to hold all of the text before it: 2 GB of 4 MB."""
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps([answers_in_parts(1000, 4000)]), encoding="utf-8")
    tracemalloc.start()
    try:
        (chat,) = read_exports(file).chats
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    (answer,) = chat.messages
    assert answer.content.startswith("0 xx")
    assert len(answer.content) == 1000 * 4000 + 999 * len("\n\n")
    assert peak < 100e6


def test_branches_that_repeat_too_much_text_are_named_and_left_out(tmp_path: Path) -> None:
    file = tmp_path / "conversations.json"
    file.write_text(json.dumps([answers_in_parts(400, 2000, branching=True), answers_in_parts(2, 10)]), "utf-8")
    export = read_exports(file)
    assert [len(chat.messages) for chat in export.chats] == [1]
    assert export.problems == ["chat 1 of conversations.json: its branches have more than 100 million characters"]


def test_marks_that_are_never_closed_take_linear_time() -> None:
    """A regular expression took minutes for this, most of them for line breaks; the guard is the tests' time limit."""
    started, called = "<<<reasoning_content_start>>>", "<<<AGENTIC_TOOL_CALL_START>>>"
    text = f"{started * 60_000}{called * 60_000}" + "\n" * 1_000_000 + "end"
    chat = formats.read_llama_server({"messages": [{"role": "assistant", "content": text}]})
    assert chat.messages[0].content == text


def test_files_that_are_too_large_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both limits are lowered here: real ones take seconds."""
    monkeypatch.setattr(importing, "FILE_BYTES", 1 << 20)
    monkeypatch.setattr(importing, "TOTAL_BYTES", 3 << 20)
    bomb, many, plain = tmp_path / "bomb.zip", tmp_path / "many.zip", tmp_path / "plain.json"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("conversations.json", "[" + " " * (2 << 20) + "]")
    with zipfile.ZipFile(many, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(4):
            archive.writestr(f"{number}.json", "[" + " " * 1_000_000 + "]")
    plain.write_text("[" + " " * (2 << 20) + "]", "utf-8")
    for file in (bomb, plain):
        with pytest.raises(UsageError, match="is too large: 2 MiB of 1 MiB at most"):
            read_exports(file)
    with pytest.raises(UsageError, match=r"many\.zip holds more than 3 MiB"):
        read_exports(many)


def test_an_archive_with_damaged_content_is_named(tmp_path: Path) -> None:
    file = tmp_path / "export.zip"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("conversations.json", json.dumps(list(range(1000))))
    data = bytearray(file.read_bytes())
    data[60:70] = b"\xff" * 10
    file.write_bytes(data)
    with pytest.raises(UsageError, match="Cannot read"):
        read_exports(file)
