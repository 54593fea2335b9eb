"""The free drafters in order of preference, and the scores of those that are not verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Final

from cpuchat.protocol.drafters import DRAFTERS, DrafterName
from cpuchat.speculation.drafters.drafter import Drafter, Proposal
from cpuchat.speculation.drafters.ngrams import NgramIndex

SHADOW_TOKENS: Final = 8
"""Length of a draft that is made only to be scored."""
_KEPT_SCORES: Final = 256


def free_drafters(index: NgramIndex) -> tuple[Drafter, ...]:
    """Make the drafters of `protocol.drafters` that look into `index`, in their order."""
    return tuple(resolve_name(row.factory)(index) for row in DRAFTERS if row.factory)


Score = tuple[DrafterName, list[int], list[bool]]
"""Drafter, the buckets of tokens that it drafted, and whether each was written: all but perhaps the last."""


class Cascade:
    """Asks drafters that cost next to nothing, and scores those whose proposals are not verified.

    A drafter whose proposal is not being verified has a pending draft, its last one, until that is used up or refuted.
    Written tokens are compared with it as in a verify pass: up to the first different token. So it is noticed when a
    drafter that is not worth a pass becomes worth it.

    Args:
        index: of the text that the drafters look into.
        drafters: preferred ones first.
        worth: returns how many tokens of a proposal to verify now, 0 = none.
    """

    def __init__(self, index: NgramIndex, drafters: Sequence[Drafter], worth: Callable[[Proposal], int]) -> None:
        self._index = index
        self._drafters = tuple(drafters)
        self._worth = worth
        self._pending: dict[DrafterName, tuple[Proposal, int]] = {}  # and its tokens that were compared
        self._asked: set[DrafterName] = set()
        self._scores: list[Score] = []

    def propose(self, max_n: int) -> Proposal:
        """Return the first proposal that is worth a pass, cut to what is; empty: none is.

        The caller verifies it, so its drafter is not scored on it here. (The longest of all worthwhile ones is no
        better choice: simulated over edited code it was up to 7 % slower, since the preferred drafter knows more.)"""
        for drafter in self._drafters:
            self._asked.add(drafter.name)
            proposal = drafter.propose(max_n)
            depth = min(self._worth(proposal), len(proposal)) if proposal.tokens else 0
            if depth > 0:
                self._pending.pop(drafter.name, None)
                return proposal.cut(depth)
            if proposal.tokens:
                self._pending.setdefault(drafter.name, (proposal, 0))
        return Proposal("")

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens that were written, with or without a draft."""
        if not tokens:
            return
        for drafter in self._drafters:
            is_due = drafter.name not in self._asked and drafter.name not in self._pending
            if is_due and (proposal := drafter.propose(SHADOW_TOKENS)):
                self._pending[drafter.name] = proposal, 0
            self._compare(drafter.name, tokens)
        self._index.extend(tokens)
        self._asked.clear()

    def take_scores(self) -> list[Score]:
        """Return what was compared since the last call, in the order of the text."""
        scores, self._scores = self._scores, []
        return scores

    def _compare(self, name: DrafterName, tokens: Sequence[int]) -> None:
        """Compare the pending draft of `name` with what was written; a refuted or used up one is dropped."""
        if name not in self._pending:
            return
        proposal, first = self._pending[name]
        accepted: list[bool] = []
        for token, written in zip(proposal.tokens[first:], tokens, strict=False):
            accepted.append(token == written)
            if not accepted[-1]:
                break
        end = first + len(accepted)
        self._scores.append((name, proposal.buckets[first:end], accepted))
        del self._scores[:-_KEPT_SCORES]
        if not accepted[-1] or end == len(proposal):
            del self._pending[name]
        else:
            self._pending[name] = proposal, end
