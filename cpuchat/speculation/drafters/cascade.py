"""The free drafters together: who drafts now, and who would have been right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from cpuchat.speculation.drafters.drafter import Drafter, Proposal
from cpuchat.timings import DrafterName

SHADOW_TOKENS: Final = 8
"""Length of a prediction that is made only to be scored."""
_KEPT_SCORES: Final = 256

Score = tuple[DrafterName, list[int], list[bool]]
"""Drafter, the buckets of tokens that it predicted, and whether each was right: at most the last one is not."""


class Cascade:
    """Asks drafters that cost next to nothing, and keeps score of them while nothing is verified.

    A drafter whose proposal is not being verified has a prediction pending: what it said when it was last asked, until
    that is used up or refuted. What is written is compared with it the way a verify pass would: up to the first wrong
    token, whose successors say nothing. So it is noticed when a drafter that is not worth a pass becomes worth it.
    """

    def __init__(self, drafters: Sequence[Drafter], worth: Callable[[Proposal], int]) -> None:
        """`drafters`: those preferred first. `worth`: how many tokens of a proposal to verify now, 0 = none."""
        self._drafters = tuple(drafters)
        self._worth = worth
        self._pending: dict[DrafterName, Proposal] = {}
        self._compared: dict[DrafterName, int] = {}
        self._asked: set[DrafterName] = set()
        self._scores: list[Score] = []

    def begin_answer(self, text: Sequence[int]) -> None:
        """An answer to `text` begins. What was learnt of the last one and not asked for yet is kept."""
        self._pending.clear()
        self._asked.clear()
        for drafter in self._drafters:
            drafter.begin_answer(text)

    def propose(self, max_n: int, min_probability: float = 0.0) -> Proposal:
        """The first proposal that is worth a pass, cut to what of it is; empty: none is.

        It is taken to be verified, so its drafter is not scored on it here. (The longest of all worthwhile ones is no
        better choice: simulated over edited code it was up to 7 % slower, since the preferred drafter knows more.)
        """
        for drafter in self._drafters:
            self._asked.add(drafter.name)
            proposal = drafter.propose(max_n, min_probability)
            depth = min(self._worth(proposal), len(proposal)) if proposal.tokens else 0
            if depth > 0:
                self._pending.pop(drafter.name, None)
                return proposal.cut(depth)
            if drafter.name not in self._pending:
                self._predict(proposal)
        return Proposal(self._drafters[0].name if self._drafters else "lookup")

    def append(self, tokens: Sequence[int]) -> None:
        """These were written after it: by a verify pass, by plain steps, or as another drafter proposed."""
        if not tokens:
            return
        for drafter in self._drafters:
            if drafter.name not in self._pending and drafter.name not in self._asked:
                self._predict(drafter.propose(SHADOW_TOKENS))
            self._compare(drafter.name, tokens)
            drafter.append(tokens)
        self._asked.clear()

    def take_scores(self) -> list[Score]:
        """What was compared since the last call, in the order of the text."""
        scores, self._scores = self._scores, []
        return scores

    def _predict(self, proposal: Proposal) -> None:
        if proposal.tokens:
            self._pending[proposal.drafter] = proposal
            self._compared[proposal.drafter] = 0

    def _compare(self, name: DrafterName, tokens: Sequence[int]) -> None:
        """Compare the pending prediction of `name` with what was written; a wrong or used up one is dropped."""
        proposal = self._pending.get(name)
        if proposal is None:
            return
        first = self._compared[name]
        predicted = proposal.tokens[first : first + len(tokens)]
        right = [True] * len(predicted)
        for i, (token, written) in enumerate(zip(predicted, tokens, strict=False)):
            if token != written:
                right = [*right[:i], False]
                break
        self._scores.append((name, proposal.buckets[first : first + len(right)], right))
        del self._scores[:-_KEPT_SCORES]
        if not right[-1] or first + len(right) == len(proposal):
            del self._pending[name]
        else:
            self._compared[name] = first + len(right)
