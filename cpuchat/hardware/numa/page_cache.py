"""Reads which parts of a file are in the page cache, on which NUMA nodes, and evicts them.

Pages of a file go where the policy of the program that reads it *first* says, and stay there: a download or a checksum
decides for every later run. Without privileges only one thing moves them: drop them (posix_fadvise) and read the file
again under the wanted policy. Pages that any process maps are not dropped.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from cpuchat.hardware.cgroups import read_text
from cpuchat.hardware.numa.numa_maps import parse_numa_maps

ROOT = Path("/")

_SAMPLES = 4096
_LOWEST_BIT = bytes(byte & 1 for byte in range(256))
_PAGE = mmap.PAGESIZE
_MISSING = re.compile(b"\0+")


def resident_bytes(path: Path) -> int | None:
    """Return bytes of the file in the page cache; None where that is not known.

    mincore(2). About files that the caller neither owns nor may write the kernel answers "everything" (since Linux
    5.2, against spying on others): of those nothing is known.
    """
    try:
        with _Mapped(path) as mapped:
            return min(sum(mapped.resident()) * _PAGE, mapped.size)
    except OSError:
        return None


def missing_ranges(path: Path) -> list[tuple[int, int]] | None:
    """(start, end) in bytes of the parts that are not in the page cache; None where that is not known."""
    try:
        with _Mapped(path) as mapped:
            resident, size = mapped.resident(), mapped.size
    except OSError:
        return None
    return [(run.start() * _PAGE, min(run.end() * _PAGE, size)) for run in _MISSING.finditer(resident)]


def resident_nodes(path: Path, root: Path = ROOT) -> dict[int, int] | None:
    """Return bytes of the file in the page cache by node; None where that is not known.

    Some thousand pages that are in memory are touched through a mapping (which reads nothing in), and what
    numa_maps says of those is taken for all.
    """
    try:
        with _Mapped(path) as mapped:
            resident = mapped.resident()
            mapped.touch(_spread(resident))
            name = os.path.realpath(path)
            with (root / "proc/self/numa_maps").open(encoding="utf-8", errors="surrogateescape") as lines:
                found = Counter[int]()
                for region in parse_numa_maps(lines):
                    if region.file == name:
                        found.update(region.nodes)
    except OSError:
        return None
    total = min(sum(resident) * _PAGE, mapped.size)
    return {node: total * count // found.total() for node, count in sorted(found.items())}


def evict(path: Path) -> bool:
    """Drop the file from the page cache; returns True when less than 1 % is left, as far as that is known.

    Pages that are not written to disk yet, as after a download, are written first.
    """
    try:
        with path.open("rb") as file:
            with contextlib.suppress(OSError):
                os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size = os.fstat(file.fileno()).st_size
    except (OSError, AttributeError):
        return False
    left = resident_bytes(path)
    return left is not None and left * 100 <= size


def mapped_by(path: Path, root: Path = ROOT) -> list[str]:
    """Return names of the programs that map the file and keep it in memory; those of other users are not visible."""
    name = os.path.realpath(path)
    names: list[str] = []
    for maps in sorted((root / "proc").glob("[0-9]*/maps")):
        try:
            with maps.open(encoding="utf-8", errors="surrogateescape") as lines:
                found = any(line.rstrip("\n").endswith(f" {name}") for line in lines)
        except OSError:
            continue
        if found:
            names.append(f"{read_text(maps.parent / 'comm') or 'a program'} ({maps.parent.name})")
    return names


def _spread(resident: bytes) -> Iterator[int]:
    """Yield indexes of resident pages, spread over the file at uneven steps, which do not alias with interleaving."""
    count = min(_SAMPLES, len(resident))
    for number in range(count):
        first, end = number * len(resident) // count, (number + 1) * len(resident) // count
        page = first + number * 2_654_435_761 % (end - first)
        if resident[page]:
            yield page


class _Mapped:
    """A file mapped for reading. Raises OSError where the kernel can't or won't tell about it.

    Python's mmap does not give the address of a read-only mapping, which mincore needs.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._address: int | None = None

    def __enter__(self) -> _Mapped:
        if sys.platform != "linux":
            raise OSError("supported on Linux only")
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not (os.geteuid() in (0, status.st_uid) or os.access(self.path, os.W_OK)):
                raise PermissionError(f"{self.path} belongs to another user")
            self.size = status.st_size
            self._library = _libc()
            if self.size:
                address = self._library.mmap(None, self.size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
                self._check(address == ctypes.c_void_p(-1).value)
                self._address = address
                # Otherwise touching a page could read in its neighbors.
                self._library.madvise(address, self.size, mmap.MADV_RANDOM)
        return self

    def __exit__(self, *_: object) -> None:
        if self._address is not None:
            self._library.munmap(self._address, self.size)
            self._address = None

    def _check(self, failed: bool) -> None:
        if failed:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def resident(self) -> bytes:
        """Return one byte for each page of the file: 1 when it is in memory."""
        if self._address is None:
            return b""
        pages = ctypes.create_string_buffer(-(-self.size // _PAGE))
        self._check(self._library.mincore(self._address, self.size, pages) != 0)
        return pages.raw.translate(_LOWEST_BIT)

    def touch(self, pages: Iterator[int]) -> None:
        """Enter pages into this process's page table."""
        for page in pages:
            if self._address is not None:
                _ = ctypes.c_char.from_address(self._address + page * _PAGE).value


def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return library
