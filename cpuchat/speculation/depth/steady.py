"""The draft model's best steady rate: tokens per millisecond at each depth, in turn with the target or at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cpuchat.speculation.depth.acceptance import Acceptance
from cpuchat.speculation.drafters.drafter import MAX_DEPTH

_KEEP: Final = 0.01
"""A depth is kept while no other is expected to be better by this share."""
_OVERLAP: Final = 1.03
"""Drafting at once (or in turn again) begins when it is expected to be better by this."""
_UNREACHED: Final = 0.02
_HOPELESS: Final = 0.7
_NEW_CLASS: Final = frozenset((1, 2, 4, 8))
_DOUBT: Final = 0.025


@dataclass(frozen=True)
class Plan:
    """What the draft model shall do next. `depth` tokens, 0 = plain decoding; `overlap`: draft on while verifying."""

    depth: int = 0
    overlap: bool = False


@dataclass(frozen=True, slots=True)
class Best:
    """The best steady rate (tokens per ms), and the depth to use now for it. `explore`: a depth that may be better
    than it seems, because its cost was hardly seen; 0 = none."""

    rate: float
    depth: int
    overlap: bool = False
    explore: int = 0


@dataclass(frozen=True, slots=True)
class Prices:
    """What things cost now, in ms; `times[n - 1]`: a pass over n tokens. `offered`: how often the draft model goes on
    to another token when it may (it stops where it is unsure). `over_times`, `over_draft`: both models at once."""

    times: Sequence[float]
    draft: float
    rollback: float
    offered: float
    over_times: Sequence[float] | None
    over_draft: float


def best_steady(
    most: int, acceptance: Acceptance, prices: Prices, doubt: Callable[[int], float], last: Plan, *, at_depth: bool
) -> Best:
    """The best depth of 1..`most`. `doubt(n)`: how far off times[n - 1] may be; `last`: the plan in use, kept unless
    another is better. `at_depth`: depth `most` in any case, in turn or at once.

    Passes begin after a refusal (run 0) or after a draft that was right to its end (run g); how often is a
    two-state chain for each depth, and the steady rate is over both. (The depth that is best for the present state
    alone is no better: it may keep us in the poorer one.)

    At once: the next block is drafted while this one is verified, in vain unless all of this one is right and the token
    after it was guessed too (PEARL, arXiv 2408.11850). A pass then takes the longer of both, otherwise also the time
    to draft afresh.
    """
    fresh = going = acceptance.rates(0)
    times, draft, rollback, offered = prices.times, prices.draft, prices.rollback, prices.offered
    over, over_draft = prices.over_times, prices.over_draft
    reach0 = reach1 = total0 = total1 = 1.0
    go, drafting, stopped = 1.0, 0.0, 0.0
    rates, over_rates = [0.0], [0.0]
    best = best_over = 0
    for g in range(1, most + 1):
        drafting += go * draft
        stopped += go * (1.0 - offered) * times[g - 1]
        go *= offered
        if g in _NEW_CLASS:
            # After a draft of g tokens that was right the run is g.
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
        refused = rollback * (1.0 - full)
        cost = drafting + stopped + go * times[g] + refused
        rates.append(total / cost)
        if rates[g] > rates[best]:
            best = g
        if over is not None:
            hit = full * going[min(g, MAX_DEPTH - 1)]
            ready = max(over[g], (g + 1) * over_draft)
            over_rates.append(total / (ready + (1.0 - hit) * g * over_draft + refused))
            if over_rates[g] > over_rates[best_over]:
                best_over = g
        elif reach1 < _UNREACHED and rates[g] < _HOPELESS * rates[best] and not at_depth:
            break
    if at_depth:
        best, best_over = most, most if over is not None else 0
    if best_over and over_rates[best_over] > rates[best] * (1 / _OVERLAP if last.overlap else _OVERLAP):
        kept = last.depth if last.overlap and not at_depth else 0
        keep = 0 < kept <= most and over_rates[kept] > over_rates[best_over] * (1 - _KEEP)
        return Best(over_rates[best_over], kept if keep else best_over, True)
    top = rates[best]
    if at_depth:
        return Best(top, most)
    depth = last.depth if 0 < last.depth < len(rates) and rates[last.depth] > top * (1 - _KEEP) else best
    explore, hoped = 0, max(top, 1.0 / times[0]) * (1.0 + _KEEP)
    for g in range(1, len(rates)):
        if g == depth:
            continue
        off = doubt(g + 1)
        if off > _DOUBT and rates[g] * (1.0 + off) > hoped:
            explore, hoped = g, rates[g] * (1.0 + off)
    return Best(top, depth, False, explore)


def limit_gain(rate: float, most: int, times: Sequence[float], draft: float) -> float:
    """Best advantage over plain decoding if every drafted token were right with this probability, in turn."""
    total = reached = 1.0
    best = 0.0
    for g in range(1, most + 1):
        reached *= rate
        total += reached
        best = max(best, total / (times[g] + g * draft))
    return best * times[0]
