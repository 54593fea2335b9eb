"""Tests saved states: what comes back after a restart, what is thrown away."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cpuchat.base.paths import kv_stem
from cpuchat.engine.llama.sequence import Aborted
from cpuchat.engine.states.files import DiskWriter, StateFiles
from cpuchat.engine.states.prompt import State, StateKind, TokenHistory, token_bytes
from cpuchat.protocol.messages import StateKey

LIMIT = 1 << 30
Opens = Callable[..., StateFiles]


def whole(text: bytes, stem: str = "chat", size: int = 5000) -> State:
    history = TokenHistory()
    history.record(text, list(text), [], lambda token: bytes([token]))
    data = np.random.default_rng(len(text)).integers(0, 256, size, np.uint8)
    return State(
        StateKey(chat=kv_stem(stem), on_disk=True), token_bytes(list(text)), StateKind.WHOLE, data, history=history
    )


def partial(text: bytes, first: int = 0) -> State:
    return State(StateKey(), token_bytes(list(text)), StateKind.PARTIAL, np.arange(100, dtype=np.uint8), first)


def write(files: StateFiles, *states: State) -> None:
    files.write(states[0].key.chat, states, "draft")
    files.writer.finish()


def never() -> bool:
    return False


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def open_files(folder: Path) -> Iterator[Opens]:
    writer = DiskWriter()
    yield lambda limit=LIMIT, key="key", at=folder: StateFiles(at, limit, key, writer)
    writer.close()


def test_states_come_back(open_files: Opens) -> None:
    saved = whole(b"hello engine")
    saved.draft = State(StateKey(), token_bytes(list(b"hello")), StateKind.WHOLE, np.ones(77, np.uint8))
    write(open_files(), saved, partial(b"hello e", 3), partial(b"hel"))
    again = open_files()
    ((file, index),) = again.indexes()
    assert (index.tokens, index.history, index.draft_key) == (saved.tokens, saved.history, "draft")
    assert [(part.n, part.first, part.kind) for part in index.parts] == [
        (12, 0, StateKind.WHOLE),
        (7, 3, StateKind.PARTIAL),
        (3, 0, StateKind.PARTIAL),
    ]
    assert saved.data is not None and index.draft is not None and index.draft.n == 5
    assert (again.read(file, index.parts[0], never) == saved.data).all()
    assert (again.read(file, index.parts[2], never) == np.arange(100)).all()
    assert (again.read(file, index.draft, never) == 1).all()
    assert (saved.file, saved.part) == (file, index.parts[0])  # its copy in memory may go


def test_a_file_tells_nothing_and_belongs_to_the_user(folder: Path, open_files: Opens) -> None:
    write(open_files(), whole(b"x", "../../etc/secret plans"))
    (file,) = folder.iterdir()
    assert "secret" not in file.name
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0


@pytest.mark.parametrize("damage", ["flip in the index", "cut", "other format"])
def test_a_file_with_a_damaged_index_is_deleted(folder: Path, damage: str, open_files: Opens) -> None:
    files = open_files()
    write(files, whole(b"some words of a chat"))
    (file,) = folder.iterdir()
    data = bytearray(file.read_bytes())
    match damage:
        case "flip in the index":
            data[-40] ^= 1
        case "cut":
            del data[len(data) // 2 :]
        case _:
            data[-20:] = b"a file of a later version"[:20]
    file.write_bytes(data)
    assert list(open_files().indexes()) == []
    assert list(folder.iterdir()) == []


def test_a_damaged_state_is_deleted(folder: Path, open_files: Opens) -> None:
    write(open_files(), whole(b"some words"))
    files = open_files()
    ((file, index),) = files.indexes()
    data = bytearray(file.read_bytes())
    data[2000] ^= 1
    file.write_bytes(data)
    assert files.read(file, index.parts[0], never) is None
    assert list(folder.iterdir()) == []


def test_a_file_that_was_written_anew_is_left_alone(folder: Path, open_files: Opens) -> None:
    write(open_files(), whole(b"some words"))
    files = open_files()
    ((file, index),) = files.indexes()
    write(open_files(), whole(b"some words and more"))
    assert files.read(file, index.parts[0], never) is None
    ((_, newer),) = files.indexes()
    assert files.read(file, newer.parts[0], never) is not None


def test_reading_can_be_stopped(open_files: Opens) -> None:
    write(open_files(), whole(b"some words"))
    files = open_files()
    ((file, index),) = files.indexes()
    with pytest.raises(Aborted):
        files.read(file, index.parts[0], lambda: True)
    assert file.exists()


def test_the_least_recently_used_go_first(folder: Path, open_files: Opens) -> None:
    write(open_files(), whole(b"x", "first"))
    size = next(folder.iterdir()).stat().st_size
    files = open_files(size * 2 + size // 2)
    write(files, whole(b"x", "second"))
    for file, index in list(files.indexes()):
        age = 2000 if file.name.startswith(kv_stem("second")) else 1000
        os.utime(file, (0, file.stat().st_mtime - age))
        if age == 2000:  # using it makes it young again
            assert files.read(file, index.parts[0], never) is not None
    write(files, whole(b"x", "third"))
    left = {file.name.partition("-")[0] for file in folder.iterdir()}
    assert left == {kv_stem("second"), kv_stem("third")}


def test_a_chat_that_is_deleted_before_it_is_written_never_is(folder: Path, open_files: Opens) -> None:
    files = open_files()
    files.writer.pause()
    files.write(kv_stem("chat"), [whole(b"abc")], "")
    files.forget(kv_stem("chat"))
    files.writer.finish()
    assert list(folder.iterdir()) == []
    write(files, whole(b"abc"))
    assert len(list(folder.iterdir())) == 1


def test_a_folder_that_cannot_be_made_keeps_nothing(tmp_path: Path, open_files: Opens) -> None:
    (tmp_path / "file").write_text("in the way")
    files = open_files(at=tmp_path / "file" / "kv")
    write(files, whole(b"abc"))
    assert list(files.indexes()) == []
