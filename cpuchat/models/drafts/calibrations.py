"""The measured pass costs of models on this machine, as the engine caches them: `calibrations.json`.

The engine looks them up by everything that the costs depend on. Here the latest of a model is read, to predict what a
draft model would gain before it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from cpuchat import paths
from cpuchat.errors import ModelNotFound
from cpuchat.files import JsonCache
from cpuchat.models.fingerprint import file_fingerprint

DEAREST, STEEPEST, LEAST = 1.25, 0.5, 0.8
"""Limits of plausible pass times, from measurements on quiet machines: n tokens cost at most n plain steps (Gemma 270M:
2.1 for 2, 4.4 for 5); longer passes may cost less than shorter ones because kernels compute groups of rows (3.9 for 8;
1.5B Q8_0: 3.15 for 6, 2.79 for 8); and none costs less than a plain step."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """One entry. `verify_ms[n - 1]`: milliseconds of a pass of the target over n tokens.

    `draft_ms` is that of one drafted token (0: measured without a draft model). `overlap` is (T(n), draft ms) if
    measured; the rest is as in the engine's `PassCosts`. `target` and `draft` are the fingerprints of both files (""
    for no draft model). `steady` False: the measurements scattered; `disturbed`: other programs had the cores for part
    of them. `measured` is in seconds since 1970. Of `compared` tokens of the draft model in earlier answers the target
    wrote `accepted` too, older ones counting less.
    """

    verify_ms: tuple[float, ...]
    draft_ms: float
    read_ms: float
    rollback_ms: float
    overlap: tuple[tuple[float, ...], float] | None
    target: str
    draft: str
    steady: bool
    measured: float
    accepted: float = 0.0
    compared: float = 0.0
    disturbed: bool = False


def calibration_cache(file: Path) -> JsonCache[Calibration]:
    """Return the calibrations in `file`."""
    return JsonCache(file, Calibration, version=1, max_entries=300)


def implausible(ms: Mapping[int, float]) -> list[int]:
    """Return the numbers of tokens whose pass time (n -> milliseconds, n = 1 included) must have been disturbed.

    Those cost more than `DEAREST` times n plain steps, or far more than a longer pass. [] when all are plausible.
    """
    cheapest = {n: min(time for longer, time in ms.items() if longer >= n) for n in ms}
    return [
        n
        for n, time in sorted(ms.items())
        if time > DEAREST * n * ms[1] or cheapest[n] < (LEAST if n == 1 else STEEPEST) * time
    ]


def is_plausible(pass_ms: Sequence[float]) -> bool:
    """Return whether `pass_ms[n - 1]`, times of passes over n tokens, can all be those of a quiet machine."""
    return not implausible(dict(enumerate(pass_ms, 1)))


class TargetCosts(msgspec.Struct, frozen=True):
    """The known costs of a target: milliseconds of passes over 1, 2, ... tokens (() when never calibrated), and of a
    drafted token by the fingerprint of the draft model."""

    pass_ms: tuple[float, ...] = ()
    draft_ms: dict[str, float] = {}

    def measured_draft(self, draft: Path) -> float:
        """Return the milliseconds for a token of that draft model beside this target; 0 when not measured."""
        if not self.draft_ms:
            return 0.0
        try:
            return self.draft_ms.get(file_fingerprint(draft), 0.0)
        except ModelNotFound:
            return 0.0


UNKNOWN = TargetCosts()


def target_costs(target: Path, file: Path | None = None) -> TargetCosts:
    """Return the latest measurements of a model file on this machine, whatever cores they were made with.

    `file` replaces the one in the cache folder.
    """
    try:
        fingerprint = file_fingerprint(target)
    except ModelNotFound:
        return UNKNOWN
    pass_ms: tuple[float, ...] = ()
    draft_ms: dict[str, float] = {}
    for known in reversed(calibration_cache(file or paths.calibration_file()).read().values()):
        if known.target != fingerprint or known.disturbed:
            continue
        if min(known.verify_ms, default=0) <= 0 or not is_plausible(known.verify_ms):
            continue
        pass_ms = pass_ms or known.verify_ms
        if known.draft and known.draft_ms > 0:
            draft_ms.setdefault(known.draft, known.draft_ms)
    return TargetCosts(pass_ms, draft_ms)
