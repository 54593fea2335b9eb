"""Remembers when each model was loaded last and how fast it answered: `usage.json` of the cache folder.

A model is identified by the real paths and sizes of its files: touching a file does not make it another model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from cpuchat import paths
from cpuchat.files import JsonCache
from cpuchat.models.fingerprint import stat_fingerprint
from cpuchat.models.library.places import model_files
from cpuchat.protocol import ModelInfo
from cpuchat.telemetry.roofline import OFF, PARTLY_CACHED
from cpuchat.telemetry.traffic import pass_bytes
from cpuchat.timings import LEAST_TOKENS, Timings

_MIN_TOKENS = 64
_MAX_CPU_WAIT = 0.05
"""Share of the time that threads may have waited for a core."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """One model. `used` in seconds since 1970; tok/s 0 where not measured.

    `plain_tok_s` is the last plain decoding, `drafted_tok_s` the last answer with drafts. `share` is the best
    utilization of the read bandwidth `peak` (bytes per second) by plain decoding, which read `per_token` bytes for a
    token, while nothing else wanted the cores (0: not known).
    """

    used: float = 0.0
    quantization: str = ""
    plain_tok_s: float = 0.0
    share: float = 0.0
    per_token: float = 0.0
    peak: float = 0.0
    drafted_tok_s: float = 0.0


class Utilization(NamedTuple):
    """The `share` of the read bandwidth that plain decoding reached with a model that reads `per_token` bytes."""

    quantization: str
    per_token: float
    share: float


class UsageLog:
    """Reads and writes the file; both take milliseconds. Several programs may do so at once."""

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """`file` replaces the one in the cache folder."""
        self._cache = JsonCache(file or paths.usage_file(), Usage, version=1, max_entries=1_000)
        self._clock = clock

    def loaded(self, models: Iterable[Path]) -> None:
        """Record that these models were loaded now."""
        now = self._clock()
        for path in models:
            self._change(path, lambda usage: msgspec.structs.replace(usage, used=now))

    def answered(self, model: ModelInfo, timings: Timings) -> None:
        """Record the speed of an answer of `model`. Answers of a few tokens say nothing about speed."""
        rate = timings.predicted_per_second
        if rate is None or timings.predicted_n < LEAST_TOKENS:
            return
        figures = timings.speculation
        plain = rate
        if timings.draft_n:
            plain = 1e3 / figures.plain_ms if figures is not None and figures.plain_ms else 0.0

        def changed(usage: Usage) -> Usage:
            changes: dict[str, float | str] = {"quantization": model.quantization}
            if timings.draft_n:
                changes["drafted_tok_s"] = rate
            if plain:
                changes["plain_tok_s"] = plain
            if measured := _utilization(model, timings):
                best = usage.share if usage.peak == model.peak_read else 0.0
                share = max(measured.share, best)
                changes |= {"share": share, "per_token": measured.per_token, "peak": model.peak_read}
            return msgspec.structs.replace(usage, **changes)

        self._change(Path(model.path), changed)

    def read(self) -> UsageSnapshot:
        """Return all entries as they are now."""
        return UsageSnapshot(self._cache.read())

    def _change(self, path: Path, change: Callable[[Usage], Usage]) -> None:
        try:
            key = stat_fingerprint(model_files(path), with_times=False)
        except OSError:  # it no longer exists
            return

        def put_last(entries: dict[str, Usage]) -> None:
            entries[key] = change(entries.pop(key, Usage()))

        self._cache.update(put_last)


class UsageSnapshot:
    """The entries of the file at one moment, oldest first."""

    def __init__(self, entries: dict[str, Usage]) -> None:
        self._entries = entries

    def of(self, parts: list[Path]) -> Usage:
        """Return the usage of the model in these files; all zero when it was never used as it is now."""
        try:
            key = stat_fingerprint(parts, with_times=False) if self._entries else ""
        except OSError:
            key = ""
        return self._entries.get(key) or Usage()

    def utilizations(self) -> list[Utilization]:
        """Return the bandwidth utilization of every model whose plain decoding was measured."""
        known = (usage for usage in self._entries.values() if usage.share > 0)
        return [Utilization(usage.quantization, usage.per_token, usage.share) for usage in known]


def _utilization(model: ModelInfo, timings: Timings) -> Utilization | None:
    """Compute the bandwidth utilization of plain decoding.

    None for an answer with drafts, a short one, and one beside other programs; where weights come partly from the L3
    caches; where the bandwidth was not measured, is that of other cores (a draft model's) too, or was measured wrong.
    """
    rate = timings.predicted_per_second
    if timings.draft_n or rate is None or timings.predicted_n <= _MIN_TOKENS:
        return None
    if timings.cpu_wait is None or timings.cpu_wait > _MAX_CPU_WAIT:
        return None
    if model.traffic is None or model.peak_read <= 0 or not set(model.draft_cpus) <= set(model.cpus):
        return None
    if model.traffic.weights + model.traffic.experts < PARTLY_CACHED * model.cache_bytes:
        return None
    per_token = pass_bytes(model.traffic, 1, max(0, timings.n_past - timings.predicted_n // 2))
    share = rate * per_token / model.peak_read
    return Utilization(model.quantization, per_token, share) if share <= OFF else None
