"""Remembers when each model was loaded last and how fast it answered.

A model is identified by the real paths and sizes of its files: touching a file does not make it another model. Models
that were opened by path outside the searched folders are remembered, too, so that they are listed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from cpuchat.base import paths
from cpuchat.base.files import JsonCache
from cpuchat.measure import peak, store
from cpuchat.measure.subject import Subject
from cpuchat.models.costs import CostLog
from cpuchat.models.file_names import stat_fingerprint
from cpuchat.models.gguf.header import model_files
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import MAX_CPU_WAIT, MIN_TOKENS, Timings
from cpuchat.telemetry.roofline import after_answer

_WHAT: Final = "speed in chats"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """One model. `used` in seconds since 1970; tok/s 0 where not measured.

    `plain_tok_s` is the last plain decoding, `drafted_tok_s` the last answer with drafts."""

    used: float = 0.0
    plain_tok_s: float = 0.0
    drafted_tok_s: float = 0.0


def loaded(models: Iterable[Path]) -> None:
    """Record that these models were loaded now."""
    now = time.time()
    for path in models:
        _change(path, lambda usage: msgspec.structs.replace(usage, used=now))


def answered(model: ModelInfo, timings: Timings, memory: str = "") -> bool:
    """Record the speed of an answer of `model`, what its passes cost, and that memory is faster than was measured.
    Answers of a few tokens say nothing, and those of servers nothing about this engine here. `memory`: the worker's
    memory policy, in the words of `mempolicy`. Returns whether more was read than the known read bandwidth, which is
    raised then."""
    rate = timings.predicted_per_second
    if rate is None or timings.predicted_n < MIN_TOKENS or model.server:
        return False
    changes = {"plain_tok_s": rate}
    if timings.draft_n:
        plain_ms = timings.speculation.plain_ms if timings.speculation is not None else 0.0
        changes = {"drafted_tok_s": rate} | ({"plain_tok_s": 1e3 / plain_ms} if plain_ms else {})
    if (timings.cpu_wait or 0.0) > MAX_CPU_WAIT:  # the rates tell of other programs
        changes = {}
    key = _change(Path(model.path), lambda usage: msgspec.structs.replace(usage, **changes))
    CostLog(model.cpus, memory).answered(model, timings, key)
    known = peak.with_peak(model, memory)
    read = after_answer(known, timings).peak.value
    if read is None or read.bytes_per_s <= known.peak_read:
        return False
    peak.raise_to(read, memory)
    return True


def usages() -> dict[str, Usage]:
    """Return all entries as they are now, oldest first, for `usage_of`."""
    return {one.subject.model[0]: one.value for one in store.find_all(_WHAT, Usage)}


def _change(path: Path, change: Callable[[Usage], Usage]) -> str:
    """Change the entry of a model; returns its key, "" when its file no longer exists."""
    try:
        key = stat_fingerprint(model_files(path), with_times=False)
    except OSError:
        return ""
    store.change(Subject(model=(key,)), _WHAT, Usage, lambda before: change(before or Usage()))
    return key


def usage_of(entries: dict[str, Usage], parts: list[Path]) -> Usage:
    """Return the usage of the model in these files; all zero when it was never used as it is now."""
    try:
        key = stat_fingerprint(parts, with_times=False) if entries else ""
    except OSError:
        key = ""
    return entries.get(key) or Usage()


class RecentModels:
    """`recent_models.json` of the data folder, by path."""

    def __init__(self) -> None:
        self._cache = JsonCache(paths.recent_models_file(), float, version=1, max_entries=50)

    def files(self) -> list[Path]:
        """Return those that exist, the latest first."""
        return list(map(Path, filter(os.path.isfile, reversed(self._cache.read()))))

    def add(self, path: Path) -> None:
        """Record that `path` was opened now."""
        self._cache.put({str(path): time.time()})
