"""Disk space: checked before a download, and distinguished from other faults when it runs out."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from cpuchat.errors import CpuchatError, DiskFull, DownloadFailed
from cpuchat.models.fit import gigabytes
from cpuchat.paths import shown

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_ELSEWHERE = "set HF_HUB_CACHE to a folder on another disk."


def free_bytes(folder: Path) -> int:
    """Return what this user may still write on the file system that holds `folder`, or will."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_space(cache: Path, missing: int, reserved: int) -> None:
    """Raise DiskFull when `missing` bytes do not fit beside the `reserved` ones of other downloads."""
    free = free_bytes(cache)
    if not missing or missing + reserved <= free:
        return
    others = f" and {gigabytes(reserved)} GB for other downloads" if reserved else ""
    raise DiskFull(
        f"Not enough disk space: {gigabytes(missing)} GB needed{others}, {gigabytes(free)} GB free in {shown(cache)}.",
        f"Delete models you don't use (`cpuchat models delete`), or {_ELSEWHERE}",
    )


def write_error(error: OSError, cache: Path, missing: int = 0) -> CpuchatError:
    """Return the typed error for a failed write to the cache, with `missing` bytes still to download."""
    if error.errno in _NO_SPACE:
        still = f", {gigabytes(missing)} GB still to download" if missing else ""
        return DiskFull(f"Disk full: {shown(cache)}{still}.", "Free some space, then resume: the partial file is kept.")
    if error.errno == errno.EFBIG:  # FAT ends at 4 GB
        limit = f"The file is too large for the file system of {shown(cache)}."
        return DiskFull(limit, f"Raise the file size limit, or {_ELSEWHERE}")
    where = shown(Path(error.filename or cache))
    return DownloadFailed(f"Cannot write {where}: {error.strerror}.", "Check that folder, then resume.")
