"""KV caches of chats on disk, so that a chat goes on quickly after a restart.

Two files per chat, named by hashes of the chat and of the key: `<name>.kv` is llama.cpp's state of one sequence,
`<name>.text` says which text that was, with the state's checksum. They hold the conversation, so the folder is the
user's alone.

A state may have gigabytes. Saving copies it in memory, which is all that the engine's thread does; a `DiskWriter` takes
it to the disk later, and until then the copy serves in place of the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from cpuchat.engine.llama.sequence import Sequence
from cpuchat.engine.prompt.disk_writer import DiskWriter
from cpuchat.engine.prompt.token_history import TokenHistory
from cpuchat.hardware.memory import available_bytes
from cpuchat.paths import kv_stem

_FORMAT = 2
_SLICE = 4 << 20
_STALE_SECONDS = 3600.0


class SavedChat(msgspec.Struct):
    """What `<name>.text` holds. `tokens` are those of the state, `history` may reach further."""

    format: int
    key: str
    tokens: list[int]
    history: TokenHistory = msgspec.field(name="continuation")  # the name in files of earlier versions
    kv_bytes: int
    kv_crc32: int


_decoder = msgspec.msgpack.Decoder(SavedChat)


@dataclass
class _Unwritten:
    """A saved chat on its way to the disk. `is_dropped`: it shall not get there."""

    chat_id: str
    saved: SavedChat
    state: np.ndarray
    is_dropped: bool = False


class PrefixCache:
    """Saved chats of one model in `folder`; all models together stay under `limit` bytes, oldest use goes first.

    Args:
        key: everything that makes a state unusable when it differs: the model's fingerprint, cache types, flash
            attention, the engine's commit.
        writer: what writes in the background; None writes at once.

    No method raises for a disk that is full, read-only or gone: the cache then keeps nothing.
    """

    def __init__(self, folder: Path, limit: int, key: str, writer: DiskWriter | None = None) -> None:
        self._folder = folder
        self._limit = limit
        self._key = key
        self._writer = writer
        self._unwritten: _Unwritten | None = None
        self._lock = threading.Lock()  # over `_unwritten` and the names of the files
        self._suffix = hashlib.sha256(key.encode()).hexdigest()[:20]
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
            for left in folder.glob("*.tmp"):
                if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                    left.unlink(missing_ok=True)

    def _files(self, chat_id: str) -> tuple[Path, Path]:
        name = f"{kv_stem(chat_id)}-{self._suffix}"
        return self._folder / f"{name}.kv", self._folder / f"{name}.text"

    def save(self, chat_id: str, sequence: Sequence, history: TokenHistory) -> int:
        """Have the sequence written as the state of `chat_id`.

        Returns the bytes of the state; 0 when it is larger than the limit or than half of the free memory, when the
        one before is still being written, or when it could not be written at once.
        """
        size = sequence.state_size()
        busy = self._writer is not None and not self._writer.is_idle
        if not sequence.tokens or size > self._limit or busy or size > available_bytes() // 2:
            return 0
        state = sequence.state()
        saved = SavedChat(
            format=_FORMAT,
            key=self._key,
            tokens=list(sequence.tokens),
            history=history.copy(),
            kv_bytes=state.size,
            kv_crc32=0,
        )
        unwritten = _Unwritten(chat_id, saved, state)
        writer = self._writer
        if writer is None:
            return size if self._write(unwritten, lambda: None) else 0
        self._unwritten = unwritten
        writer.start(lambda: self._write_later(unwritten, writer.wait_for_quiet))
        return size

    def _write_later(self, unwritten: _Unwritten, wait: Callable[[], None]) -> None:
        try:
            self._write(unwritten, wait)
        finally:
            with self._lock:
                self._unwritten = None

    def _write(self, unwritten: _Unwritten, wait: Callable[[], None]) -> bool:
        """Take it to the disk, slice by slice, with `wait` called before each. False when that did not work."""
        saved, state = unwritten.saved, unwritten.state.data
        kv_file, text_file = self._files(unwritten.chat_id)
        temporary: list[Path] = []
        checksum = 0
        try:
            for _ in range(2):
                handle, name = tempfile.mkstemp(dir=self._folder, suffix=".tmp")
                os.close(handle)
                temporary.append(Path(name))
            with temporary[0].open("wb", buffering=0) as stream:
                for at in range(0, len(state), _SLICE):
                    wait()
                    if unwritten.is_dropped:
                        return False
                    part = state[at : at + _SLICE]
                    checksum = zlib.crc32(part, checksum)
                    while part:
                        part = part[stream.write(part) :]
            temporary[1].write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(saved, kv_crc32=checksum)))
            with self._lock:
                if unwritten.is_dropped:
                    return False
                # A crash between the two renames leaves a pair that does not match, which `restore` throws away.
                temporary[0].replace(kv_file)
                temporary[1].replace(text_file)
        except OSError:
            return False
        finally:
            for file in temporary:
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)
        self._evict(keep=kv_file.stem)
        return True

    def finish(self, give_up: Callable[[], bool] = lambda: False) -> None:
        """Wait until what was saved is on the disk, or until `give_up` says so."""
        if self._writer is not None:
            self._writer.finish(give_up)

    def drop(self) -> None:
        """Do not write what is not written yet."""
        with self._lock:
            if self._unwritten is not None:
                self._unwritten.is_dropped = True
                self._unwritten = None

    def _not_yet_written(self, chat_id: str) -> _Unwritten | None:
        with self._lock:
            unwritten = self._unwritten
        return unwritten if unwritten is not None and unwritten.chat_id == chat_id else None

    def find(self, chat_id: str) -> SavedChat | None:
        """What is saved for `chat_id`; a damaged file is deleted."""
        if unwritten := self._not_yet_written(chat_id):
            return msgspec.structs.replace(unwritten.saved, history=unwritten.saved.history.copy())
        _, text_file = self._files(chat_id)
        try:
            saved = _decoder.decode(text_file.read_bytes())
            saved.history.check()
            if (saved.format, saved.key) != (_FORMAT, self._key):
                raise ValueError("another format")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, msgspec.MsgspecError):
            self.forget(chat_id)
            return None
        return saved

    def recent_texts(self, limit: int, without: str = "") -> list[list[int]]:
        """Tokens of saved chats of this model, the one used last first, at most `limit` in all; not of `without`."""
        _, skipped = self._files(without)
        with_times: list[tuple[float, Path]] = []
        with contextlib.suppress(OSError):
            for file in self._folder.glob(f"*-{self._suffix}.text"):
                with contextlib.suppress(OSError):
                    with_times.append((file.stat().st_mtime, file))
        texts: list[list[int]] = []
        for _, file in sorted(with_times, reverse=True):
            if limit <= 0:
                break
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                saved = _decoder.decode(file.read_bytes()) if file != skipped else None
                if saved is not None and (saved.format, saved.key) == (_FORMAT, self._key):
                    texts.append(saved.history.tokens[:limit])
                    limit -= len(texts[-1])
        return texts

    def restore(self, chat_id: str, saved: SavedChat, sequence: Sequence) -> bool:
        """Load the state that belongs to `saved`.

        On False the sequence is unchanged or empty, and files that are damaged are gone. The checksum comes first:
        llama.cpp checks little of a state and aborts on some contradictions. The sequence's abort flag stops it.
        """
        kv_file, text_file = self._files(chat_id)
        if len(saved.tokens) > sequence.n_ctx or saved.kv_bytes > available_bytes() // 2:
            return False
        unwritten = self._not_yet_written(chat_id)
        try:
            if unwritten is not None and unwritten.saved.tokens == saved.tokens:
                state = unwritten.state
            else:
                if not saved.kv_crc32:  # found before it was written, which it is now
                    saved = self.find(chat_id) or saved
                state = _read(kv_file, saved, sequence.abort.is_set)
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
        if self._not_yet_written(chat_id):
            self.drop()
        for file in self._files(chat_id):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)

    def _evict(self, keep: str) -> None:
        """Delete the pairs that were used longest ago until the folder is within its limit."""
        pairs: dict[str, tuple[float, int]] = {}
        with contextlib.suppress(OSError):
            for file in self._folder.iterdir():
                if file.suffix in (".kv", ".text"):
                    with contextlib.suppress(OSError):
                        info = file.stat()
                        used, size = pairs.get(file.stem, (0.0, 0))
                        pairs[file.stem] = (max(used, info.st_mtime), size + info.st_size)
        total = sum(size for _, size in pairs.values())
        for stem in sorted(pairs, key=lambda s: pairs[s][0]):
            if total <= self._limit:
                return
            if stem == keep:
                continue
            for suffix in (".text", ".kv"):
                with contextlib.suppress(OSError):
                    (self._folder / f"{stem}{suffix}").unlink(missing_ok=True)
            total -= pairs[stem][1]


def _read(file: Path, saved: SavedChat, is_stopped: Callable[[], bool]) -> np.ndarray:
    """The state in `file`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not what `saved` says.
        InterruptedError: `is_stopped` said so, asked before each slice.
    """
    with file.open("rb", buffering=0) as stream:
        if os.fstat(stream.fileno()).st_size != saved.kv_bytes:
            raise ValueError("another size")
        state = np.empty(saved.kv_bytes, np.uint8)
        view, checksum, at = state.data, 0, 0
        while n := stream.readinto(view[at : at + _SLICE]):
            if is_stopped():
                raise InterruptedError
            checksum = zlib.crc32(view[at : at + n], checksum)
            at += n
    if at != saved.kv_bytes or checksum != saved.kv_crc32:
        raise ValueError("another content")
    return state
