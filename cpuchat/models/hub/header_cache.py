"""Headers of models on the hub, kept compressed in the cache folder: a header is some MB, and no file changes its own.

A file's name is the etag of the model file, the hash of its content, so what was kept once is right for ever.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path

from cpuchat import paths
from cpuchat.files import write_atomically
from cpuchat.models.gguf.parse import MAX_HEADER
from cpuchat.models.hub.names import checked_etag

_SUFFIX = ".header"
_LIMIT = 256_000_000
"""Bytes of all kept headers together; those that were used longest ago go first."""


class HeaderCache:
    """The first bytes of model files, by etag. No method raises for a disk that is full, read-only or gone; each raises
    HubError for an etag that is no hash."""

    def __init__(self, folder: Path | None = None, limit: int = _LIMIT) -> None:
        self._folder = folder or paths.headers_dir()
        self._limit = limit

    def get(self, etag: str) -> bytes | None:
        """None when it is not kept, or damaged."""
        file = self._file(etag)
        try:
            unpacker = zlib.decompressobj()
            content = unpacker.decompress(file.read_bytes(), MAX_HEADER)
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

    def forget(self, etag: str) -> None:
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
