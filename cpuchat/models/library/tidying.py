"""What a deleted model leaves of a cached repository: empty folders, and what points to revisions that are gone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from cpuchat.models.library.places import is_inside


def tidy(root: Path) -> None:
    """Take away empty folders of the repository `root`, and references to revisions that are not there.

    Such a reference makes other programs call the whole repository corrupted. What cannot be taken away stays.
    """
    _remove_empty(root / "snapshots", root)
    left = {path.name for path in _entries(root / "snapshots")}
    for reference in _files(root / "refs", root):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if reference.read_text(encoding="ascii").strip() not in left:
                reference.unlink()
    for marker in _files(root / ".no_exist", root):  # .no_exist/REVISION/NAME: this revision has no such file
        with contextlib.suppress(OSError):
            if marker.relative_to(root / ".no_exist").parts[0] not in left and not marker.stat().st_size:
                marker.unlink()
    _remove_empty(root, root)


def _remove_empty(folder: Path, root: Path) -> None:
    """Remove `folder` and those in it, as far as they are empty and inside of `root`."""
    for base, _, _ in os.walk(folder, topdown=False):
        if is_inside(Path(base), root):
            with contextlib.suppress(OSError):  # not empty
                Path(base).rmdir()


def _files(folder: Path, root: Path) -> list[Path]:
    """All files below `folder`; none where links lead out of `root`."""
    found = [Path(base, name) for base, _, names in os.walk(folder) for name in names]
    return [file for file in found if is_inside(file.parent, root)]


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
