"""Decides whether the draft model should have its own cores."""

from __future__ import annotations

from typing import Final

from cpuchat.speculation.depth.costs import PassCosts, expected_tokens
from cpuchat.speculation.drafters.drafter import MAX_DEPTH

GAIN: Final = 1.03
_RATES: Final = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


def overlap_pays(costs: PassCosts) -> bool:
    """Return whether concurrent drafting is clearly faster than sequential at any acceptance rate."""
    return any(concurrent_rate(costs, rate) > GAIN * sequential_rate(costs, rate) for rate in _RATES)


def sequential_rate(costs: PassCosts, rate: float) -> float:
    """Return tokens per ms at the best depth (0 included) when drafted tokens are accepted with this probability."""
    best = 1.0 / costs.verify_ms[0]
    for depth in range(1, MAX_DEPTH + 1):
        cost = depth * costs.draft_ms + costs.verify_ms[depth]
        best = max(best, expected_tokens([rate] * depth) / cost)
    return best


def concurrent_rate(costs: PassCosts, rate: float) -> float:
    """Return the same with the draft model on its own cores; 0 when that was not measured.

    A block whose predecessor was accepted to its end, the token after it guessed too (probability rate^(depth + 1)),
    was drafted meanwhile; any other has to be drafted first.
    """
    if costs.overlap is None:
        return 0.0
    verify, draft, best = costs.overlap.verify_ms, costs.overlap.draft_ms, 0.0
    for depth in range(1, MAX_DEPTH + 1):
        missed = 1.0 - rate ** (depth + 1)
        cost = max(verify[depth], (depth + 1) * draft) + missed * depth * draft
        best = max(best, expected_tokens([rate] * depth) / cost)
    return best
