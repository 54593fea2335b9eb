"""Measures how fast a file can be read from its disk."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from time import perf_counter
from typing import Final

_CHUNK: Final = 4 << 20
_BYTES: Final = 64 << 20
_MOST_SECONDS: Final = 1.0


def read_rate(path: Path) -> float | None:
    """Return bytes per second of reading the middle of a file past the page cache, in large pieces.

    At most 64 MB, and not much longer than a second. None where the system or the file system has no such reads
    (O_DIRECT: tmpfs has none before Linux 6.6), or for small files.
    """
    flag = getattr(os, "O_DIRECT", 0)
    try:
        file = os.open(path, os.O_RDONLY | flag)
    except OSError:
        return None
    try:
        start = os.fstat(file).st_size // 2 // _CHUNK * _CHUNK
        with mmap.mmap(-1, _CHUNK) as buffer:  # aligned, as O_DIRECT wants it
            done, began = 0, perf_counter()
            while flag and done < _BYTES and perf_counter() - began < _MOST_SECONDS:
                if os.preadv(file, [buffer], start + done) < _CHUNK:
                    break
                done += _CHUNK
            return done / (perf_counter() - began) if done else None
    except OSError:
        return None
    finally:
        os.close(file)
