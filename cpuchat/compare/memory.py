"""Memory of two workers together: pages that both map are counted once."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_RSS = re.compile(r"^Rss: +(\d{1,15}) kB", re.MULTILINE)
_REGION = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Resident bytes of a worker: `own` is not mapped from a model (KV cache, buffers, repacked weights, the program),
    `files` the mapped model files by their real path."""

    own: int
    files: dict[str, int]

    @property
    def total(self) -> int:
        """Return what this worker would take alone."""
        return self.own + sum(self.files.values())


@dataclass(frozen=True, slots=True)
class MemoryTogether:
    """`shared` bytes of weights are mapped by both workers and counted once in `total`."""

    total: int
    shared: int


def worker_memory(pid: int, files: Iterable[Path] = (), root: Path = ROOT) -> WorkerMemory | None:
    """Return the memory of `pid`, which may map the model `files`. None where it cannot be read (not Linux, ended).

    The kernel walks the page tables for it: milliseconds for each gigabyte. Ask in a thread.
    """
    names = {os.path.realpath(file) for file in files}
    folder = root / "proc" / str(pid)
    try:
        total = _resident((folder / "smaps_rollup").read_text(encoding="utf-8"))
        regions = (folder / "smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    if not total:
        return None
    mapped: dict[str, int] = {}
    _, *parts = _REGION.split(regions)
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if name in names:
            mapped[name] = mapped.get(name, 0) + _resident(body)
    return WorkerMemory(total - sum(mapped.values()), mapped)


def together(a: WorkerMemory, b: WorkerMemory) -> MemoryTogether:
    """Return the memory of both: pages of a file that both have mapped exist once."""
    shared = sum(min(size, b.files[name]) for name, size in a.files.items() if name in b.files)
    return MemoryTogether(a.total + b.total - shared, shared)


def _resident(text: str) -> int:
    """Return the bytes that one region's fields name; 0 when they do not."""
    found = _RSS.search(text)
    return int(found[1]) << 10 if found else 0
