"""The first part of the depth controller: learns the acceptance rate of a drafter from the text as it is written.

A drafted token counts as accepted if the target writes the same one, given that all before it in the draft were. Rates
are Beta posteriors that forget: of the present text, per confidence bucket (the drafter's own estimate); and of all
texts together, which is what the next text is expected to be like.
"""

from __future__ import annotations

from typing import Final

from cpuchat.speculation.drafters.drafter import N_BUCKETS, UNKNOWN

DRAFT_PRIORS: Final = (0.55, 0.25, 0.4, 0.55, 0.7, 0.82, 0.92, 0.97)
FREE_PRIORS: Final = (0.35, 0.12, 0.3, 0.45, 0.6, 0.75, 0.88, 0.95)
"""Prior acceptance by confidence bucket, of a draft model and of free drafters."""
_LASTING: Final = 1 - 1 / 1000
"""Weight of a token in the count over all texts when the next one is added."""


class Acceptance:
    """The acceptance of one drafter.

    Args:
        priors: expected rate of each bucket before anything was seen; it is worth `weight` tokens.
        window: compared tokens of a bucket after which one has mostly been forgotten.
        known: accepted and compared tokens of earlier texts.

    Attributes:
        lasting: accepted and compared tokens of all texts.
    """

    def __init__(
        self, priors: tuple[float, ...], weight: float, window: float, known: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self._priors = priors
        self._weight = weight
        self._keep = 1.0 - 1.0 / window
        self._counts = [(0.0, 0.0)] * N_BUCKETS
        self._counts[UNKNOWN] = self.lasting = known

    @property
    def n_observed(self) -> float:
        """Return the compared tokens that still count."""
        return self._counts[UNKNOWN][1]

    @property
    def mean(self) -> float:
        """Return the rate over all buckets, prior included."""
        return self.rate(UNKNOWN)

    def rate(self, bucket: int) -> float:
        """Return the probability that a token of this bucket is accepted."""
        prior, (accepted, compared) = self._priors[bucket], self._counts[bucket]
        if bucket == UNKNOWN:
            prior = (self.lasting[0] + self._weight * prior) / (self.lasting[1] + self._weight)
        return (accepted + self._weight * prior) / (compared + self._weight)

    def observe(self, bucket: int, accepted: bool) -> None:
        """Add the next token in the order of the text, to its bucket and to all of them together."""
        for of in {UNKNOWN, bucket}:
            self._counts[of] = _add(self._counts[of], accepted, self._keep)
        self.lasting = _add(self.lasting, accepted, _LASTING)

    def fade(self, most: float) -> None:
        """Leave no bucket with more than `most` tokens of the present text."""
        self._counts = [(a * most / n, most) if n > most else (a, n) for a, n in self._counts]


def _add(count: tuple[float, float], accepted: bool, keep: float) -> tuple[float, float]:
    return keep * count[0] + accepted, keep * count[1] + 1.0
