"""Cost profiles of machines on which only one thing takes time."""

from __future__ import annotations

from cpuchat.costs.model import CostProfile, Rate

_AT_ONCE = (Rate("Q8_0", ((1.0, 1e18),)),)


def reading(bytes_per_s: float) -> CostProfile:
    """Return a machine on which only reading takes time."""
    return CostProfile(bandwidth=((1.0, bytes_per_s),), rates=_AT_ONCE)
