"""Remembers models that were opened by path outside the searched folders, so that they are listed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from cpuchat import paths
from cpuchat.files import JsonCache


class RecentModels:
    """`recent_models.json` of the data folder, by path. Files that no longer exist drop out."""

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """`file` replaces the one in the data folder."""
        self._cache = JsonCache(file or paths.recent_models_file(), float, version=1, max_entries=50)
        self._clock = clock

    def files(self) -> list[Path]:
        """Return those that exist, the latest first."""
        return [path for path in map(Path, reversed(self._cache.read())) if _is_file(path)]

    def add(self, path: Path) -> None:
        """Record that `path` was opened now."""

        def put_last(entries: dict[str, float]) -> None:
            for name in [name for name in entries if name == str(path) or not _is_file(Path(name))]:
                del entries[name]
            entries[str(path)] = self._clock()

        self._cache.update(put_last)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
