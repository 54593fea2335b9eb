"""Finds out whether one of some candidates is faster than what is in use: the fastest of two brief rounds is measured
in turn with it, and wins if it is faster in decoding or prefill, and nowhere slower.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, Literal

import msgspec

from cpuchat.measure.difference import MATTERS, Difference
from cpuchat.measure.turns import DRIFT, C, Drifted, Rates, Rounds, Turns

Verdict = Literal["faster", "same", "noisy", "mixed", "failed"]
"""`same`: nothing that matters is gained; `mixed`: faster in one, slower in another; `noisy`: it cannot be told, also
where the machine was busy."""
GAINS: Final = ("decode", "prefill")
_OVERALL: Final = "overall"
_ASKED: Final = 20
"""A run asks six choices, each after every round of a duel; looks at the same rounds tell much of the same."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second: `prefill`, and `decode` of each text that was written."""

    prefill: float
    decode: tuple[float, ...]

    @property
    def mean_decode(self) -> float:
        """Return the geometric mean of all texts."""
        return statistics.geometric_mean(self.decode)

    def rates(self) -> dict[str, float]:
        """Return all rates by name; half of all tokens are prompts'."""
        texts = {f"text {number}": rate for number, rate in enumerate(self.decode)}
        overall = statistics.harmonic_mean((self.prefill, self.mean_decode))
        return {_OVERALL: overall, "decode": self.mean_decode, "prefill": self.prefill, **texts}


class SearchResult(msgspec.Struct, Generic[C], frozen=True, kw_only=True):
    """The best candidate (None: none was measured), the verdict on it, and its differences. `anchor`: typical rates of
    what is in use. `problem`: why nothing could be decided."""

    verdict: Verdict
    best: C | None = None
    differences: dict[str, Difference] = {}
    anchor: Rates = {}
    problem: str = ""


async def search(measure: Callable[[C], Awaitable[Rates | None]], now: C, candidates: Sequence[C]) -> SearchResult[C]:
    """Compare `candidates` with what is in use `now`. `measure` as of `Turns`, returns `Speed.rates`."""
    turns = Turns(measure, now, _OVERALL, asked=_ASKED)
    try:
        ranked = await turns.rank(candidates)
        if not ranked:
            return SearchResult(verdict="failed")
        best, rounds = next(iter(ranked.items()))
        verdict: Verdict = "same"
        if rounds.difference(_OVERALL).gain > 0:
            rounds = await turns.duel(best, GAINS)
            verdict = _verdict(rounds) if rounds.rivals else "failed"
    except Drifted as drifted:
        return SearchResult(verdict="noisy", problem=drifted.message)
    anchors = sorted(turns.anchors, key=lambda rates: rates[_OVERALL])
    differences = {name: rounds.difference(name) for name in GAINS} if rounds.rivals else {}
    return SearchResult(verdict=verdict, best=best, differences=differences, anchor=anchors[len(anchors) // 2])


def _verdict(rounds: Rounds) -> Verdict:
    found = {name: rounds.difference(name) for name in rounds.rivals[0]}
    overall, gains = found.pop(_OVERALL), [found[name] for name in GAINS]
    if not any(one.verdict == "faster" for one in gains):
        return "noisy" if any(one.may_gain for one in gains) else "same"
    # Nowhere slower than what rounds of the same would differ by.
    is_slower = any(one.gain <= -min(max(MATTERS, 2 * one.error), DRIFT / 2) for one in found.values())
    return "mixed" if is_slower or overall.gain <= 0 else "faster"
