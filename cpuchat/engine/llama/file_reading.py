"""Reads a model file into the page cache before llama.cpp maps it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Final

from cpuchat.engine.llama.bindings import AbortFlag
from cpuchat.engine.llama.sequence import Aborted
from cpuchat.errors import ModelNotFound
from cpuchat.hardware.numa.mempolicy import current
from cpuchat.hardware.numa.page_cache import missing_ranges
from cpuchat.hardware.numa.residency import prepare_file
from cpuchat.hardware.topology import read_topology
from cpuchat.models.gguf.header import GGUFHeader, split_parts

Progress = Callable[[str, int, int], None]
"""(phase, done, total); phase "reading" or "preparing", bytes."""

_READ_CHUNK: Final = 8 << 20
_PROGRESS_SECONDS: Final = 0.05


def place_pages(header: GGUFHeader) -> list[str]:
    """Re-read file pages that are on other NUMA nodes than this process's policy wants; returns notes for the user."""
    policy = current()
    if policy is None or not policy.places:
        return []
    topology = read_topology()
    parts = split_parts(header.path) or [header.path]
    return list(dict.fromkeys(note for part in parts if (note := prepare_file(part, policy, topology))))


def read_ahead(header: GGUFHeader, on_progress: Progress, abort: AbortFlag) -> None:
    """Read the missing parts of the file into the page cache, with progress and cancellation.

    llama.cpp would do the same inside one mmap call that neither reports progress nor can be cancelled.
    """
    part, on_progress = header.path, throttled(on_progress)
    try:
        missing: list[tuple[Path, int, int]] = []
        for part in split_parts(header.path) or [header.path]:
            ranges = missing_ranges(part)
            missing += [(part, *one) for one in ([(0, part.stat().st_size)] if ranges is None else ranges)]
        total = header.file_size
        done = max(0, total - sum(end - start for _, start, end in missing))
        on_progress("reading", done, total)
        buffer = memoryview(bytearray(_READ_CHUNK if missing else 0))
        for part, start, end in missing:
            with part.open("rb", buffering=0) as file:
                file.seek(start)
                while start < end and (n := file.readinto(buffer[: end - start])):
                    start += n
                    done += n
                    if abort.is_set():
                        raise Aborted
                    on_progress("reading", min(done, total), total)
    except OSError as error:
        raise ModelNotFound(f"Cannot read {part}: {error.strerror}.", "Check permissions and the disk.") from None
    if abort.is_set():
        raise Aborted


def throttled(on_progress: Progress) -> Progress:
    """Limit the calls to one in `_PROGRESS_SECONDS`, and always pass on the last one."""
    last = 0.0

    def pass_on(phase: str, done: int, total: int) -> None:
        nonlocal last
        now = perf_counter()
        if now - last >= _PROGRESS_SECONDS or done >= total:
            last = now
            on_progress(phase, done, total)

    return pass_on
