"""Remembers which pairs of model files fit, so that vocabularies are compared once.

`pairs.json` in the cache folder. A file is known by its real path, size and time of change: cheaper than any look
into it. Losing the cache costs a tenth of a second for each pair.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from cpuchat import paths
from cpuchat.models.gguf import split_parts
from cpuchat.settings import write_atomically

_VERSION = 1
"""Of the rule of `pairing` and of this file; another one is not read."""
MAX_PAIRS = 500
MAX_BYTES = 1 << 20


class _Stored(msgspec.Struct):
    version: int
    pairs: dict[str, str]


def pair_key(target: Path, draft: Path) -> str:
    """32 hex digits for two files as they are now.

    Raises:
        OSError: a file (or a part of a split one) is not there.
    """
    digest = hashlib.blake2b(digest_size=16)
    for path in (target, draft):
        for part in split_parts(path) or [path]:
            status = part.stat()
            digest.update(os.fsencode(os.path.realpath(part)))
            digest.update(f"|{status.st_size}|{status.st_mtime_ns}|".encode())
        digest.update(b"\0")
    return digest.hexdigest()


class PairCache:
    """Why pairs do not fit, by `pair_key`; "" for those that do. A file that cannot be read counts as empty."""

    def __init__(self, file: Path | None = None) -> None:
        """`file` replaces the one in the cache folder."""
        self._file = file or paths.pairs_file()
        self._pairs = self._read()
        self._changed = False

    def _read(self) -> dict[str, str]:
        try:
            if self._file.stat().st_size > MAX_BYTES:
                return {}
            stored = msgspec.json.decode(self._file.read_bytes(), type=_Stored)
        except (OSError, ValueError):  # msgspec's errors are ValueErrors
            return {}
        return stored.pairs if stored.version == _VERSION else {}

    def reason(self, key: str) -> str | None:
        """Why the pair does not fit, "" if it does; None when it was not looked at yet."""
        return self._pairs.get(key)

    def remember(self, key: str, reason: str) -> None:
        self._pairs[key] = reason
        while len(self._pairs) > MAX_PAIRS:
            del self._pairs[next(iter(self._pairs))]  # the oldest
        self._changed = True

    def save(self) -> None:
        """Write what is new. A folder that cannot be written only means that nothing is remembered."""
        if not self._changed:
            return
        text = msgspec.json.encode(_Stored(version=_VERSION, pairs=self._pairs)).decode()
        try:
            write_atomically(self._file, text)
        except OSError:
            return
        self._changed = False
