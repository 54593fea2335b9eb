"""Tells what a file is that is no GGUF file, or only a piece of one, by its first bytes and its name."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

from cpuchat.base.errors import ModelDamaged
from cpuchat.base.text import clean_line

HEAD = 4096
"""Bytes by which `not_gguf` tells what a file is."""
_PIECE = re.compile(r"\.part\d+of\d+$|[.-](?:gguf-)?(?:split|part)-?[a-z]{1,2}$", re.IGNORECASE)
_PARTIAL = re.compile(
    r"\.(?:part|partial|incomplete|crdownload|download|downloadinprogress|aria2|tmp|opdownload|!ut)$", re.IGNORECASE
)


@cache
def _formats() -> list[tuple[re.Pattern[bytes], dict[str, str]]]:
    """Return the entries of formats.toml, each with its expression for the first bytes."""
    text = Path(__file__).with_name("formats.toml").read_text(encoding="utf-8")
    return [(_bytes(one["match"]), one) for one in tomllib.loads(text)["format"]]


def _bytes(expression: str) -> re.Pattern[bytes]:
    return re.compile(expression.encode("ascii"), re.DOTALL | re.IGNORECASE)


def not_gguf(name: str, head: bytes) -> ModelDamaged:
    """Return the error for a file that does not begin as GGUF does. `head`: its first `HEAD` bytes, or all of it."""
    if not head:
        return ModelDamaged(f"{name} is empty.", "Download it again.")
    what, hint = f"bad magic 0x{head[:4].hex()}", how_to_complete(name) or "Choose a .gguf file."
    for pattern, found in _formats():
        if pattern.match(head):
            said = _bytes(found["said"]).search(head) if "said" in found else None
            quoted = clean_line(said[1].decode("utf-8", "replace"))[:80] if said is not None else ""
            what, hint = f"it is {found['what']}{f' ({quoted!r})' if quoted else ''}", found["hint"]
            break
    return ModelDamaged(f"{name} is not a GGUF file: {what}.", hint)


def how_to_complete(name: str) -> str:
    """Return what makes a whole file of one that its name calls a piece or a partial download; "" for other names."""
    if _PIECE.search(name):
        return "It is one of several pieces: join them in their order (`cat PIECES > FILE.gguf`)."
    if _PARTIAL.search(name):
        return "It is a partial download: resume it with the program that began it, which renames it at the end."
    return ""
