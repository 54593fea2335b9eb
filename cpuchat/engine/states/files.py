"""States of conversations on disk, so that a chat continues quickly after a restart.

One file for each conversation and model, named by hashes of both: the states, an index (msgpack) that tells what they
are, and a footer that tells where it is. They contain the conversation, so the folder is private to the user. A state
may have gigabytes: a `DiskWriter` takes it to the disk while nothing is computed, within a `WriteBudget`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from time import monotonic
from typing import BinaryIO, Final

import msgspec
import numpy as np

from cpuchat.base.decoding import prepared
from cpuchat.base.files import atomic_writer
from cpuchat.engine.llama.sequence import Aborted
from cpuchat.engine.states.prompt import SavedPart, State, TokenHistory

BYTES_PER_HOUR: Final = 1 << 30
"""Of saved chats. At sixty answers an hour that is 18 MB each."""
_HOUR: Final = 3600.0
_POLL_SECONDS: Final = 0.05
_LOWEST_PRIORITY: Final = 19


class WriteBudget:
    """Bytes that may be written: `per_hour`, saved up for one hour at most. A write may overdraw the budget, so that a
    larger state is written too, and is paid for afterwards: any hour sees at most two budgets and one state."""

    def __init__(self, per_hour: int = BYTES_PER_HOUR, clock: Callable[[], float] = monotonic) -> None:
        self._per_hour = per_hour
        self._clock = clock
        self._left = float(per_hour)
        self._at = clock()

    def allows(self) -> bool:
        """Return whether something is left now."""
        now = self._clock()
        self._left = min(self._left + (now - self._at) * self._per_hour / _HOUR, self._per_hour)
        self._at = now
        return self._left > 0

    def spend(self, n: int) -> None:
        """Subtract `n` bytes, allowed or not."""
        self.allows()
        self._left -= n


class DiskWriter:
    """Runs one job at a time, which waits between slices of work while the engine computes.

    Create it before the engine's thread is pinned: its thread inherits the CPUs of the creating one. All methods but
    `wait_until_idle` belong to the engine's thread."""

    def __init__(self) -> None:
        self._engine_idle = threading.Event()
        self._engine_idle.set()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._executor.submit(_lower_priority)  # starts the thread now
        self._job: Future[None] = Future()
        self._job.set_result(None)

    @property
    def is_busy(self) -> bool:
        return not self._job.done()

    def start(self, job: Callable[[], None]) -> None:
        """Run `job`, which calls `wait_until_idle` between slices of a few milliseconds, after the jobs before it."""
        self._job = self._executor.submit(_logged, job)

    def wait_until_idle(self) -> None:
        """Wait while the engine computes; called by the job."""
        self._engine_idle.wait()

    def pause(self) -> None:
        """Let the job wait: the engine computes from here on."""
        self._engine_idle.clear()

    def resume(self) -> None:
        """Let the job continue: the engine is idle from here on."""
        self._engine_idle.set()

    def finish(self, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Wait for the job to end, or until `is_cancelled`, which is asked 20 times a second."""
        was_idle = self._engine_idle.is_set()
        self._engine_idle.set()
        while wait((self._job,), _POLL_SECONDS).not_done and not is_cancelled():
            pass
        if not was_idle:
            self._engine_idle.clear()

    def close(self) -> None:
        """Wait for the job, then end the thread."""
        self.resume()
        self._executor.shutdown()


def _lower_priority() -> None:
    if sys.platform == "linux":  # where each thread has its own niceness
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)


def _logged(job: Callable[[], None]) -> None:
    try:
        job()
    except Exception:  # what could not be written costs time only, but it belongs in the log
        traceback.print_exc()


_FOOTER: Final = struct.Struct("<8sQI")  # magic, bytes and checksum of the index before it
_MAGIC: Final = b"cpuchat4"
_MAX_INDEX: Final = 64 << 20
_SLICE: Final = 4 << 20
_STALE_SECONDS: Final = 3600.0


class Index(msgspec.Struct, frozen=True):
    """What is in a file. `parts` are states of its `tokens` (of `token_bytes`), of the draft model `draft_key` too."""

    key: str
    owner: str
    tokens: bytes
    history: TokenHistory
    parts: tuple[SavedPart, ...]
    draft: SavedPart | None = None
    draft_key: str = ""


_decoder = msgspec.msgpack.Decoder(prepared(Index))


class _DroppedError(Exception):
    """The conversation must not get to the disk any more."""


class StateFiles:
    """Files of one model in `folder`; those of all models stay under `limit` bytes, least recently used go first. No
    method raises for a disk that is full, read-only or gone. `key`: everything that makes a state unusable when it
    differs: the model's fingerprint, cache types, flash attention, the engine's commit."""

    def __init__(self, folder: Path, limit: int, key: str, writer: DiskWriter) -> None:
        self._folder = folder
        self.limit = limit
        self._key = key
        self.writer = writer
        self._suffix = hashlib.sha256(key.encode()).hexdigest()[:20]
        self._indexes: dict[Path, tuple[tuple[int, int], Index]] = {}
        self._dropped: set[str] = set()
        self._lock = threading.Lock()  # over `_dropped` and the names of the files
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
            for file in folder.glob(".*"):
                if time.time() - file.stat().st_mtime > _STALE_SECONDS:
                    file.unlink(missing_ok=True)
        self._evict()  # the limit may be lower now

    def _file(self, stem: str) -> Path:
        return self._folder / f"{stem}-{self._suffix}.kv"

    def indexes(self) -> list[tuple[Path, Index]]:
        """Return the files of this model with their indexes, last used first; damaged ones are deleted."""
        found: dict[Path, tuple[tuple[int, int], Index]] = {}
        for file, info in sorted(self._stats(f"*-{self._suffix}.kv"), key=lambda one: -one[1].st_mtime):
            identity, index = self._indexes.get(file, (None, None))
            try:
                if index is None or identity != _identity(info):
                    index = self._read_index(file)
            except FileNotFoundError:
                continue
            except (OSError, ValueError):
                _delete(file)
                continue
            found[file] = _identity(info), index
        self._indexes = found  # at once: the writer's thread reads it
        return [(file, index) for file, (_, index) in found.items()]

    def _read_index(self, file: Path) -> Index:
        """Read an index. Raises OSError, or ValueError (msgspec's too) when it is not ours."""
        with file.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END) - _FOOTER.size
            stream.seek(max(end, 0))
            magic, length, checksum = _FOOTER.unpack(stream.read(_FOOTER.size).ljust(_FOOTER.size, b"\0"))
            if magic != _MAGIC or not length <= min(_MAX_INDEX, end):
                raise ValueError("another format")
            stream.seek(end - length)
            content = stream.read(length)
        if zlib.crc32(content) != checksum:
            raise ValueError("another content")
        index = _decoder.decode(content)
        if index.key != self._key:
            raise ValueError("another key")
        return index

    def _stats(self, pattern: str) -> Iterator[tuple[Path, os.stat_result]]:
        with contextlib.suppress(OSError):
            for file in self._folder.glob(pattern):
                with contextlib.suppress(OSError):
                    yield file, file.stat()

    def read(self, file: Path, part: SavedPart, is_cancelled: Callable[[], bool]) -> np.ndarray | None:
        """Read a state of a file in `indexes`; None when it is gone, or damaged (by its checksum: llama.cpp aborts on
        some contradictions) and now deleted. Raises Aborted: `is_cancelled`, which is asked before each slice."""
        state = np.empty(part.nbytes, np.uint8)
        view, checksum, at = state.data, 0, 0
        try:
            with file.open("rb", buffering=0) as stream:
                identity, _ = self._indexes.get(file, (None, None))  # once: another thread may replace them
                if identity != _identity(os.fstat(stream.fileno())):
                    return None  # written anew meanwhile
                stream.seek(part.at)
                while n := stream.readinto(view[at : at + _SLICE]):
                    if is_cancelled():
                        raise Aborted
                    checksum = zlib.crc32(view[at : at + n], checksum)
                    at += n
            if at == part.nbytes and checksum == part.crc32:
                os.utime(file)
                return state
        except OSError:
            pass
        _delete(file)
        return None

    def touch(self, file: Path) -> None:
        with contextlib.suppress(OSError):
            os.utime(file)

    def write(self, stem: str, states: Sequence[State], draft_key: str) -> None:
        """Begin to write the states of one conversation, the whole one first, in place of what was saved of it. Their
        `file` and `part` are set once they are written."""
        with self._lock:
            self._dropped.discard(stem)
        self.writer.start(lambda: self._write(stem, states, draft_key))

    def _write(self, stem: str, states: Sequence[State], draft_key: str) -> None:
        file, whole = self._file(stem), states[0]
        assert whole.history is not None
        try:
            with contextlib.ExitStack() as renamed, atomic_writer(file, sync=False) as stream:
                everything = (*states, *((whole.draft,) if whole.draft is not None else ()))
                written = [(one, part) for one in everything if (part := self._write_part(stream, stem, one))]
                parts = tuple(part for one, part in written if one is not whole.draft)
                draft = next((part for one, part in written if one is whole.draft), None)
                index = Index(self._key, whole.key.owner, whole.tokens, whole.history, parts, draft, draft_key)
                content = msgspec.msgpack.encode(index)
                stream.write(content + _FOOTER.pack(_MAGIC, len(content), zlib.crc32(content)))
                renamed.enter_context(self._lock)
                if stem in self._dropped:
                    raise _DroppedError
        except (OSError, _DroppedError):
            return
        for one, part in written:
            one.part, one.file = part, file
        self._evict(keep=file)

    def _write_part(self, stream: BinaryIO, stem: str, state: State) -> SavedPart | None:
        """Write a state, one that is only on disk from its file; None: it is gone."""
        data = state.data
        if data is None and state.file is not None and state.part is not None:
            data = self.read(state.file, state.part, lambda: False)
        if data is None:
            return None
        at, checksum, view = stream.tell(), 0, data.data
        for start in range(0, len(view), _SLICE):
            self.writer.wait_until_idle()
            if stem in self._dropped:
                raise _DroppedError
            checksum = zlib.crc32(view[start : start + _SLICE], checksum)
            stream.write(view[start : start + _SLICE])
        return SavedPart(len(state), at, len(view), checksum, state.kind, state.first)

    def drop(self, stem: str) -> None:
        """Give up what is not written yet of a conversation."""
        with self._lock:
            self._dropped.add(stem)

    def forget(self, stem: str) -> None:
        self.drop(stem)
        _delete(self._file(stem))

    def _evict(self, keep: Path | None = None) -> None:
        files = sorted(((info.st_mtime, info.st_size, file) for file, info in self._stats("*.kv")), key=lambda f: f[0])
        total = sum(size for _, size, _ in files)
        for _, size, file in files:
            if total <= self.limit:
                return
            if file != keep:
                _delete(file)
                total -= size


def _delete(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink(missing_ok=True)


def _identity(info: os.stat_result) -> tuple[int, int]:
    """Return what differs once a file was written anew."""
    return info.st_ino, info.st_size
