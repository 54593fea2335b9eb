"""A drafter that the app does not have."""

from __future__ import annotations

from cpuchat.speculation.drafters.drafter import UNKNOWN, Drafter, Proposal
from cpuchat.speculation.drafters.ngrams import NgramIndex


class Toy(Drafter):
    """Knows the answer: after `n_prompt` tokens comes `answer`."""

    name = "toy"
    n_prompt = 0
    answer: tuple[int, ...] = ()

    def __init__(self, index: NgramIndex) -> None:
        self._index = index

    def propose(self, max_n: int) -> Proposal:
        written = len(self._index) - self.n_prompt
        tokens = list(self.answer[written : written + max_n])
        return Proposal("toy", tokens, [UNKNOWN] * len(tokens))
