"""Whether one of two things is faster, by rates that were measured of both. Nothing else in the program decides it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist, fmean
from typing import Final, Literal

from cpuchat.protocol.reasons import MATTERS

NOISE: Final = 0.02
"""Standard deviation of a measurement of `_SECONDS` and more on an idle machine, as a share."""
_ALONE: Final = 0.04
"""The same where each was measured once, which does not tell if the machine is idle (benchmarks/differences.py)."""
_SECONDS: Final = 0.25
WRONG: Final = 0.02
"""Share of whole runs in which equal things may be called faster or slower."""
_PRIOR, _PRIOR_ALONE = 2, 3
"""Measurements that these count like: with fewer than that, their own scatter is hardly known. More would find more,
and be wrong more often on a machine whose rounds scatter by 3 %."""
_NINE_OF_TEN, _SAFELY = (NormalDist().inv_cdf(share) for share in (0.9, 0.95))
_HOPE: Final = 1.5
"""Standard errors within which a ratio is believed to be where nothing is at stake."""

Verdict = Literal["faster", "slower", "same", "noisy"]
"""`same`: any difference is too small to matter; `noisy`: it cannot be told yet."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How many times as fast the second thing is as the first. `error` is the standard error of the ratio's logarithm,
    `needed` what that must exceed to be believed."""

    ratio: float
    error: float
    needed: float

    @property
    def gain(self) -> float:
        """The difference as a share: 0.05 is 5 % faster."""
        return self.ratio - 1

    @property
    def interval(self) -> tuple[float, float]:
        """The smallest and the largest ratio that what was measured allows."""
        return self.ratio * math.exp(-self.needed), self.ratio * math.exp(self.needed)

    @property
    def verdict(self) -> Verdict:
        log = math.log(max(self.ratio, 1e-9))
        if abs(log) > max(self.needed, math.log1p(MATTERS)):
            return "faster" if log > 0 else "slower"
        return "same" if abs(log) + _HOPE * self.error < math.log1p(MATTERS) else "noisy"

    @property
    def smallest(self) -> float:
        """Return the smallest true gain, as a share, that such measurements show in nine of ten runs."""
        return math.expm1(max(self.needed, math.log1p(MATTERS)) + _NINE_OF_TEN * self.error)

    @property
    def may_gain(self) -> bool:
        """Return whether more rounds may still show that it is faster by what matters."""
        return math.log(self.ratio) + _HOPE * self.error >= math.log1p(MATTERS)


def compare(
    a: Sequence[float], b: Sequence[float], *, asked: float = 1, seconds: float = _SECONDS, apart: bool = False
) -> Difference:
    """Return how much faster `b` is than `a`, by the logarithms of the rates of their rounds.

    With one more of `a`, each of `b` was measured between two of it (A B A B A); with as many, they are pairs, in any
    order. What a machine does for a whole round is no part of a pair's ratio; where it does nothing, both sides of all
    rounds scatter alike, which tells more of the noise: the narrower of both intervals counts.

    `asked`: how many such questions a whole run asks: of all answers to equal things, `WRONG` in a run may be wrong.
    `seconds`: of the shortest measurement; what interrupts a shorter one weighs more where each was measured once.
    `apart`: they were measured at different times, and not in turn."""
    first, second = [math.log(rate) for rate in a], [math.log(rate) for rate in b]
    n, m = len(first), len(second)
    noise, prior = (NOISE, _PRIOR) if n * m > 1 else (_ALONE * max(_SECONDS / seconds, 1.0), _PRIOR_ALONE)

    def found(log: float, squares: float, known: int, share: float, degrees: int) -> Difference:
        error = math.sqrt((prior * noise**2 + squares) / (prior + known) * share)
        return Difference(math.exp(log), error, _quantile(asked, prior + degrees) * error)

    if apart:
        squares, known = _squares(first) + _squares(second), n + m - 2
        return found(fmean(second) - fmean(first), squares, known, 1 / n + 1 / m, known)
    if n == m:
        ratios = [after - before for before, after in zip(first, second, strict=True)]
        log, of_ratios = fmean(ratios), _squares(ratios) / 2
        of_all = of_ratios + _squares([before + after for before, after in zip(first, second, strict=True)]) / 2
        ways = found(log, of_ratios, n - 1, 2 / n, n - 1), found(log, of_all, 2 * n - 2, 2 / n, 2 * n - 2)
        return min(ways, key=lambda way: way.needed)
    ratios = [rate - (before + after) / 2 for rate, (before, after) in zip(second, pairwise(first), strict=True)]
    # A ratio varies by 1.5 of a measurement's variance, and neighbours, which share one of `a`, alike.
    squares = _squares(ratios) / 1.5 + sum((after - before) ** 2 for before, after in pairwise(first)) / 2
    degrees = (m - 1) + 2 * m // 3  # a part of both is the same
    return found(fmean(ratios), squares, 2 * m - 1, (2 * m - 0.5) / m**2, degrees)


def rounds_for(gain: float, scatter: float, asked: float, most: int, least: int = 2) -> int | None:
    """Return how many measurements of both, `least` or more at different times, show a true `gain` in 19 of 20 runs
    where each scatters by `scatter` (both as shares); None: more than `most`. In fewer, as few tell of the scatter
    itself. `asked` as of `compare`."""
    for n in range(least, most + 1):
        degrees = _PRIOR + 2 * n - 2
        error = math.sqrt((_PRIOR * NOISE**2 + (2 * n - 2) * scatter**2) / degrees * 2 / n)
        if _quantile(asked, degrees) * error + _SAFELY * scatter * math.sqrt(2 / n) <= math.log1p(gain):
            return n
    return None


def of_answer(ratio: float) -> Difference:
    """Return what an answer's rate tells that is `ratio` times the mean of many other passes."""
    error = NOISE * math.sqrt(2)
    return Difference(ratio, error, _quantile(1, _PRIOR_ALONE) * error)


def _squares(values: Sequence[float]) -> float:
    """Return the sum of the squared distances from the mean."""
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values)


@lru_cache
def _quantile(asked: float, dof: int) -> float:
    return student(NormalDist().inv_cdf(1 - WRONG / 2 / asked), dof)


def student(z: float, dof: int) -> float:
    """Return the quantile of Student's t distribution that is `z` of the normal one (Abramowitz and Stegun 26.7.5;
    within 1 % from 3 degrees of freedom on)."""
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / dof**power for power, term in enumerate(terms, 1))
