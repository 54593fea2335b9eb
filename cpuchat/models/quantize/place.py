"""Places a new model file: name, folder, disk space, and the partial file until it is complete."""

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
"""Suffix until the file is complete. Not `.part`, which browsers use for downloads."""
_MARGIN_BYTES = 1 << 20  # a forecast leaves out a few added metadata entries


def suggested_path(source: GGUFHeader, kind: QuantType, folder: Path) -> Path:
    """Return `<model>-Q4_K_M.gguf` in `folder`: the source's name with its quantization and part number replaced."""
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
    """Return the folder of `source` if it is the user's, else the first writable folder of the library.

    Nothing is put into a cache or the package.
    """
    kept = any(is_inside(source.parent, place) for place in (library.cache, paths.demo_dir()))
    places = [*([] if kept else [source.parent]), *library.folders]
    return next((place for place in places if is_folder(place, os.W_OK | os.X_OK)), paths.made_models_dir())


def is_folder(path: Path, mode: int = os.F_OK) -> bool:
    """Return whether `path` is a folder with access `mode`; False also for an invalid path."""
    return os.access(f"{path}/.", mode)


def check_place(out: Path, source: GGUFHeader, *, force: bool) -> None:
    """Check whether `out` may be made from `source`; creates cpuchat's own model folder.

    Raises:
        UsageError: it may not, or it exists and `force` is not given.
    """
    try:
        if out.parent == paths.made_models_dir():
            out.parent.mkdir(parents=True, exist_ok=True)
        if not out.parent.is_dir():
            raise UsageError(f"There is no folder {out.parent}.", "Create it, or choose another folder.")
        if out.is_dir():
            raise UsageError(f"{out} is a folder.", "Give a file name.")
        if out.exists() and any(part.samefile(out) for part in split_parts(source.path) or [source.path]):
            raise UsageError("A model cannot be quantized into itself.", "Choose another name.")
        check_free(out, force=force)
    except OSError as error:
        raise _unwritable(out, error) from None


def check_free(out: Path, *, force: bool) -> None:
    """Raise UsageError when `out` exists and `force` is not given."""
    if out.exists() and not force:
        raise UsageError(f"{out} exists.", "Choose another name, or add --force to overwrite it.")


def check_space(part: Path, size: int) -> None:
    """Raise DiskFull when the rest of `size` bytes does not fit on the disk of `part`."""
    free = shutil.disk_usage(part.parent).free
    if size + _MARGIN_BYTES - part.stat().st_size > free:
        raise DiskFull(
            f"Not enough disk space: the file needs {gigabytes(size)} GB, {gigabytes(free)} GB free in {part.parent}.",
            "Free some space, or choose another folder or a smaller type.",
        )


@contextlib.contextmanager
def part_of(out: Path) -> Iterator[Path]:
    """Yield the partial file beside `out`, empty and locked; deleted afterwards, unless it was renamed.

    Raises:
        UsageError: another program writes it, or the folder cannot be written.
    """
    part = out.with_name(out.name + PART)
    try:
        # Neither wait for a pipe of that name nor follow a link.
        file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise _unwritable(part, error) from None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise UsageError(f"{part} is not a regular file.", "Choose another name.")
        _lock(file, part, out)
        try:
            os.truncate(file, 0)  # left by a killed process
            yield part
        finally:
            if _is_still(part, file):
                part.unlink()
    finally:
        os.close(file)


def _lock(file: int, part: Path, out: Path) -> None:
    busy = UsageError(f"Another program is writing {out.name}.", "Wait for it, or choose another name.")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise busy from None
    except OSError:
        return  # a file system without locks
    if not _is_still(part, file):  # its owner has just finished
        raise busy


def _is_still(part: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.fstat(file), part.lstat())
    except FileNotFoundError:
        return False


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"Cannot write {path}: {error.strerror}.", "Choose another folder or name.")
