"""Remembers which pairs of model files fit, so that vocabularies are compared once.

`pairs.json` in the cache folder. Losing it costs a tenth of a second for each pair.
"""

from __future__ import annotations

from pathlib import Path

from cpuchat import paths
from cpuchat.files import JsonCache
from cpuchat.models.fingerprint import stat_fingerprint
from cpuchat.models.gguf.header import split_parts

_VERSION = 2
"""Of the rule of `pairing` and of this file; another one is not read."""
MAX_PAIRS = 500
MAX_BYTES = 1 << 20


def pair_key(target: Path, draft: Path) -> str:
    """64 hex digits for two models as they are now.

    Raises:
        OSError: a file (or a part of a split one) is not there.
    """
    return "".join(stat_fingerprint(split_parts(path) or [path]) for path in (target, draft))


class PairCache:
    """Why pairs do not fit, by `pair_key`; "" for those that do. A file that cannot be read counts as empty."""

    def __init__(self, file: Path | None = None) -> None:
        """`file` replaces the one in the cache folder."""
        self._cache = JsonCache(
            file or paths.pairs_file(), str, version=_VERSION, max_entries=MAX_PAIRS, max_bytes=MAX_BYTES
        )
        self._pairs = self._cache.read()
        self._new: dict[str, str] = {}

    def reason(self, key: str) -> str | None:
        """Why the pair does not fit, "" if it does; None when it was not looked at yet."""
        return self._pairs.get(key)

    def remember(self, key: str, reason: str) -> None:
        self._pairs[key] = self._new[key] = reason

    def save(self) -> None:
        """Write what is new. A folder that cannot be written only means that nothing is remembered."""
        if self._new:
            self._cache.put_all(self._new)
            self._new = {}
