"""KV caches of chats on disk, so that a chat continues quickly after a restart.

Two files per chat, named by hashes of the chat and of the key: `<name>.kv` is llama.cpp's state of one sequence,
`<name>.text` holds the text it belongs to and the state's checksum. They contain the conversation, so the folder is
private to the user.

A state may have gigabytes. Saving copies it in memory, which is all that the engine's thread does; a `DiskWriter` takes
it to the disk later, and until then the copy serves in place of the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from cpuchat.engine.llama.sequence import Sequence
from cpuchat.engine.prompt.disk_writer import DiskWriter
from cpuchat.engine.prompt.token_history import TokenHistory
from cpuchat.files import atomic_writer, read_json
from cpuchat.hardware.memory import available_bytes
from cpuchat.paths import kv_stem

_FORMAT: Final = 2
_SLICE: Final = 4 << 20
_STALE_SECONDS: Final = 3600.0


class SavedChat(msgspec.Struct):
    """Content of `<name>.text`. `tokens` are those of the state, `history` may reach further."""

    format: int
    key: str
    tokens: list[int]
    history: TokenHistory = msgspec.field(name="continuation")  # as in files of earlier versions
    kv_bytes: int
    kv_crc32: int


_decoder = msgspec.msgpack.Decoder(SavedChat)


@dataclass
class _Pending:
    """A saved chat on its way to the disk, unless `is_dropped`."""

    chat_id: str
    saved: SavedChat
    state: np.ndarray
    is_dropped: bool = False


class _DroppedError(Exception):
    """The chat must not get to the disk any more."""


class PrefixCache:
    """Saved chats of one model in `folder`; all models together stay under `limit` bytes, least recently used go first.

    No method raises for a disk that is full, read-only or gone: the cache then keeps nothing.

    Args:
        key: everything that makes a state unusable when it differs: the model's fingerprint, cache types, flash
            attention, the engine's commit.
        writer: writes in the background.
    """

    def __init__(self, folder: Path, limit: int, key: str, writer: DiskWriter) -> None:
        self._folder = folder
        self._limit = limit
        self._key = key
        self._writer = writer
        self._pending: _Pending | None = None
        self._lock = threading.Lock()  # over `_pending` and the names of the files
        self._suffix = hashlib.sha256(key.encode()).hexdigest()[:20]
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
            for temporary in folder.glob(".*"):
                if time.time() - temporary.stat().st_mtime > _STALE_SECONDS:
                    temporary.unlink(missing_ok=True)

    def _files(self, chat_id: str) -> tuple[Path, Path]:
        name = f"{kv_stem(chat_id)}-{self._suffix}"
        return self._folder / f"{name}.kv", self._folder / f"{name}.text"

    def save(self, chat_id: str, sequence: Sequence, history: TokenHistory) -> int:
        """Copy the sequence as the state of `chat_id` and begin to write it.

        Returns:
            The bytes of the state; 0 when it is larger than the limit or than half of the free memory, or when the one
            before is still being written.
        """
        size = sequence.state_size()
        if not sequence.tokens or size > self._limit or self._writer.is_busy or size > available_bytes() // 2:
            return 0
        state = sequence.state()
        saved = SavedChat(_FORMAT, self._key, list(sequence.tokens), history.copy(), state.size, 0)
        pending = self._pending = _Pending(chat_id, saved, state)
        self._writer.start(lambda: self._write(pending))
        return size

    def _write(self, pending: _Pending) -> None:
        try:
            self._write_files(pending)
        except (OSError, _DroppedError):
            return
        finally:
            with self._lock:
                self._pending = None
        self._evict(keep=self._files(pending.chat_id)[0].stem)

    def _write_files(self, pending: _Pending) -> None:
        kv_file, text_file = self._files(pending.chat_id)
        state, checksum = pending.state.data, 0
        # A crash between the two renames leaves a pair that does not match, which `restore` deletes.
        with (
            contextlib.ExitStack() as both_renames,
            atomic_writer(text_file, sync=False) as text,
            atomic_writer(kv_file, sync=False) as stream,
        ):
            for at in range(0, len(state), _SLICE):
                self._writer.wait_until_idle()
                if pending.is_dropped:
                    raise _DroppedError
                part = state[at : at + _SLICE]
                checksum = zlib.crc32(part, checksum)
                stream.write(part)
            text.write(msgspec.msgpack.encode(msgspec.structs.replace(pending.saved, kv_crc32=checksum)))
            both_renames.enter_context(self._lock)
            if pending.is_dropped:
                raise _DroppedError

    def drop(self) -> None:
        """Give up what is not written yet."""
        with self._lock:
            if self._pending is not None:
                self._pending.is_dropped = True
                self._pending = None

    def _pending_of(self, chat_id: str) -> _Pending | None:
        with self._lock:
            pending = self._pending
        return pending if pending is not None and pending.chat_id == chat_id else None

    def find(self, chat_id: str) -> SavedChat | None:
        """Return what is saved for `chat_id`; a damaged file is deleted."""
        if pending := self._pending_of(chat_id):
            return msgspec.structs.replace(pending.saved, history=pending.saved.history.copy())
        try:
            saved = self._read_text(self._files(chat_id)[1])
            saved.history.check()
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            self.forget(chat_id)
            return None
        return saved

    def _read_text(self, file: Path) -> SavedChat:
        """Read a text file. Raises OSError, or ValueError (msgspec's too) when its content is not ours."""
        saved = read_json(file, _decoder.decode, 64 << 20)
        if (saved.format, saved.key) != (_FORMAT, self._key):
            raise ValueError("another format")
        return saved

    def recent_texts(self, limit: int, without: str = "") -> list[list[int]]:
        """Return tokens of saved chats of this model, last used first, at most `limit` in all; not of `without`."""
        skipped = self._files(without)[1]
        with_times = [(info.st_mtime, file) for file, info in self._stats(f"*-{self._suffix}.text")]
        texts: list[list[int]] = []
        for _, file in sorted(with_times, reverse=True):
            if limit <= 0:
                break
            if file == skipped:
                continue
            with contextlib.suppress(OSError, ValueError):
                texts.append(self._read_text(file).history.tokens[:limit])
                limit -= len(texts[-1])
        return texts

    def _stats(self, pattern: str) -> Iterator[tuple[Path, os.stat_result]]:
        with contextlib.suppress(OSError):
            for file in self._folder.glob(pattern):
                with contextlib.suppress(OSError):
                    yield file, file.stat()

    def restore(self, chat_id: str, saved: SavedChat, sequence: Sequence) -> bool:
        """Load the state that belongs to `saved`.

        The checksum is compared first: llama.cpp checks little of a state and aborts on some contradictions. The
        sequence's abort flag cancels.

        Returns:
            Whether it was loaded. Otherwise the sequence is unchanged or empty, and damaged files are deleted.
        """
        kv_file, text_file = self._files(chat_id)
        if len(saved.tokens) > sequence.n_ctx or saved.kv_bytes > available_bytes() // 2:
            return False
        pending = self._pending_of(chat_id)
        try:
            if pending is not None and pending.saved.tokens == saved.tokens:
                state = pending.state
            else:
                if not saved.kv_crc32:  # found while it was pending, and written since
                    saved = self.find(chat_id) or saved
                state = _read_state(kv_file, saved, sequence.abort.is_set)
        except InterruptedError:
            return False
        except (OSError, ValueError):
            self.forget(chat_id)
            return False
        if not sequence.set_state(saved.tokens, state):
            self.forget(chat_id)
            return False
        for file in (kv_file, text_file):
            with contextlib.suppress(OSError):
                os.utime(file)
        return True

    def forget(self, chat_id: str) -> None:
        """Delete what is saved for `chat_id`."""
        if self._pending_of(chat_id):
            self.drop()
        _delete(self._files(chat_id))

    def _evict(self, keep: str) -> None:
        """Delete the least recently used pairs until the folder is within its limit."""
        pairs: dict[str, tuple[float, int]] = {}
        for file, info in self._stats("*"):
            if file.suffix in (".kv", ".text"):
                used, size = pairs.get(file.stem, (0.0, 0))
                pairs[file.stem] = (max(used, info.st_mtime), size + info.st_size)
        total = sum(size for _, size in pairs.values())
        for stem in sorted(pairs, key=lambda s: pairs[s][0]):
            if total <= self._limit:
                return
            if stem != keep:
                _delete((self._folder / f"{stem}.text", self._folder / f"{stem}.kv"))
                total -= pairs[stem][1]


def _delete(files: tuple[Path, ...]) -> None:
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


def _read_state(file: Path, saved: SavedChat, is_cancelled: Callable[[], bool]) -> np.ndarray:
    """Read a state.

    Raises:
        OSError: it cannot be read.
        ValueError: it does not match `saved`.
        InterruptedError: `is_cancelled`, which is asked before each slice.
    """
    with file.open("rb", buffering=0) as stream:
        if os.fstat(stream.fileno()).st_size != saved.kv_bytes:
            raise ValueError("another size")
        state = np.empty(saved.kv_bytes, np.uint8)
        view, checksum, at = state.data, 0, 0
        while n := stream.readinto(view[at : at + _SLICE]):
            if is_cancelled():
                raise InterruptedError
            checksum = zlib.crc32(view[at : at + n], checksum)
            at += n
    if at != saved.kv_bytes or checksum != saved.kv_crc32:
        raise ValueError("another content")
    return state
