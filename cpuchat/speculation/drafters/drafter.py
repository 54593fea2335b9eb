"""What drafters propose."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Final

from cpuchat.protocol.drafters import DrafterName

MAX_DEPTH: Final = 31
"""Longest draft: a verify pass evaluates one token more."""

_BUCKET_LIMITS: Final = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)
UNKNOWN: Final = 0
"""Bucket of a token whose drafter gives no probability."""
N_BUCKETS: Final = len(_BUCKET_LIMITS) + 2


def confidence_bucket(probability: float) -> int:
    """Return the bucket of a drafter's own estimate, whose rate is learned: 1 (unsure) to `N_BUCKETS` - 1 (sure)."""
    return 1 + bisect_right(_BUCKET_LIMITS, probability)


@dataclass(slots=True)
class Proposal:
    """Drafted tokens in order, and the confidence bucket of each; empty when the drafter has none."""

    drafter: DrafterName
    tokens: list[int] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, n: int) -> Proposal:
        return self if n >= len(self.tokens) else Proposal(self.drafter, self.tokens[:n], self.buckets[:n])
