"""The draft model's best steady rate: tokens per millisecond at each depth, sequential or concurrent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cpuchat.speculation.depth.acceptance import Acceptance
from cpuchat.speculation.drafters.drafter import MAX_DEPTH

_KEEP: Final = 0.01
"""A depth is kept while no other is expected to be better by this share."""
_OVERLAP: Final = 1.03
"""Switching between sequential and concurrent drafting takes this expected advantage."""
_UNREACHED: Final = 0.02
_HOPELESS: Final = 0.7
_NEW_CLASS: Final = frozenset((1, 2, 4, 8))
_UNCERTAIN: Final = 0.025


@dataclass(frozen=True)
class Plan:
    """What the draft model does next: `depth` tokens, 0 = plain decoding; `overlap`: it drafts on during verify."""

    depth: int = 0
    overlap: bool = False


@dataclass(frozen=True, slots=True)
class Best:
    """The best steady rate (tokens per ms) and the depth to use now for it.

    `explore`: a depth whose cost was hardly seen and that may be better than it seems; 0 = none.
    """

    rate: float
    depth: int
    overlap: bool = False
    explore: int = 0


@dataclass(frozen=True, slots=True)
class Prices:
    """Current costs in ms.

    Attributes:
        times: `times[n - 1]` is a pass over n tokens.
        draft: one drafted token.
        rollback: extra after a pass in which a token was rejected.
        offered: share of allowed tokens that the draft model drafts (it stops where it is unsure).
        overlap_times, overlap_draft: the same while both models compute; None when that is not possible.
    """

    times: Sequence[float]
    draft: float
    rollback: float
    offered: float
    overlap_times: Sequence[float] | None
    overlap_draft: float


def steady_rates(most: int, acceptance: Acceptance, prices: Prices, *, complete: bool) -> tuple[list[float], ...]:
    """Return tokens per ms by depth (0 at depth 0), sequential and concurrent.

    Passes begin after a rejection (streak 0) or after a fully accepted draft (streak g); how often each is the case
    is a two-state chain per depth, and the steady rate is over both. (The depth that is best for the present state
    alone is no better: it may keep us in the poorer one.)

    Concurrent: the next block is drafted while this one is verified, in vain unless all of this one is accepted and
    the token after it was guessed too (PEARL, arXiv 2408.11850). A pass then takes the longer of both; otherwise the
    time to draft afresh is added.

    Args:
        complete: compute all `most` depths; otherwise hopeless ones at the end may be missing.
    """
    fresh = going = acceptance.rates(0)
    reach0 = reach1 = total0 = total1 = 1.0
    go, drafting, stopped = 1.0, 0.0, 0.0
    rates, overlap_rates = [0.0], [0.0]
    times, offered, best = prices.times, prices.offered, 0.0
    for g in range(1, most + 1):
        drafting += go * prices.draft
        stopped += go * (1.0 - offered) * times[g - 1]
        go *= offered
        if g in _NEW_CLASS:  # after a fully accepted draft of g tokens the streak is g
            going = acceptance.rates(g)
            reach1 = total1 = 1.0
            for rate in going[: g - 1]:
                reach1 *= rate * offered
                total1 += reach1
        reach0 *= fresh[g - 1] * offered
        reach1 *= going[g - 1] * offered
        total0 += reach0
        total1 += reach1
        share = reach0 / (1.0 - reach1 + reach0) if reach1 < 1.0 else 1.0
        full = reach0 + share * (reach1 - reach0)
        total = total0 + share * (total1 - total0)
        rejected = prices.rollback * (1.0 - full)
        rates.append(total / (drafting + stopped + go * times[g] + rejected))
        best = max(best, rates[g])
        if prices.overlap_times is not None:
            hit = full * going[min(g, MAX_DEPTH - 1)]
            ready = max(prices.overlap_times[g], (g + 1) * prices.overlap_draft)
            overlap_rates.append(total / (ready + (1.0 - hit) * g * prices.overlap_draft + rejected))
        elif reach1 < _UNREACHED and rates[g] < _HOPELESS * best and not complete:
            break
    return rates, overlap_rates


def best_steady(
    most: int, acceptance: Acceptance, prices: Prices, uncertainty: Callable[[int], float], last: Plan
) -> Best:
    """Return the best depth of 1..`most`.

    Args:
        uncertainty: how far off `prices.times[n - 1]` may be, as a share.
        last: the plan in use, kept unless another one is better.
    """
    rates, overlap_rates = steady_rates(most, acceptance, prices, complete=False)
    top, best_overlap = max(rates), max(overlap_rates)
    if best_overlap > top * (1 / _OVERLAP if last.overlap else _OVERLAP):
        depth = overlap_rates.index(best_overlap)
        if last.overlap and 0 < last.depth <= most and overlap_rates[last.depth] > best_overlap * (1 - _KEEP):
            depth = last.depth
        return Best(best_overlap, depth, True)
    keeps = 0 < last.depth < len(rates) and rates[last.depth] > top * (1 - _KEEP)
    depth = last.depth if keeps else rates.index(top)
    explore, hoped = 0, max(top, 1.0 / prices.times[0]) * (1.0 + _KEEP)
    for g in range(1, len(rates)):
        off = uncertainty(g + 1)
        if g != depth and off > _UNCERTAIN and rates[g] * (1.0 + off) > hoped:
            explore, hoped = g, rates[g] * (1.0 + off)
    return Best(top, depth, False, explore)


def overlap_is_better(depth: int, acceptance: Acceptance, prices: Prices, last: Plan) -> bool:
    """Return whether drafting concurrently is clearly faster at exactly this depth."""
    rates, overlap_rates = steady_rates(depth, acceptance, prices, complete=True)
    return overlap_rates[-1] > rates[-1] * (1 / _OVERLAP if last.overlap else _OVERLAP)


def limit_gain(rate: float, most: int, times: Sequence[float], draft: float) -> float:
    """Return the best speed-up over plain decoding if every drafted token is accepted with probability `rate`."""
    total = reached = 1.0
    best = 0.0
    for g in range(1, most + 1):
        reached *= rate
        total += reached
        best = max(best, total / (times[g] + g * draft))
    return best * times[0]
