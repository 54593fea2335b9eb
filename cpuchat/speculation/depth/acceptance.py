"""Learns the acceptance rate of a drafter from the text as it is written, and chooses the best depth under it.

A drafted token is accepted if the target writes the same one, given all before it in the draft. Rates are Beta
posteriors that forget: of the present text, per confidence bucket (the drafter's own estimate); and of all texts, which
the next one is expected to be like. The best depth has most expected tokens per millisecond.
"""

from __future__ import annotations

from cpuchat.speculation.depth.constants import CONSTANTS
from cpuchat.speculation.depth.costs import CurrentCosts
from cpuchat.speculation.drafters.drafter import N_BUCKETS, UNKNOWN


class Acceptance:
    """The acceptance of one drafter; `lasting`: accepted and compared tokens of all texts, `known`: of earlier ones.
    `priors`: expected rate of each bucket before anything was seen; it is worth `weight` tokens. `window`: compared
    tokens of a bucket after which one has mostly been forgotten."""

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
        self.lasting = _add(self.lasting, accepted, CONSTANTS.lasting_weight)

    def fade(self, max_tokens: float) -> None:
        """Leave no bucket with more than `max_tokens` of the present text."""
        self._counts = [
            (accepted * max_tokens / compared, max_tokens) if compared > max_tokens else (accepted, compared)
            for accepted, compared in self._counts
        ]


def _add(count: tuple[float, float], accepted: bool, keep: float) -> tuple[float, float]:
    return keep * count[0] + accepted, keep * count[1] + 1.0


def rates(rate: float, costs: CurrentCosts, max_depth: int) -> list[float]:
    """Return tokens per ms by depth, 0 (plain decoding) first. `rate` is the acceptance."""
    times, draft = costs.times.ms, costs.draft.ms[0]
    found = [1.0 / times[0]]
    total = full = 1.0
    for depth in range(1, max_depth + 1):
        full *= rate
        total += full
        found.append(total / (depth * draft + times[depth] + costs.rollback.ms[0] * (1.0 - full)))
    return found


def limit_gain(costs: CurrentCosts, max_depth: int) -> float:
    """Return the best speed-up over plain decoding if every drafted token is accepted."""
    return max(rates(1.0, costs, max_depth)[1:], default=0.0) * costs.plain_ms
