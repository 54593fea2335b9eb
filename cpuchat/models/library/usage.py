"""When each model was loaded last, and how fast it answered: `usage.json` of the cache folder.

A file is known by its real path and its size: who touches it has not made another model of it.
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

_VERSION = 1
_MOST = 1_000
_LEAST_TOKENS = 64
_QUIET = 0.05
"""Share of the time that threads may have waited for a core."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """One model. `used` in seconds since 1970; tok/s 0 where not measured.

    `plain_tok_s` is the last plain decoding, `drafted_tok_s` the last answer with drafts. `share` is the largest part
    of the read bandwidth `peak` (bytes per second) that plain decoding, which read `per_token` bytes for a token, came
    to when nothing else wanted the cores (0: not known).
    """

    used: float = 0.0
    quantization: str = ""
    plain_tok_s: float = 0.0
    share: float = 0.0
    per_token: float = 0.0
    peak: float = 0.0
    drafted_tok_s: float = 0.0


class Reach(NamedTuple):
    """The `share` of the read bandwidth that plain decoding came to with a model that reads `per_token` bytes."""

    quantization: str
    per_token: float
    share: float


class UsageLog:
    """Reads and writes the file; both take milliseconds. Several programs may do so at once."""

    def __init__(self, file: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """`file` replaces the one in the cache folder."""
        self._cache = JsonCache(file or paths.usage_file(), Usage, version=_VERSION, max_entries=_MOST)
        self._clock = clock

    def loaded(self, models: Iterable[Path]) -> None:
        """These were loaded now."""
        now = self._clock()
        for path in models:
            self._change(path, lambda usage: msgspec.structs.replace(usage, used=now))

    def answered(self, model: ModelInfo, timings: Timings) -> None:
        """`model` wrote an answer. Answers of a few tokens say nothing about speed."""
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
            if reach := _reach(model, timings):
                best = usage.share if usage.peak == model.peak_read else 0.0
                changes |= {"share": max(reach.share, best), "per_token": reach.per_token, "peak": model.peak_read}
            return msgspec.structs.replace(usage, **changes)

        self._change(Path(model.path), changed)

    def read(self) -> UsageRead:
        """What is known now."""
        return UsageRead(self._cache.read())

    def _change(self, path: Path, change: Callable[[Usage], Usage]) -> None:
        try:
            key = _key(model_files(path))
        except OSError:  # it is gone
            return

        def put_last(entries: dict[str, Usage]) -> None:
            entries[key] = change(entries.pop(key, Usage()))

        self._cache.update(put_last)


class UsageRead:
    """The entries of the file at one moment, oldest first."""

    def __init__(self, entries: dict[str, Usage]) -> None:
        self._entries = entries

    def of(self, parts: list[Path]) -> Usage:
        """Of the model that these files are; all zero when it was never used as it is now."""
        try:
            return self._entries.get(_key(parts)) or Usage() if self._entries else Usage()
        except OSError:
            return Usage()

    def reaches(self) -> list[Reach]:
        """Of every model whose plain decoding was measured."""
        return [Reach(one.quantization, one.per_token, one.share) for one in self._entries.values() if one.share > 0]


def _key(parts: list[Path]) -> str:
    return stat_fingerprint(parts, with_times=False)


def _reach(model: ModelInfo, timings: Timings) -> Reach | None:
    """What plain decoding came to; None for an answer with drafts, a short one, and one beside other programs; where
    weights come from the L3 caches in part, the bandwidth was not measured, is that of other cores, too (a draft
    model's), or its measurement is off."""
    rate = timings.predicted_per_second
    if timings.draft_n or rate is None or timings.predicted_n <= _LEAST_TOKENS:
        return None
    if timings.cpu_wait is None or timings.cpu_wait > _QUIET:
        return None
    if model.traffic is None or model.peak_read <= 0 or not set(model.draft_cpus) <= set(model.cpus):
        return None
    if model.traffic.weights + model.traffic.experts < PARTLY_CACHED * model.cache_bytes:
        return None
    per_token = pass_bytes(model.traffic, 1, max(0, timings.n_past - timings.predicted_n // 2))
    share = rate * per_token / model.peak_read
    return Reach(model.quantization, per_token, share) if share <= OFF else None
