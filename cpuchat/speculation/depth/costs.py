"""Calibrated costs of passes. Milliseconds and token counts only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

MAX_TOKENS: Final = 32
"""Most tokens of one verify pass: the longest draft and the token before it."""


@dataclass(frozen=True)
class OverlapCosts:
    """Costs while the draft model computes on its own cores, concurrently with the target.

    `verify_ms[n - 1]`: ms of a target pass over n tokens, n = 1..32. `draft_ms`: ms per drafted token.
    """

    verify_ms: tuple[float, ...]
    draft_ms: float


@dataclass(frozen=True)
class PassCosts:
    """Costs when target and draft model compute sequentially.

    Attributes:
        verify_ms: `verify_ms[n - 1]` is the ms of a target pass over n tokens, n = 1..32.
        draft_ms: ms per token drafted one after the other (0: no draft model).
        read_ms: ms per token of text that the draft model reads in a batch.
        overlap: the concurrent costs, where that is possible.
        rollback_ms: extra after a pass in which a token was rejected.
        steady: False when the measurements scattered so much that they should be repeated.
        disturbed: True when other programs had the cores for part of the passes, which tell little of plain decoding.

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


def interpolate(points: Mapping[int, float]) -> tuple[float, ...]:
    """Return pass times for n = 1..32 tokens from the measured ones, n -> ms.

    Linear between two measurements; a dip is kept, because some batch sizes really are cheaper than smaller ones
    (kernels that work on rows in groups). Past the last one the slope is that from half of it to it, never falling.
    From one measurement alone the cost is proportional to n, so that nothing is promised.

    Raises:
        ValueError: no points, n outside of 1..32, or a time that is not positive.
    """
    known = sorted(points.items())
    if not known or known[0][0] < 1 or known[-1][0] > MAX_TOKENS or min(points.values()) <= 0:
        raise ValueError("pass times need at least one positive measurement for 1..32 tokens")
    first, last = known[0], known[-1]
    times = [first[1]] * first[0]
    for (n0, ms0), (n1, ms1) in pairwise(known):
        times += [ms0 + (ms1 - ms0) * (n - n0) / (n1 - n0) for n in range(n0 + 1, n1)]
        times.append(ms1)
    if len(known) == 1:
        slope = last[1] / last[0]
    else:
        half = min(max(last[0] // 2, first[0]), last[0] - 1)
        slope = max(0.0, (times[-1] - times[half - 1]) / (last[0] - half))
    times += [last[1] + slope * (n - last[0]) for n in range(last[0] + 1, MAX_TOKENS + 1)]
    return tuple(times)
