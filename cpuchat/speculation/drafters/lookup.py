"""Prompt lookup: what followed the last n tokens when they occurred before."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from cpuchat.speculation.drafters.drafter import MAX_DEPTH, N_BUCKETS, Proposal
from cpuchat.speculation.drafters.ngrams import NgramIndex
from cpuchat.timings import DrafterName

MAX_MATCH: Final = 32
"""Longer matches are all worth the same."""
_BUCKET_MATCHES: Final = (3, 4, 6, 9, 16, 32)
"""Match lengths from which on the next bucket is given."""
_BUCKETS: Final = tuple(1 + bisect_right(_BUCKET_MATCHES, match) for match in range(MAX_MATCH + 1))
assert _BUCKETS[-1] == N_BUCKETS - 1


def estimate(match: int) -> float:
    """Probability that the text goes on as it did after the same `match` tokens.

    Measured over source code and technical prose: 0.26 to 0.44 after two tokens, 0.6 to 0.7 after eight, 0.8 after 16.
    """
    return match / (match + 4)


class PromptLookup:
    """Copies on from the most recent occurrence of the n-gram that ends the text, the longest one that has occurred.

    After Saxena, "Prompt Lookup Decoding", where the text is searched each time, and its oldest occurrence found. Past
    the end of the text the copy goes on with itself, so periodic text keeps its period. A token's bucket and estimate
    come from the length of the match that it continues, the drafted tokens before it included: it only counts if they
    are right. Appending a token and proposing take constant time.
    """

    name: DrafterName = "lookup"

    def __init__(self, shortest: int = 2, longest: int = 8) -> None:
        """`shortest`, `longest`: lengths of the n-grams.

        Raises:
            ValueError: not 1 <= shortest <= longest.
        """
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-grams from {shortest} to {longest} tokens")
        self._index = NgramIndex(range(shortest, longest + 1))

    def begin_answer(self, text: Sequence[int]) -> None:
        """See `Drafter.begin_answer`."""
        self._index.set_text(text)

    def append(self, tokens: Sequence[int]) -> None:
        """See `Drafter.append`."""
        self._index.extend(tokens)

    def propose(self, max_n: int, min_probability: float = 0.0) -> Proposal:
        """See `Drafter.propose`."""
        size, end = self._index.match()
        n = min(max_n, MAX_DEPTH)
        if not size or n < 1:
            return Proposal("lookup")
        match = self._length(end, size)
        if min_probability > estimate(match):
            return Proposal("lookup")  # the estimate only grows along the draft: its first token decides
        text = self._index.text
        tokens = text[end + 1 : end + 1 + n].tolist()
        if len(tokens) < n:
            tokens = (tokens * (n // len(tokens) + 1))[:n]
        return Proposal("lookup", tokens, [_BUCKETS[min(match + i, MAX_MATCH)] for i in range(n)])

    def _length(self, end: int, known: int) -> int:
        """How many tokens up to `end` are those at the end of the text, `MAX_MATCH` at most; the last `known` are."""
        text = self._index.text
        last = len(text) - 1
        most = min(MAX_MATCH, end + 1)
        while known < most and text[end - known] == text[last - known]:
            known += 1
        return known
