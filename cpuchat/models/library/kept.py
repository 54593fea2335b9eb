"""Small JSON files in the cache folder that several programs may write. Losing one costs time, never an error."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from cpuchat.settings import locked, write_atomically

try:
    import fcntl
except ImportError:  # no such locks on this system: the last writer wins
    fcntl = None

T = TypeVar("T")


class _File(msgspec.Struct, Generic[T]):
    version: int
    entries: dict[str, T]


class Kept(Generic[T]):
    """Entries of one type by key, the newest `most` of them.

    What is damaged, of another version or longer than `max_bytes` counts as empty.
    """

    def __init__(self, file: Path, kind: type[T], *, version: int, most: int, max_bytes: int) -> None:
        self._file = file
        self._decoder = msgspec.json.Decoder(_File[kind])
        self._version = version
        self._most = most
        self._max_bytes = max_bytes

    def read(self) -> dict[str, T]:
        """All entries, the oldest first."""
        try:
            if self._file.stat().st_size > self._max_bytes:
                return {}
            stored = self._decoder.decode(self._file.read_bytes())
        except (OSError, ValueError):  # msgspec's errors are ValueErrors
            return {}
        return stored.entries if stored.version == self._version else {}

    def change(self, change: Callable[[dict[str, T]], None]) -> None:
        """Let `change` alter the entries as they are now; what another program wrote meanwhile stays.

        A folder that cannot be written only means that nothing is remembered.
        """
        with contextlib.suppress(OSError), self._locked():
            entries = self.read()
            change(entries)
            while len(entries) > self._most:
                del entries[next(iter(entries))]
            text = msgspec.json.encode(_File(self._version, entries)).decode()
            write_atomically(self._file, text)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One program at a time."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        lock = self._file.with_suffix(".lock")
        lock.touch()
        with locked(lock):
            yield


def is_locked(lock: Path) -> bool:
    """Whether a program holds the lock that is this file; False where that cannot be told."""
    try:
        with lock.open("rb") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def identity(parts: list[Path], *, with_times: bool = True) -> str:
    """32 hex digits for the files of a model as they are now: real paths, sizes and times of change.

    Raises:
        OSError: one of them is not there.
    """
    import hashlib

    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        status = part.stat()
        digest.update(os.fsencode(os.path.realpath(part)))
        digest.update(f"|{status.st_size}|{status.st_mtime_ns if with_times else ''}|".encode())
    return digest.hexdigest()
