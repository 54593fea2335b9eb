"""Whether one of two things is faster, by rates that were measured of both. Nothing else in the program decides it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

MATTERS: Final = 0.02
"""Share that a difference must exceed to be worth anything. Nobody notices less, two builds of the same source differ
by as much in where their code lies, and fewer rounds than anyone waits for do not show it."""
NOISE: Final = 0.02
"""Standard deviation of a measurement of 0.25 s and more on an idle machine, as a share."""
ALONE: Final = 0.04
"""The same where each was measured once, which does not tell if the machine is idle (benchmarks/differences.py)."""
WRONG: Final = 0.02
"""Share of whole runs in which equal things may be called faster or slower."""
_PRIOR: Final = 3
"""Measurements that `NOISE` counts like: with fewer rounds than that, their own scatter is hardly known."""
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
        log = math.log(self.ratio)
        if abs(log) > max(self.needed, math.log1p(MATTERS)):
            return "faster" if log > 0 else "slower"
        return "same" if abs(log) + _HOPE * self.error < math.log1p(MATTERS) else "noisy"

    @property
    def may_gain(self) -> bool:
        """Return whether more rounds may still show that it is faster by what matters."""
        return math.log(self.ratio) + _HOPE * self.error >= math.log1p(MATTERS)


def compare(
    a: Sequence[float], b: Sequence[float], *, asked: int = 1, noise: float = 0.0, apart: bool = False
) -> Difference:
    """Return how much faster `b` is than `a`, by the logarithms of the rates of their rounds.

    With one more of `a`, each of `b` was measured between two of it (A B A B A); with as many, they are pairs, in any
    order.

    Args:
        asked: how many such questions a whole run asks: of all answers to equal things, `WRONG` in a run may be wrong.
        noise: what one measurement scatters by, if that is known before; what is measured here outweighs it.
        apart: they were measured at different times, and not in turn.
    """
    first, second = [math.log(rate) for rate in a], [math.log(rate) for rate in b]
    n, m = len(first), len(second)
    if apart:
        mean = statistics.fmean(second) - statistics.fmean(first)
        squares = sum((rate - statistics.fmean(side)) ** 2 for side in (first, second) for rate in side)
        known, share = n + m - 2, 1 / n + 1 / m
        degrees = known
    elif n == m:
        ratios = [after - before for before, after in zip(first, second, strict=True)]
        mean = statistics.fmean(ratios)
        squares = sum((ratio - mean) ** 2 for ratio in ratios) / 2
        degrees = known = n - 1
        share = 2 / n
    else:
        ratios = [rate - (before + after) / 2 for rate, (before, after) in zip(second, pairwise(first), strict=True)]
        mean = statistics.fmean(ratios)
        # A ratio varies by 1.5 of a measurement's variance, and neighbours, which share one of `a`, alike.
        squares = sum((ratio - mean) ** 2 for ratio in ratios) / 1.5
        squares += sum((after - before) ** 2 for before, after in pairwise(first)) / 2
        known, share = 2 * m - 1, (2 * m - 0.5) / m**2
        degrees = (m - 1) + 2 * m // 3  # a part of both is the same
    noise = noise or (NOISE if n * m > 1 else ALONE)
    error = math.sqrt((_PRIOR * noise**2 + squares) / (_PRIOR + known) * share)
    normal = statistics.NormalDist().inv_cdf(1 - WRONG / 2 / asked)
    return Difference(math.exp(mean), error, student(normal, _PRIOR + degrees) * error)


def student(z: float, dof: int) -> float:
    """Return the quantile of Student's t distribution that is `z` of the normal one (Abramowitz and Stegun 26.7.5;
    within 1 % from 3 degrees of freedom on)."""
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / dof**power for power, term in enumerate(terms, 1))
