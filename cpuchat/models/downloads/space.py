"""Room on the disk: looked for before a download begins, and told apart from other faults when it runs out."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from cpuchat.errors import CpuchatError, DiskFull, DownloadFailed
from cpuchat.models.fit import gigabytes
from cpuchat.paths import shown

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_ELSEWHERE = "set HF_HUB_CACHE to a folder on another disk."


def free_bytes(folder: Path) -> int:
    """What this user may still write on the file system that `folder` is, or will be, on."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_space(cache: Path, missing: int, reserved: int) -> None:
    """Raises DiskFull when `missing` bytes do not fit beside the `reserved` ones of other downloads."""
    free = free_bytes(cache)
    if not missing or missing + reserved <= free:
        return
    others = f", {gigabytes(reserved)} GB of them for other downloads" if reserved else ""
    raise DiskFull(
        f"{gigabytes(missing)} GB more are needed, and {shown(cache)} has {gigabytes(free)} GB free{others}.",
        f"Delete models that you don't use (`cpuchat models delete`), or {_ELSEWHERE}",
    )


def write_error(error: OSError, cache: Path, missing: int = 0) -> CpuchatError:
    """The typed error for a file of the cache that could not be written; `missing` bytes were still to come."""
    if error.errno in _NO_ROOM:
        still = f"; {gigabytes(missing)} GB were still to come" if missing else ""
        return DiskFull(f"The disk of {shown(cache)} is full{still}.", "Make room, then resume: what arrived is kept.")
    if error.errno == errno.EFBIG:  # FAT ends at 4 GB
        return DiskFull(f"{shown(cache)} takes no file that large.", f"Raise that limit, or {_ELSEWHERE}")
    where = shown(Path(error.filename or cache))
    return DownloadFailed(f"Cannot write {where}: {error.strerror}.", "Check that folder, then resume.")
