"""Measured windows on disk, so that an interrupted measurement resumes where it was.

One file of JSON lines for each pair of models and text, in the cache folder. A line is appended for every window; a
torn last line is ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cpuchat.files import append_line, delete_oldest, read_small
from cpuchat.quality.messages import Scored, Text

_KEPT_FILES = 50


def measurement_key(base: str, other: str, texts: Sequence[Text], n_ctx: int, engine: str) -> str:
    """Return the name of a measurement. Models are given by `models.fingerprint`, the engine by its version."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (base, other, str(n_ctx), engine):
        digest.update(part.encode() + b"\0")
    digest.update(msgspec.json.encode(texts))
    return digest.hexdigest()


class SavedWindows:
    """The windows of one measurement in `folder`.

    A folder that cannot be written keeps nothing, and no measurement fails because of it.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._file = folder / f"{key}.jsonl"

    def read(self) -> list[Scored]:
        """Return what is saved, each window once."""
        windows: dict[int, Scored] = {}
        with contextlib.suppress(OSError):
            for line in read_small(self._file, 256 << 20).splitlines():
                with contextlib.suppress(ValueError, RecursionError):
                    window = msgspec.json.decode(line, type=Scored)
                    windows[window.window] = window
        return list(windows.values())

    def append(self, window: Scored) -> None:
        """Save one window."""
        with contextlib.suppress(OSError):
            if not self._file.exists():
                self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                delete_oldest(self._file.parent, "*.jsonl", _KEPT_FILES - 1)
                self._file.touch()
            append_line(self._file, msgspec.json.encode(window))

    def delete(self) -> None:
        """Delete all windows."""
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)
