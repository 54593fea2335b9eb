"""What the local hub server keeps: repositories, their commits and files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Entry:
    """A file at one commit, with the hash that the hub announces."""

    content: bytes | Path
    size: int
    sha256: str

    def sibling(self, name: str, with_blobs: bool) -> dict[str, Any]:
        if not with_blobs:
            return {"rfilename": name}
        large = {"sha256": self.sha256, "size": self.size, "pointerSize": 134}
        return {"rfilename": name, "size": self.size, "blobId": self.sha256[:40], "lfs": large}


@dataclass
class Repository:
    """`commits`: their files by name; `head` is the newest. `facts` are told by the API as they are."""

    id: str
    gated: bool
    private: bool
    facts: dict[str, Any]
    head: str = ""
    commits: dict[str, dict[str, Entry]] = field(default_factory=dict)

    def files(self, revision: str) -> dict[str, Entry] | None:
        return self.commits.get(self.head if revision == "main" else revision)


def tags(repo: Repository) -> list[str]:
    has_gguf = any(name.endswith(".gguf") for name in repo.commits[repo.head])
    return [*(["gguf"] if has_gguf else []), *repo.facts.get("tags", [])]


def entry_of(content: bytes | Path) -> Entry:
    """Return the entry of a file. Of content over 1 GiB, only the beginning is hashed: such files only test
    resuming."""
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    sha256 = hashlib.sha256()
    for piece in pieces(content, 0, min(size, 1 << 26) if size > 1 << 30 else size, 1 << 20):
        sha256.update(piece)
    return Entry(content, size, sha256.hexdigest())


def pieces(content: bytes | Path, start: int, stop: int, size: int = 1 << 16) -> Iterator[bytes]:
    """Yield bytes `start` to `stop`, `size` at a time."""
    if isinstance(content, bytes):
        yield from (content[at : min(at + size, stop)] for at in range(start, stop, size))
        return
    with content.open("rb") as stream:
        stream.seek(start)
        for at in range(start, stop, size):
            yield stream.read(min(size, stop - at))
