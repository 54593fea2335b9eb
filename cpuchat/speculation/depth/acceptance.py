"""Learns the acceptance rate of a drafter from the text as it is written.

A drafted token counts as accepted if the target writes the same one, given that all before it in the draft were.
Evidence is kept per confidence bucket (the drafter's own estimate) and per streak (how many of its tokens in a row were
accepted just before: text has easy and hard stretches, and what is being copied goes on being copied). Each class is a
Beta-Bernoulli count that forgets, shrunk towards the class above it.
"""

from __future__ import annotations

from math import sqrt
from typing import Final

from cpuchat.speculation.drafters.drafter import MAX_DEPTH, N_BUCKETS, UNKNOWN

DRAFT_PRIORS: Final = (0.62, 0.25, 0.4, 0.55, 0.7, 0.82, 0.92, 0.97)
FREE_PRIORS: Final = (0.35, 0.12, 0.3, 0.45, 0.6, 0.75, 0.88, 0.95)
"""Prior acceptance by confidence bucket, of a draft model and of free drafters."""
_STREAK_CLASS: Final = (0, 1, 2, 2, 3, 3, 3, 3)
_N_STREAKS: Final = 5
_LONGEST_STREAK: Final = 64
_TO_BUCKET: Final = 24.0
"""Number of tokens from which a streak's own count outweighs that of its bucket."""
_RECENT: Final = (16, 56)
"""Window sizes of newest tokens that may reveal a change: at most a quarter of what is remembered."""
_ALARM: Final = 3.5
"""Standard deviations between the newest tokens and all that is remembered at which the text has changed."""


def streak_class(streak: int) -> int:
    """Return the class of a streak: 0, 1, 2-3, 4-7, longer."""
    return _STREAK_CLASS[streak] if streak < 8 else _N_STREAKS - 1


class Count:
    """Accepted tokens and all, both forgetting: an old token weighs (1 - 1/window)^age."""

    __slots__ = ("accepted", "all")

    def __init__(self) -> None:
        self.accepted = 0.0
        self.all = 0.0

    def add(self, accepted: bool, keep: float) -> None:
        self.accepted = self.accepted * keep + accepted
        self.all = self.all * keep + 1.0

    def scale(self, factor: float) -> None:
        self.accepted *= factor
        self.all *= factor


class Acceptance:
    """The acceptance of one drafter.

    Args:
        priors: expected rate of each bucket before anything was seen.
        weight: how many tokens such a prior is worth.
        window: compared tokens per class after which one has mostly been forgotten.
        known: accepted and compared tokens of earlier texts, as in `counted`.

    Attributes:
        accept_streak: how many of its tokens in a row were accepted just before.
    """

    def __init__(
        self, priors: tuple[float, ...], weight: float, window: float, known: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self._priors = priors
        self._weight = weight
        self._keep = 1.0 - 1.0 / window
        self._buckets = [Count() for _ in range(N_BUCKETS)]
        self._buckets[UNKNOWN].accepted, self._buckets[UNKNOWN].all = known
        self._streaks = [[Count() for _ in range(_N_STREAKS)] for _ in range(N_BUCKETS)]
        self._windows = [
            (recent, 1 / (2 * recent - 1) + 1 / (2 * window - 1) - 2 / (recent + window - 1))
            for recent in _RECENT
            if 4 * recent <= window
        ]
        """(window, weight); the weight turns the variance between the two averages (exponential, the newest tokens are
        in both) into that of one.
        """
        self._recent = [self.mean] * len(self._windows)
        self._compared = 0
        self.accept_streak = 0

    @property
    def n_observed(self) -> float:
        """Compared tokens that still count."""
        return self._buckets[UNKNOWN].all

    @property
    def counted(self) -> tuple[float, float]:
        """Return how many tokens that still count were accepted, and all of them."""
        return self._buckets[UNKNOWN].accepted, self._buckets[UNKNOWN].all

    @property
    def mean(self) -> float:
        """Return the rate over all buckets and streaks, prior included."""
        return self._bucket_rate(UNKNOWN)

    def quantile(self, deviations: float) -> float:
        """Return the rate so many standard deviations above the mean."""
        mean = self.mean
        # The half token: after all rejected (or all accepted) the next text may still differ a little.
        n = self._buckets[UNKNOWN].all + self._weight
        return max(0.0, min(1.0, mean + deviations * sqrt((mean * (1 - mean) + 0.5 / n) / n)))

    def _bucket_rate(self, bucket: int) -> float:
        count = self._buckets[bucket]
        return (count.accepted + self._weight * self._priors[bucket]) / (count.all + self._weight)

    def rate(self, bucket: int, streak: int) -> float:
        """Return the probability that a token of this bucket is accepted after this streak."""
        near = self._streaks[bucket][streak_class(streak)]
        return (near.accepted + _TO_BUCKET * self._bucket_rate(bucket)) / (near.all + _TO_BUCKET)

    def rates(self, streak: int | None = None) -> list[float]:
        """Return the rates of the first, second, ... of `MAX_DEPTH` tokens of unknown buckets, drafted now."""
        streak = self.accept_streak if streak is None else streak
        by_class = [self.rate(UNKNOWN, first) for first in (0, 1, 2, 4, 8)]
        return [by_class[streak_class(streak + j)] for j in range(MAX_DEPTH)]

    def observe(self, bucket: int, accepted: bool) -> None:
        """Add the next token in the order of the text, to its bucket and to all of them together."""
        streak = streak_class(self.accept_streak)
        for of in (UNKNOWN, bucket) if bucket != UNKNOWN else (UNKNOWN,):
            self._buckets[of].add(accepted, self._keep)
            for count in self._streaks[of]:
                count.scale(self._keep)
            self._streaks[of][streak].add(accepted, 1.0)
        self.accept_streak = min(self.accept_streak + 1, _LONGEST_STREAK) if accepted else 0
        self._compared += 1
        for i, (window, _) in enumerate(self._windows):
            self._recent[i] += (accepted - self._recent[i]) / min(window, self._compared)
        self._detect_change()

    def _detect_change(self) -> None:
        """Forget most when the newest tokens do not look like those before."""
        before = self._buckets[UNKNOWN]
        for recent, (window, share) in zip(self._recent, self._windows, strict=True):
            if self._compared < window or before.all < 2 * window:
                return
            mean = before.accepted / before.all
            spread = sqrt((mean * (1 - mean) + 0.04) * share)
            if abs(recent - mean) < _ALARM * spread:
                continue
            for count in self._buckets:
                count.scale(0.2)
            for counts in self._streaks:
                for count in counts:
                    count.scale(0.05)
            # The rate over all buckets is known best from the newest tokens alone.
            before.accepted, before.all = window / 2 * recent, window / 2
            self._recent = [recent] * len(self._windows)
            self._compared = window // 2
            return

    def fade(self, most: float) -> None:
        """Leave no class with more than `most` tokens, because a new text begins."""
        for counts in (self._buckets, *self._streaks):
            for count in counts:
                if count.all > most:
                    count.scale(most / count.all)
        self.accept_streak = 0
        self._recent, self._compared = [self.mean] * len(self._windows), 0
