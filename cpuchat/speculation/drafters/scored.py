"""Asks suffix decoding, and scores what it proposes where that is not verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from cpuchat.speculation.drafters.drafter import Proposal
from cpuchat.speculation.drafters.ngrams import NgramIndex
from cpuchat.speculation.drafters.suffix import SuffixDecoding

SHADOW_TOKENS: Final = 8
"""Length of a draft that is made only to be scored."""
_KEPT_SCORES: Final = 256

Score = tuple[list[int], list[bool]]
"""The buckets of tokens that were drafted, and whether each was written: all but perhaps the last."""


class ScoredDrafter:
    """Notices when a drafter that is not worth a pass becomes worth it.

    While its proposal is not being verified it has a pending draft, its last one, until that is used up or refuted.
    Written tokens are compared with it as in a verify pass: up to the first different token.

    Args:
        index: of the text that the drafter looks into.
        worth: returns how many tokens of a proposal to verify now, 0 = none.
    """

    def __init__(self, index: NgramIndex, drafter: SuffixDecoding, worth: Callable[[Proposal], int]) -> None:
        self._index = index
        self._drafter = drafter
        self._worth = worth
        self._pending: Proposal | None = None
        self._compared = 0  # tokens of it
        self._is_asked = False
        self._scores: list[Score] = []

    def propose(self, max_n: int) -> Proposal:
        """Return the proposal, cut to what is worth a pass; empty: none of it is. The caller verifies it, so it is not
        scored here."""
        self._is_asked = True
        proposal = self._drafter.propose(max_n)
        depth = min(self._worth(proposal), len(proposal)) if proposal.tokens else 0
        if depth > 0:
            self._pending = None
        elif proposal.tokens and self._pending is None:
            self._pending, self._compared = proposal, 0
        return proposal.cut(depth)

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens that were written, with or without a draft."""
        if not tokens:
            return
        if not self._is_asked and self._pending is None and (proposal := self._drafter.propose(SHADOW_TOKENS)):
            self._pending, self._compared = proposal, 0
        if (pending := self._pending) is not None:
            first, accepted = self._compared, list[bool]()
            for token, written in zip(pending.tokens[first:], tokens, strict=False):
                accepted.append(token == written)
                if not accepted[-1]:
                    break
            self._compared = first + len(accepted)
            self._scores.append((pending.buckets[first : self._compared], accepted))
            del self._scores[:-_KEPT_SCORES]
            if not accepted[-1] or self._compared == len(pending):
                self._pending = None
        self._index.extend(tokens)
        self._is_asked = False

    def take_scores(self) -> list[Score]:
        """Return what was compared since the last call, in the order of the text."""
        scores, self._scores = self._scores, []
        return scores
