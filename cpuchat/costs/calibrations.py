"""Calibrated costs of passes in milliseconds, and their one record, `calibrations.json`.

The engine measures them when it loads a model, the depth controller starts from them, and predictions read them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from cpuchat.base.files import JsonCache

MAX_TOKENS: Final = 32
"""Most tokens of one verify pass: the longest draft and the token before it."""
MIN_PLAIN_MS: Final = 2.0
"""Milliseconds per token below which nothing is drafted: looking for drafts, sampling several rows and bookkeeping take
0.1 to 0.3 ms per pass, which such a fast model cannot gain back.
"""
KEPT_SECONDS: Final = 30 * 86_400.0
"""Seconds for which a calibration is valid: kernels, firmware and cooling change less often..."""
UNSTEADY_SECONDS: Final = 3_600.0
"""...and seconds if its measurements scattered, so that it is repeated when the machine may be idle. One that other
programs disturbed is repeated as soon as the cores are idle."""
MIN_COMPARED: Final = 100
"""Compared tokens from which on an acceptance rate is told."""
_MAX_COMPARED: Final = 10_000.0
"""More is no count of this program's: it forgets."""


class OverlapCosts(msgspec.Struct, frozen=True):
    """Costs while the draft model computes on its own cores, concurrently with the target: `verify_ms` and `draft_ms`
    as in `PassCosts`."""

    verify_ms: tuple[float, ...]
    draft_ms: float


class PassCosts(msgspec.Struct, frozen=True):
    """Costs when target and draft model compute sequentially.

    Attributes:
        verify_ms: `verify_ms[n - 1]` is the ms of a target pass over n tokens, n = 1..32.
        draft_ms: ms per token drafted one after the other (0: no draft model).
        read_ms: ms per token of text that the draft model reads in a batch.
        overlap: the concurrent costs, where that is possible.
        rollback_ms: extra after a pass in which a token was rejected.
        steady: False when the measurements scattered so much that they should be repeated.
        disturbed: True when other programs were using the cores for part of the passes, which tell little of plain
            decoding.

    Raises:
        ValueError: not 32 positive times, or a negative one.
    """

    verify_ms: tuple[float, ...]
    draft_ms: float = 0.0
    read_ms: float = 0.0
    overlap: OverlapCosts | None = None
    rollback_ms: float = 0.0
    steady: bool = True
    disturbed: bool = False

    def __post_init__(self) -> None:
        curves = [self.verify_ms] + ([self.overlap.verify_ms] if self.overlap else [])
        if any(len(curve) != MAX_TOKENS or min(curve) <= 0 for curve in curves):
            raise ValueError(f"a pass needs {MAX_TOKENS} positive times, one for each number of tokens")
        if min(self.draft_ms, self.read_ms, self.rollback_ms) < 0:
            raise ValueError("a cost cannot be negative")


class Calibration(PassCosts, frozen=True, kw_only=True):
    """The costs of a loaded target, with a draft model if `draft`: `target` and `draft` are the fingerprints of files.

    `measured` is in seconds since 1970. Of `compared` tokens of the draft model in earlier answers the target wrote
    `accepted` too, older ones counting less.
    """

    target: str = ""
    draft: str = ""
    measured: float = 0.0
    accepted: float = 0.0
    compared: float = 0.0

    @property
    def is_due(self) -> bool:
        """Return whether it is so old that it should be repeated."""
        kept = KEPT_SECONDS if self.steady and not self.disturbed else UNSTEADY_SECONDS
        return time.time() - self.measured > kept

    @property
    def acceptance(self) -> tuple[float, float]:
        """Return `accepted` and `compared`; (0, 0) for counts that cannot be."""
        is_possible = 0 <= self.accepted <= self.compared <= _MAX_COMPARED
        return (self.accepted, self.compared) if is_possible else (0.0, 0.0)

    def is_of(self, other: Calibration) -> bool:
        """Return whether both are of the same pair of models."""
        return (self.target, self.draft) == (other.target, other.draft)


