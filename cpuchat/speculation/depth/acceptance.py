"""How often a drafter is right, learnt as the text goes.

A token of a draft counts as right if the target writes the same one, given that all before it in the draft were right.
Classes of evidence: the grade (the drafter's own estimate) and the run (how many of its tokens in a row were right just
before: text comes in easy and hard stretches, and what is being copied goes on being copied). Each class is a
Beta-Bernoulli count that forgets, shrunk towards the class above it.
"""

from __future__ import annotations

from math import sqrt
from typing import Final

from cpuchat.speculation.drafters.drafter import MAX_DEPTH, N_GRADES, UNKNOWN

_RUN_CLASS: Final = (0, 1, 2, 2, 3, 3, 3, 3)
_N_RUNS: Final = 5
_LONGEST_RUN: Final = 64
_TO_GRADE: Final = 24.0
"""A run class counts from about as many tokens on."""
_LATELY: Final = (16, 56)
"""Tokens that may show a change: those that are at most a quarter of what is remembered."""
_ALARM: Final = 3.5
"""Standard deviations between the last tokens and all that is remembered at which the text has changed."""


def run_class(run: int) -> int:
    """Class of a run: 0, 1, 2-3, 4-7, longer."""
    return _RUN_CLASS[run] if run < 8 else _N_RUNS - 1


class Count:
    """Right and all, both forgetting: an old token weighs (1 - 1/window)^age."""

    __slots__ = ("all", "right")

    def __init__(self) -> None:
        self.right = 0.0
        self.all = 0.0

    def add(self, right: bool, keep: float) -> None:
        self.right = self.right * keep + right
        self.all = self.all * keep + 1.0

    def scale(self, factor: float) -> None:
        self.right *= factor
        self.all *= factor


class Acceptance:
    """One drafter's acceptance.

    Args:
        priors: expected rate of each grade before anything was seen.
        weight: how many tokens such a prior is worth.
        window: compared tokens per class after which one has mostly been forgotten.
    """

    def __init__(self, priors: tuple[float, ...], weight: float, window: float) -> None:
        if len(priors) != N_GRADES:
            raise ValueError(f"{N_GRADES} grades, {len(priors)} priors")
        self._priors = priors
        self._weight = weight
        self._keep = 1.0 - 1.0 / window
        self._grades = [Count() for _ in range(N_GRADES)]
        self._runs = [[Count() for _ in range(_N_RUNS)] for _ in range(N_GRADES)]
        self._windows = [
            (lately, 1 / (2 * lately - 1) + 1 / (2 * window - 1) - 2 / (lately + window - 1))
            for lately in _LATELY
            if 4 * lately <= window
        ]
        """With the variance between the two averages (exponential, the newest tokens are in both) for that of one."""
        self._lately = [priors[UNKNOWN]] * len(self._windows)
        self._compared = 0
        self.run = 0
        """Its tokens in a row that were right just before."""

    @property
    def seen(self) -> float:
        """Compared tokens that count now."""
        return self._grades[UNKNOWN].all

    @property
    def mean(self) -> float:
        """The rate over all grades and runs, prior included."""
        count = self._grades[UNKNOWN]
        return (count.right + self._weight * self._priors[UNKNOWN]) / (count.all + self._weight)

    def at(self, deviations: float) -> float:
        """A rate that still agrees with what was seen: so many standard deviations above the mean."""
        mean = self.mean
        # Half a token of doubt: after all wrong (or all right) the next text may still differ a little.
        n = self._grades[UNKNOWN].all + self._weight
        return max(0.0, min(1.0, mean + deviations * sqrt((mean * (1 - mean) + 0.5 / n) / n)))

    def rate(self, grade: int, run: int) -> float:
        """Probability that a token of this grade after this run is right."""
        count = self._grades[grade]
        mean = (count.right + self._weight * self._priors[grade]) / (count.all + self._weight)
        near = self._runs[grade][run_class(run)]
        return (near.right + _TO_GRADE * mean) / (near.all + _TO_GRADE)

    def rates(self, run: int | None = None) -> list[float]:
        """rate of the first, second, ... token of a draft of unknown grades that begins now, `MAX_DEPTH` of them."""
        run = self.run if run is None else run
        by_class = [self.rate(UNKNOWN, first) for first in (0, 1, 2, 4, 8)]
        return [by_class[run_class(run + j)] for j in range(MAX_DEPTH)]

    def observe(self, grade: int, right: bool) -> None:
        """The next token in the order of the text was right or wrong. Counts for its grade and for all of them."""
        run = run_class(self.run)
        for of in (UNKNOWN, grade) if grade != UNKNOWN else (UNKNOWN,):
            self._grades[of].add(right, self._keep)
            for count in self._runs[of]:
                count.scale(self._keep)
            self._runs[of][run].add(right, 1.0)
        self.run = min(self.run + 1, _LONGEST_RUN) if right else 0
        self._compared += 1
        for i, (window, _) in enumerate(self._windows):
            self._lately[i] += (right - self._lately[i]) / min(window, self._compared)
        self._follow()

    def _follow(self) -> None:
        """Forgets most when the last tokens don't look like those before."""
        before = self._grades[UNKNOWN]
        for lately, (window, share) in zip(self._lately, self._windows, strict=True):
            if self._compared < window or before.all < 2 * window:
                return
            mean = before.right / before.all
            spread = sqrt((mean * (1 - mean) + 0.04) * share)
            if abs(lately - mean) < _ALARM * spread:
                continue
            for count in self._grades:
                count.scale(0.2)
            for counts in self._runs:
                for count in counts:
                    count.scale(0.05)
            # The rate of all grades is known best from the last tokens alone.
            before.right, before.all = window / 2 * lately, window / 2
            self._lately = [lately] * len(self._windows)
            self._compared = window // 2
            return

    def fade(self, most: float) -> None:
        """Leaves no class with more than `most` tokens: a new text begins."""
        for counts in (self._grades, *self._runs):
            for count in counts:
                if count.all > most:
                    count.scale(most / count.all)
        self.run = 0
        self._lately, self._compared = [self.mean] * len(self._windows), 0
