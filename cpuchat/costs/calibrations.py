"""Calibrated costs of passes in milliseconds.

The engine measures them when it loads a model, the depth controller starts from them, and predictions read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import msgspec

MAX_TOKENS: Final = 32
"""Most tokens of one verify pass: the longest draft and the token before it."""
MIN_PLAIN_MS: Final = 2.0
"""Milliseconds per token below which nothing is drafted: looking for drafts, sampling several rows and bookkeeping take
0.1 to 0.3 ms per pass, which such a fast model cannot gain back."""
MIN_COMPARED: Final = 100
"""Compared tokens from which on an acceptance rate is told."""


class PassCosts(msgspec.Struct, frozen=True):
    """Costs of a target and its draft model, which compute sequentially.

    `verify_ms[n - 1]` is the ms of a target pass over n tokens, n = 1..32; `draft_ms` per token drafted one after the
    other (0: no draft model), `read_ms` per token of text that the draft model reads in a batch, `rollback_ms` extra
    after a rejection. Not `steady`: the measurements scattered so much that they should be repeated. `disturbed`: other
    programs used the cores, which tells little of plain decoding. Raises ValueError: not 32 positive times."""

    verify_ms: tuple[float, ...]
    draft_ms: float = 0.0
    read_ms: float = 0.0
    rollback_ms: float = 0.0
    steady: bool = True
    disturbed: bool = False

    def __post_init__(self) -> None:
        if len(self.verify_ms) != MAX_TOKENS or min(self.verify_ms) <= 0:
            raise ValueError(f"a pass needs {MAX_TOKENS} positive times, one for each number of tokens")
        if min(self.draft_ms, self.read_ms, self.rollback_ms) < 0:
            raise ValueError("a cost cannot be negative")


def interpolate(points: Mapping[int, float]) -> tuple[float, ...]:
    """Return pass times for n = 1..32 tokens from the measured ones, n -> ms.

    Linear between two measurements, dips kept: kernels that work on rows in groups are cheaper for some. Past the last
    one the slope is that from half of it to it, never falling; from one alone the cost is proportional to n. Raises
    ValueError: no points, n outside of 1..32, or a time that is not positive."""
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

    Those cost more than `DEAREST` times n plain steps, or far more than a longer pass. [] when all are plausible."""
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
