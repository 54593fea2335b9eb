"""Verifies the content of model files by the hash that is their name in the Hugging Face cache."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from cpuchat.errors import ModelDamaged
from cpuchat.models.library.model import LocalModel
from cpuchat.models.library.places import linked

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total). An exception from it ends the check."""

_HASH = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
_CHUNK = 4 << 20
_MAX_LINKS = 8  # from a folder of the user to the cache, there to `blobs/`, from there to what repositories share


class Verification(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check; `words` explain it. "unchecked": there is no checksum to compare with."""

    model: LocalModel
    state: Literal["verified", "damaged", "unchecked"]
    words: str


def check_content(parts: list[Path], progress: Progress) -> tuple[Literal["verified", "damaged", "unchecked"], str]:
    """Read all of a model's files and compare their hashes: about 1 GB/s where the disk is that fast.

    Raises:
        ModelDamaged: a file is missing or cannot be read.
    """
    try:
        announced = [_announced(part) for part in parts]
        total = sum(part.stat().st_size for part in parts)
        if not all(announced):
            return "unchecked", "no checksum known: not in the Hugging Face cache"
        done = 0
        for part, wanted in zip(parts, announced, strict=True):
            if _digest(part, wanted, lambda n, before=done: progress(before + n, total)) != wanted:
                return "damaged", f"{part.name} is damaged: its checksum differs from the published one."
            done += part.stat().st_size
    except OSError as error:
        raise ModelDamaged(f"Cannot read {error.filename}: {error.strerror}.", "Check the disk.") from None
    return "verified", f"{'SHA-256' if len(announced[0]) == 64 else 'git hash'} matches"


def _announced(part: Path) -> str:
    """Return the hash under which the cache stores a file: SHA-256 for large ones, else git's; "" outside the cache."""
    for _ in range(_MAX_LINKS):
        if part.parent.name == "blobs" and _HASH.fullmatch(part.name):
            return part.name
        if not part.is_symlink():
            break
        part = linked(part)
    return ""


def _digest(part: Path, wanted: str, progress: Callable[[int], None]) -> str:
    with part.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256() if len(wanted) == 64 else hashlib.sha1(b"blob %d\0" % size)
        done = 0
        while piece := file.read(_CHUNK):
            digest.update(piece)
            done += len(piece)
            progress(done)
    return digest.hexdigest()
