"""Where the bytes of a header come from: a file here, or whatever else can be read from any position."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Protocol

from cpuchat.errors import ModelNotFound


class Source(Protocol):
    """Bytes that `parse` reads, front to back, in few large pieces: 1 MiB first, then as much as it has, and so on."""

    @property
    def name(self) -> str:
        """For messages: the file's name."""
        ...

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        ...

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from `offset`; b"" when there are none. Its own errors pass through `parse`."""
        ...


class FileSource:
    """An open file. A context manager.

    Raises:
        ModelNotFound: there is no such file, it may not be read, or it is a folder, a pipe or a device.
    """

    def __init__(self, path: Path) -> None:
        # O_NONBLOCK: opening a pipe that nobody writes to would wait for ever.
        flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            self._handle = os.open(path, flags)
        except OSError as error:
            raise ModelNotFound(f"Cannot open {path}: {error.strerror}.", "Check the path.") from None
        status = os.fstat(self._handle)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._handle)
            raise ModelNotFound(f"Cannot open {path}: it is no file.", "Name a file in GGUF format.")
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