def interpolate(points: Mapping[int, float]) -> tuple[float, ...]:
    """Return pass times for n = 1..32 tokens from the measured ones, n -> ms.

    Linear between two measurements; a dip is kept, because some batch sizes really are cheaper than smaller ones
    (kernels that work on rows in groups). Past the last one the slope is that from half of it to it, never falling.
    From one measurement alone the cost is proportional to n, so that nothing is promised.

    Raises:
        ValueError: no points, n outside of 1..32, or a time that is not positive.
    """
    measured = sorted(points.items())
    if not measured or measured[0][0] < 1 or measured[-1][0] > MAX_TOKENS or min(points.values()) <= 0:
        raise ValueError("pass times need at least one positive measurement for 1..32 tokens")
    first, last = measured[0], measured[-1]
    times = [first[1]] * first[0]
    for (n0, ms0), (n1, ms1) in pairwise(measured):
        times += [ms0 + (ms1 - ms0) * (n - n0) / (n1 - n0) for n in range(n0 + 1, n1)]
        times.append(ms1)
    if len(measured) == 1:
        slope = last[1] / last[0]
    else:
        half = min(max(last[0] // 2, first[0]), last[0] - 1)
        slope = max(0.0, (times[-1] - times[half - 1]) / (last[0] - half))
    times += [last[1] + slope * (n - last[0]) for n in range(last[0] + 1, MAX_TOKENS + 1)]
    return tuple(times)


DEAREST, STEEPEST, MIN = 1.25, 0.5, 0.8
"""Limits of plausible pass times, from measurements on quiet machines: n tokens cost at most n plain steps (Gemma 270M:
2.1 for 2, 4.4 for 5); longer passes may cost less than shorter ones because kernels compute groups of rows (3.9 for 8;
1.5B Q8_0: 3.15 for 6, 2.79 for 8); and none costs less than a plain step."""


def implausible(ms: Mapping[int, float]) -> list[int]:
    """Return the numbers of tokens whose pass time (n -> milliseconds, n = 1 included) must have been disturbed.

    Those cost more than `DEAREST` times n plain steps, or far more than a longer pass. [] when all are plausible.
    """
    cheapest = {n: min(time for longer, time in ms.items() if longer >= n) for n in ms}
    return [
        n
        for n, time in sorted(ms.items())
        if time > DEAREST * n * ms[1] or cheapest[n] < (MIN if n == 1 else STEEPEST) * time
    ]


def is_plausible(pass_ms: Sequence[float]) -> bool:
    """Return whether `pass_ms[n - 1]`, times of passes over n tokens, can all be those of a quiet machine."""
    return not implausible(dict(enumerate(pass_ms, 1)))


class TargetCosts(NamedTuple):
    """The calibrated costs of a target: milliseconds of passes over 1, 2, ... tokens (() when never calibrated), and by
    the fingerprint of the draft model those of a drafted token, and its acceptance rate where enough was compared."""

    pass_ms: tuple[float, ...] = ()
    draft_ms: Mapping[str, float] = {}
    acceptance: Mapping[str, float] = {}


class Calibrations:
    """Reads and writes the calibrations in `file`; None keeps none. Several programs may do so at once."""

    def __init__(self, file: Path | None) -> None:
        self._cache = JsonCache(file, Calibration, version=2, max_entries=300) if file is not None else None

    def entries(self) -> dict[str, Calibration]:
        """Return all of them by key (`MeasuredOn`), the oldest first."""
        return self._cache.read() if self._cache is not None else {}

    def get(self, key: str) -> Calibration | None:
        """Return the calibration of this key, however old, if it is plausible."""
        found = self.entries().get(key)
        return found if found is not None and is_plausible(found.verify_ms) else None

    def save(self, key: str, costs: Calibration) -> Calibration:
        """Keep `costs` if they are plausible; returns them, measured now, with the acceptance of the same pair."""
        earlier = [one.acceptance for one in self.entries().values() if one.is_of(costs)]
        accepted, compared = earlier[-1] if earlier and costs.draft else (0.0, 0.0)
        costs = msgspec.structs.replace(costs, measured=time.time(), accepted=accepted, compared=compared)
        if self._cache is not None and is_plausible(costs.verify_ms):
            self._cache.put(key, costs)
        return costs

    def save_acceptance(self, costs: Calibration, accepted: float, compared: float) -> None:
        """Keep both counts, as in `Calibration`, beside every calibration of the pair of `costs`."""

        def change(entries: dict[str, Calibration]) -> None:
            for key, one in entries.items():
                if one.is_of(costs):
                    entries[key] = msgspec.structs.replace(one, accepted=accepted, compared=compared)

        if self._cache is not None:
            self._cache.update(change)

    def of_target(self, fingerprint: str) -> TargetCosts:
        """Return the latest undisturbed costs of a model file, whatever cores they were made with."""
        found = [
            one for one in self.entries().values()
            if fingerprint and one.target == fingerprint and not one.disturbed and is_plausible(one.verify_ms)
        ]  # fmt: skip
        draft_ms = {one.draft: one.draft_ms for one in found if one.draft and one.draft_ms > 0}
        counts = {one.draft: one.acceptance for one in found if one.draft}
        rates = {draft: accepted / n for draft, (accepted, n) in counts.items() if n >= MIN_COMPARED}
        return TargetCosts(found[-1].verify_ms if found else (), draft_ms, rates)
