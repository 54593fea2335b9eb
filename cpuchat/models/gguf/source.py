"""Sources of header bytes: a local file, or anything else that can be read from any position."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Protocol

from cpuchat.errors import ModelNotFound


class Source(Protocol):
    """Bytes that `parse` reads front to back in few large pieces: 1 MiB first, then doubling."""

    @property
    def name(self) -> str:
        """Return the file's name, for messages."""
        ...

    @property
    def size(self) -> int:
        """Return bytes of the whole file."""
        ...

    def read(self, offset: int, count: int) -> bytes:
        """Return up to `count` bytes from `offset`; b"" at the end. Its errors pass through `parse`."""
        ...


class FileSource:
    """An open file; a context manager.

    Raises:
        ModelNotFound: it does not exist, may not be read, or is a folder, a pipe or a device.
    """

    def __init__(self, path: Path) -> None:
        # O_NONBLOCK: opening a pipe without a writer would block forever.
        flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            self._handle = os.open(path, flags)
        except OSError as error:
            raise ModelNotFound(f"Cannot open {path}: {error.strerror}.", "Check the path.") from None
        status = os.fstat(self._handle)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._handle)
            raise ModelNotFound(f"Cannot open {path}: not a regular file.", "Choose a .gguf file.")
        self.name = path.name
        self.size = status.st_size

    def read(self, offset: int, count: int) -> bytes:
        return os.pread(self._handle, count, offset)

    def __enter__(self) -> FileSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._handle)
