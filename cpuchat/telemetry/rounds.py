"""Two things measured in turn on a machine that other programs use too: when a difference is believed.

The anchor, one of the two, is measured before and after the other one (A B A B A): the ratio of each round is taken to
the anchor just before and after, and `InTurn` tells after every round whether it decides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

MAX_DRIFT: Final = 0.10


def has_drifted(before: float, after: float) -> bool:
    """Return whether two speeds of the same differ by more than 10 % of the slower one."""
    return max(before, after) > (1 + MAX_DRIFT) * min(before, after)


MIN_GAIN: Final = 0.02
MIN_ROUNDS, MAX_ROUNDS = 3, 8
_Z: Final = 3.2
"""Normal quantile of a gain that is believed. Six choices of two figures each, looked at after each of six rounds, are
together to be wrong in at most 2 % of all runs of `tune` (benchmarks/tune_noise.py)."""
_HOPE: Final = 1.5
"""Standard errors by which a gain may exceed its estimate; where even that is too little, measuring stops early."""


class MeasuredGain(NamedTuple):
    """The gain of a figure as a share (0.05: 5 % faster), its standard error, and the gain that would be believed."""

    gain: float
    error: float
    needed: float

    @property
    def is_sure(self) -> bool:
        return self.gain > self.needed


class InTurn:
    """Ratios of one thing to the anchor, measured in turn. `first`: rates of the anchor before the first round, by the
    name of the figure.
    """

    def __init__(self, first: Mapping[str, float]) -> None:
        self._anchors = [first]
        self._rivals: list[Mapping[str, float]] = []

    @property
    def rounds(self) -> int:
        return len(self._rivals)

    def add(self, rival: Mapping[str, float], anchor: Mapping[str, float]) -> None:
        """Add a round: the thing to compare, and the anchor after it."""
        self._rivals.append(rival)
        self._anchors.append(anchor)

    def gain(self, name: str) -> MeasuredGain:
        """Return the gain of a figure, by the logarithms of its ratios.

        What one measurement scatters by is told by the ratios and by neighbouring measurements of the anchor together.
        A mean of n ratios in turn varies by (2n - 0.5) / n² of it, as neighbours share an anchor.
        """
        n, logs = self.rounds, [math.log(anchor[name]) for anchor in self._anchors]
        ratios = [
            math.log(rival[name]) - (before + after) / 2
            for rival, (before, after) in zip(self._rivals, pairwise(logs), strict=True)
        ]
        mean = statistics.fmean(ratios)
        squares = sum((ratio - mean) ** 2 for ratio in ratios) / 1.5
        squares += sum((after - before) ** 2 for before, after in pairwise(logs)) / 2
        error = math.sqrt(squares / (2 * n - 1) * (2 * n - 0.5)) / n
        needed = max(math.log1p(MIN_GAIN), student(_Z, max(1, (n - 1) + 2 * n // 3)) * error)
        return MeasuredGain(math.expm1(mean), error, math.expm1(needed))

    def is_decided(self, names: Sequence[str]) -> bool:
        """Return whether another round would not change what is said of these figures."""
        gains = [self.gain(name) for name in names]
        if self.rounds >= MAX_ROUNDS or all(one.gain + _HOPE * one.error < MIN_GAIN for one in gains):
            return True
        return self.rounds >= MIN_ROUNDS and any(one.is_sure for one in gains)


def student(z: float, dof: int) -> float:
    """Return the quantile of Student's t distribution that is `z` of the normal one (Abramowitz and Stegun 26.7.5;
    within 1 % from 3 degrees of freedom on)."""
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / dof**power for power, term in enumerate(terms, 1))
