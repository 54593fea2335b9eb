"""Is it worth while to give the draft model cores of its own?"""

from __future__ import annotations

from typing import Final

from cpuchat.speculation.depth.costs import PassCosts, expected_tokens
from cpuchat.speculation.drafters.drafter import MAX_DEPTH

GAIN: Final = 1.03
_RATES: Final = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)


def overlap_pays(costs: PassCosts, gain: float = GAIN) -> bool:
    """Whether drafting and verifying at once is faster than in turn by `gain`, at any acceptance rate."""
    return any(overlapped_rate(costs, rate) > gain * sequential_rate(costs, rate) for rate in _RATES)


def sequential_rate(costs: PassCosts, rate: float) -> float:
    """Tokens per ms at the best depth (0 included) when each drafted token is right with probability `rate`."""
    best = 1.0 / costs.verify_ms[0]
    for depth in range(1, MAX_DEPTH + 1):
        cost = depth * costs.draft_ms + costs.verify_ms[depth]
        best = max(best, expected_tokens([rate] * depth) / cost)
    return best


def overlapped_rate(costs: PassCosts, rate: float) -> float:
    """The same with cores of its own for the draft model; 0 when that was not measured.

    A block whose predecessor was right to its end, the token after it included (probability rate^(depth + 1)), was
    drafted meanwhile; any other has to be drafted first.
    """
    if costs.overlap is None:
        return 0.0
    verify, draft, best = costs.overlap.verify_ms, costs.overlap.draft_ms, 0.0
    for depth in range(1, MAX_DEPTH + 1):
        missed = 1.0 - rate ** (depth + 1)
        cost = max(verify[depth], (depth + 1) * draft) + missed * depth * draft
        best = max(best, expected_tokens([rate] * depth) / cost)
    return best
