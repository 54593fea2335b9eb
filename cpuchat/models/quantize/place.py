"""Where a new model file goes: its name, its folder, the room for it, and the unfinished file until it is whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from cpuchat import paths
from cpuchat.errors import DiskFull, UsageError
from cpuchat.models.fit import gigabytes
from cpuchat.models.gguf.header import GGUFHeader, split_parts
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import is_inside
from cpuchat.models.quantize.types import QuantType

PART = ".quantizing"
"""Appended to the name until the file is whole. Not `.part`, which browsers append to what they download."""
_MARGIN_BYTES = 1 << 20  # a forecast leaves out a few added settings


def suggested_path(source: GGUFHeader, kind: QuantType, folder: Path) -> Path:
    """`<model>-Q4_K_M.gguf` in `folder`: the source's name with its quantization and part number replaced."""
    stem = source.path.stem
    if split_parts(source.path):
        stem = stem.rpartition("-of-")[0].rpartition("-")[0]
    old = source.quantization
    for separator in ("-", ".", "_"):
        if old and stem.upper().endswith(separator + old.upper()):
            stem = stem[: -len(old) - 1]
            break
    return folder / f"{stem}-{kind.name}.gguf"


def suggested_folder(source: Path, library: Library) -> Path:
    """Beside `source` if that is the user's own place, else the first folder of the library that can be written.

    Nothing is put into a cache or the package.
    """
    kept = any(is_inside(source.parent, place) for place in (library.cache, paths.demo_dir()))
    places = [*([] if kept else [source.parent]), *library.folders]
    return next((place for place in places if is_folder(place, os.W_OK | os.X_OK)), paths.made_models_dir())


def is_folder(path: Path, mode: int = os.F_OK) -> bool:
    """Whether `path` is a folder that may be used so; False, too, for what cannot be a path."""
    return os.access(f"{path}/.", mode)


def check_place(out: Path, source: GGUFHeader, *, force: bool) -> None:
    """Whether `out` may be made of `source`; our own folder is made if it is not there yet.

    Raises:
        UsageError: it may not, or something is there already and `force` is not given.
    """
    try:
        if out.parent == paths.made_models_dir():
            out.parent.mkdir(parents=True, exist_ok=True)
        if not out.parent.is_dir():
            raise UsageError(f"There is no folder {out.parent}.", "Make it, or choose another place.")
        if out.is_dir():
            raise UsageError(f"{out} is a folder.", "Give the name of a file.")
        if out.exists() and any(part.samefile(out) for part in split_parts(source.path) or [source.path]):
            raise UsageError("A model cannot be quantized into itself.", "Give another name.")
        check_free(out, force=force)
    except OSError as error:
        raise _unwritable(out, error) from None


def check_free(out: Path, *, force: bool) -> None:
    """Raises UsageError when there is a file `out` and `force` is not given."""
    if out.exists() and not force:
        raise UsageError(f"{out} is there already.", "Give another name, or --force to replace it.")


def check_space(part: Path, size: int) -> None:
    """Raises DiskFull when what is missing of `size` bytes does not fit on the disk of `part`."""
    free = shutil.disk_usage(part.parent).free
    if size + _MARGIN_BYTES - part.stat().st_size > free:
        raise DiskFull(
            f"{part.parent} has {gigabytes(free)} GB free; the file needs {gigabytes(size)} GB.",
            "Free some space, or choose another place or a smaller type.",
        )


@contextlib.contextmanager
def part_of(out: Path) -> Iterator[Path]:
    """The unfinished file beside `out`, empty and for us alone; gone afterwards, unless it was renamed.

    Raises:
        UsageError: another program writes it, or the folder cannot be written.
    """
    part = out.with_name(out.name + PART)
    try:
        # A pipe of that name would never open, a link lead elsewhere.
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise _unwritable(part, error) from None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise UsageError(f"{part} is no file.", "Give another name.")
        _lock(file, part, out)
        try:
            os.truncate(file, 0)  # left behind by a program that was killed
            yield part
        finally:
            if _is_still(part, file):
                part.unlink()
    finally:
        os.close(file)


def _lock(file: int, part: Path, out: Path) -> None:
    busy = UsageError(f"Another program writes {out.name} now.", "Wait for it, or give another name.")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise busy from None
    except OSError:
        return  # a file system without locks
    if not _is_still(part, file):  # its owner was done just then
        raise busy


def _is_still(part: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), part.lstat())
    except FileNotFoundError:
        return False


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"Cannot write {path}: {error.strerror}.", "Choose another place or name.")
