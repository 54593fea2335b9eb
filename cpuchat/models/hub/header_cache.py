"""Caches headers of models on the hub, compressed: a header is some MB.

A file's name is the etag of the model file, the hash of its content, so an entry is valid forever.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path

from cpuchat import paths
from cpuchat.files import read_small, write_atomically
from cpuchat.models.gguf.parse import MAX_HEADER
from cpuchat.models.hub.validation import checked_etag

_SUFFIX = ".header"
_LIMIT = 256_000_000
"""Bytes of all headers together; the least recently used go first."""


class HeaderCache:
    """The first bytes of model files, by etag. Disk errors are ignored; an etag that is not a hash raises HubError."""

    def __init__(self, folder: Path | None = None, limit: int = _LIMIT) -> None:
        self._folder = folder or paths.headers_dir()
        self._limit = limit

    def get(self, etag: str) -> bytes | None:
        """Return the first bytes of a file; None when they are not cached, or damaged."""
        file = self._file(etag)
        try:
            unpacker = zlib.decompressobj()
            content = unpacker.decompress(read_small(file, MAX_HEADER), MAX_HEADER)
            if not unpacker.eof:
                return None
            os.utime(file)
        except (OSError, zlib.error):
            return None
        return content

    def put(self, etag: str, content: bytes) -> None:
        with contextlib.suppress(OSError):
            write_atomically(self._file(etag), zlib.compress(content, level=1))
            self._trim()

    def remove(self, etag: str) -> None:
        with contextlib.suppress(OSError):
            self._file(etag).unlink(missing_ok=True)

    def _file(self, etag: str) -> Path:
        return self._folder / f"{checked_etag(etag)}{_SUFFIX}"

    def _trim(self) -> None:
        files = [(file.stat(), file) for file in self._folder.iterdir()]
        files.sort(key=lambda entry: entry[0].st_mtime_ns)
        excess = sum(status.st_size for status, _ in files) - self._limit
        for status, file in files:
            if excess <= 0:
                return
            file.unlink(missing_ok=True)
            excess -= status.st_size
