"""The one atomic file writer, and the one JSON cache that several processes share."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import CpuchatError, UsageError

try:
    import fcntl
except ImportError:  # no such locks on this system: the last writer wins
    fcntl = None

LOCK_SECONDS = 2.0
"""Seconds to wait for another process that changes the same file. That takes milliseconds; after this it counts as
hung."""

_OPEN = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)  # without a wait for a pipe
_MAX_DEPTH, MAX_FOLDERS = 100, 50_000  # of a walk through folders

T = TypeVar("T")


@contextlib.contextmanager
def atomic_writer(file: Path, *, mode: int = 0o600, sync: bool = True) -> Iterator[BinaryIO]:
    """Write a temporary file beside `file`, then rename it over `file`.

    A crash leaves the old or the new content, never half of one; an exception inside the block leaves the old one.
    `mode`: permissions of the file, whatever the umask. `sync`: fsync before the rename, so that the content also
    survives a power failure. Raises OSError: the folder or the file cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # mkstemp never follows a link that someone else put there: the writer may run as root.
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb", buffering=1 << 20) as stream:
            yield stream
            stream.flush()
            os.fchmod(handle, mode)
            if sync:
                os.fsync(handle)
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def check_place(file: Path, *, force: bool) -> None:
    """Check whether a file may be made where the user wants it. Raises UsageError: it is a folder or in none, or exists
    and `force` is not given; OSError: a folder cannot be looked into."""
    if not file.absolute().parent.is_dir():
        raise UsageError(f"There is no folder {file.parent}.", "Create it, or choose another folder.")
    if file.is_dir():
        raise UsageError(f"{file} is a folder.", "Give a file name.")
    if file.exists() and not force:
        raise UsageError(f"{file} exists.", "Choose another name, or add --force to overwrite it.")


def write_atomically(file: Path, content: str | bytes, *, mode: int = 0o600, sync: bool = True) -> None:
    """Replace the content of `file` as `atomic_writer` does; text is written as UTF-8."""
    with atomic_writer(file, mode=mode, sync=sync) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def write_named(file: Path, content: str | bytes, *, force: bool) -> None:
    """Write a file that the user named. Raises UsageError as `check_place`; CpuchatError: it cannot be written."""
    try:
        check_place(file, force=force)
        write_atomically(file, content)
    except OSError as error:
        raise CpuchatError(f"Cannot write {file}: {error.strerror}.", "Choose another file.") from None


def read_small(file: Path, max_size: int = 1 << 20) -> bytes:
    """Read a small file. Raises OSError: it cannot be read, is not a regular file (a pipe might never end), or is
    larger than `max_size` bytes."""
    handle = os.open(file, _OPEN)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(file))
        with os.fdopen(handle, "rb", closefd=False) as stream:
            data = stream.read(min(max_size, status.st_size or max_size) + 1)  # files of /proc have no size
    finally:
        os.close(handle)
    if len(data) > max_size:
        limit = f"{max_size >> 20} MiB" if max_size >> 20 else f"{max_size >> 10} KiB"
        raise OSError(errno.EFBIG, f"larger than {limit}", str(file))
    return data


def read_json(file: Path, decode: Callable[[bytes], T], max_size: int = 1 << 20) -> T:
    """Decode a small file. Raises OSError as `read_small`; ValueError (msgspec's errors are such): another content."""
    try:
        return decode(read_small(file, max_size))
    except RecursionError:
        raise ValueError(f"{file} is nested too deep") from None


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold an advisory lock on `path`, a file or a folder: one process at a time changes what it stands for.

    The lock ends with its process. A hung process does not block others: after `LOCK_SECONDS` its lock is ignored, and
    at worst one of two changes is lost. Raises OSError: `path` cannot be opened."""
    handle = os.open(path, os.O_RDONLY)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.002)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool:
    """Return whether another process holds a lock on `path`; False where that cannot be determined."""
    try:
        with os.fdopen(os.open(path, _OPEN), "rb") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def walk(top: Path, max_folders: int = MAX_FOLDERS) -> Iterator[tuple[Path, list[str]]]:
    """Yield `top` and the folders below it, each with the names of its files, sorted.

    Follows links, but enters no folder twice: links can form loops. Left out are hidden folders, those that cannot be
    read, and those beyond `_MAX_DEPTH` and `max_folders`."""
    seen: set[tuple[int, int]] = set()
    left = [(top, 0)]
    while left:
        folder, depth = left.pop()
        names: list[str] = []
        below: list[tuple[Path, int]] = []
        try:
            with os.scandir(folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError:
            continue
        for one in found:
            key = None  # what identifies a folder by whatever path
            with contextlib.suppress(OSError):
                if one.is_dir():
                    key = (status := one.stat()).st_dev, status.st_ino
            if key is None:
                names.append(one.name)
            elif not one.name.startswith(".") and key not in seen and depth < _MAX_DEPTH and len(seen) < max_folders:
                seen.add(key)
                below.append((folder / one.name, depth + 1))
        yield folder, names
        left += reversed(below)


class _Content(msgspec.Struct, Generic[T]):
    version: int
    entries: dict[str, T]


class JsonCache(Generic[T]):
    """Entries of one type by key in a JSON file, the oldest first; only the newest `max_entries` are kept.

    A file that is missing, damaged, of another `version` or larger than `max_bytes` counts as empty. Losing the file
    costs time and is never an error: a folder that cannot be written only means that nothing is cached, and nothing
    waits for the disk."""

    def __init__(self, file: Path, kind: type[T], *, version: int, max_entries: int, max_bytes: int = 1 << 20) -> None:
        self.file = file
        self._decoder = msgspec.json.Decoder(prepared(_Content[kind]))
        self._version = version
        self._max_entries = max_entries
        self._max_bytes = max_bytes

    def read(self) -> dict[str, T]:
        """Return all entries, the oldest first."""
        try:
            content = read_json(self.file, self._decoder.decode, self._max_bytes)
        except (OSError, ValueError):
            return {}
        return content.entries if content.version == self._version else {}

    def update(self, change: Callable[[dict[str, T]], object]) -> None:
        """Let `change` edit the current entries under a lock, so that nothing another process wrote is lost."""
        folder = self.file.parent
        with contextlib.suppress(OSError, UnicodeEncodeError):  # the name of a file may be no text
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with file_lock(folder):
                entries = self.read()
                change(entries)
                while len(entries) > self._max_entries:
                    del entries[next(iter(entries))]
                write_atomically(self.file, msgspec.json.encode(_Content(self._version, entries)), sync=False)

    def put(self, values: dict[str, T]) -> None:
        """Store `values` as the newest entries."""

        def replace(entries: dict[str, T]) -> None:
            for key in values:
                entries.pop(key, None)
            entries.update(values)

        self.update(replace)

    def remove(self, key: str) -> None:
        """Remove an entry, if there is one."""
        self.update(lambda entries: entries.pop(key, None))
