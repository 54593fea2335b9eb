"""Tests saved KV: what comes back, what is thrown away."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cpuchat.engine.llama.model import Model
from cpuchat.engine.llama.sequence import Sequence
from cpuchat.engine.prompt.disk_writer import DiskWriter
from cpuchat.engine.prompt.prefix_cache import PrefixCache
from cpuchat.engine.prompt.token_history import TokenHistory

LIMIT = 1 << 30
Opens = Callable[..., PrefixCache]


def fill(model: Model, text: bytes) -> TokenHistory:
    model.sequence.clear()
    model.sequence.extend(list(text))
    memory = TokenHistory()
    memory.record(text, list(text), [], lambda t: bytes([t]))
    return memory


class Cache(PrefixCache):
    """Writes before `save` returns."""

    def save(self, chat_id: str, sequence: Sequence, history: TokenHistory) -> int:
        size = super().save(chat_id, sequence, history)
        self._writer.finish()
        return size


@pytest.fixture
def open_cache(folder: Path) -> Iterator[Callable[..., PrefixCache]]:
    writer = DiskWriter()
    yield lambda limit=LIMIT, key="key", at=folder: Cache(at, limit, key, writer)
    writer.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_saved_chat_comes_back(model: Model, folder: Path, open_cache: Opens) -> None:
    cache = open_cache()
    memory = fill(model, b"hello engine")
    assert cache.save("chat-1", model.sequence, memory)
    model.sequence.clear()

    again = open_cache()
    saved = again.find("chat-1")
    assert saved is not None and saved.history == memory
    assert again.restore("chat-1", saved, model.sequence)
    assert model.sequence.tokens == list(b"hello engine")


def test_a_chat_that_is_written_between_finding_and_restoring_it_comes_back(model: Model, folder: Path) -> None:
    writer = DiskWriter()
    try:
        cache = PrefixCache(folder, LIMIT, "key", writer)
        writer.pause()
        cache.save("chat", model.sequence, fill(model, b"hello engine"))
        saved = cache.find("chat")
        writer.finish()
        model.sequence.clear()
        assert saved is not None and cache.restore("chat", saved, model.sequence)
        assert model.sequence.tokens == list(b"hello engine")
    finally:
        writer.close()


def test_files_tell_nothing_and_belong_to_the_user(model: Model, folder: Path, open_cache: Opens) -> None:
    cache = open_cache()
    assert cache.save("../../etc/secret plans", model.sequence, fill(model, b"x"))
    names = sorted(f.name for f in folder.iterdir())
    assert len(names) == 2 and not any("secret" in n or "." in n.split(".")[0] for n in names)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(f.stat().st_mode) & 0o077 == 0 for f in folder.glob("*.text"))


def test_another_model_or_chat_finds_nothing(model: Model, folder: Path, open_cache: Opens) -> None:
    open_cache().save("chat", model.sequence, fill(model, b"abc"))
    assert open_cache(key="other key").find("chat") is None
    assert open_cache().find("another chat") is None


def test_empty_sequence_is_not_saved(model: Model, folder: Path, open_cache: Opens) -> None:
    assert not open_cache().save("chat", model.sequence, TokenHistory())
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("which", ["kv", "text"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone"])
def test_damaged_files_are_deleted(model: Model, folder: Path, which: str, damage: str, open_cache: Opens) -> None:
    cache = open_cache()
    cache.save("chat", model.sequence, fill(model, b"some words of a chat"))
    file = next(folder.glob(f"*.{which}"))
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "cut":
        del data[len(data) // 2 :]
    elif damage == "empty":
        data.clear()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(data)

    saved = cache.find("chat")
    restored = saved is not None and cache.restore("chat", saved, model.sequence)
    if which == "text" and damage == "flip" and restored:
        return  # the flip hit something that does not matter, such as a byte of the text
    assert not restored
    if not (which == "text" and damage == "gone"):
        assert list(folder.iterdir()) == []


def test_oldest_chats_go_first(model: Model, folder: Path, open_cache: Opens) -> None:
    cache = open_cache()
    memory = fill(model, b"x" * 60)
    cache.save("first", model.sequence, memory)
    size = sum(f.stat().st_size for f in folder.iterdir())
    cache = open_cache(size * 2 + size // 2)
    cache.save("second", model.sequence, memory)
    for age, chat in ((2000, "second"), (1000, "first")):
        for file in cache._files(chat):
            info = file.stat()
            os.utime(file, (info.st_atime, info.st_mtime - age))
    # Using a chat makes it young again.
    saved = cache.find("second")
    assert saved is not None and cache.restore("second", saved, model.sequence)
    cache.save("third", model.sequence, memory)
    assert cache.find("first") is None
    assert cache.find("second") is not None and cache.find("third") is not None
    assert sum(f.stat().st_size for f in folder.iterdir()) <= size * 2.5


def test_state_over_the_limit_is_not_written(model: Model, folder: Path, open_cache: Opens) -> None:
    cache = open_cache(100)
    assert not cache.save("chat", model.sequence, fill(model, b"some text"))
    assert list(folder.iterdir()) == []


def test_folder_that_cannot_be_made(model: Model, tmp_path: Path, open_cache: Opens) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = open_cache(at=tmp_path / "file" / "kv")
    cache.save("chat", model.sequence, fill(model, b"abc"))
    assert cache.find("chat") is None


def test_left_over_temporary_files_are_removed(folder: Path, open_cache: Opens) -> None:
    folder.mkdir()
    old, new = folder / ".a.kv.x", folder / ".b.kv.x"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    open_cache()
    assert not old.exists() and new.exists()


def test_more_tokens_than_the_context_holds(model: Model, folder: Path, open_cache: Opens) -> None:
    cache = open_cache()
    cache.save("chat", model.sequence, fill(model, b"abc"))
    saved = cache.find("chat")
    assert saved is not None
    saved.tokens = [1] * (model.sequence.n_ctx + 1)
    assert not cache.restore("chat", saved, model.sequence)
    assert cache.find("chat") is not None  # a larger context may still use it
