"""Prompt lookup: drafts what followed an earlier occurrence of the last n tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from cpuchat.speculation.drafters.drafter import MAX_DEPTH, N_BUCKETS, Proposal
from cpuchat.speculation.drafters.ngrams import NgramIndex
from cpuchat.timings import DrafterName

_SIZES: Final = range(2, 9)
"""Lengths of the indexed n-grams."""
MAX_MATCH: Final = 32
"""Longer matches count as this."""
_BUCKET_MATCHES: Final = (3, 4, 6, 9, 16, 32)
"""Match lengths at which the next confidence bucket begins."""
_BUCKETS: Final = tuple(1 + bisect_right(_BUCKET_MATCHES, match) for match in range(MAX_MATCH + 1))
assert _BUCKETS[-1] == N_BUCKETS - 1


def estimate(match: int) -> float:
    """Return the probability that the text continues as it did after the same `match` tokens.

    Measured over source code and technical prose: 0.26 to 0.44 after two tokens, 0.6 to 0.7 after eight, 0.8 after 16.
    """
    return match / (match + 4)


class PromptLookup:
    """Copies what followed the latest occurrence of the longest n-gram at the end of the text that occurred before.

    After Saxena, "Prompt Lookup Decoding", which searches the whole text each time and finds the oldest occurrence.
    Past the end of the text the copy continues with itself, so periodic text keeps its period. A token's bucket comes
    from the length of the match that it continues, including the drafted tokens before it: it only counts if they are
    accepted. Appending a token and proposing take constant time.
    """

    name: DrafterName = "lookup"

    def __init__(self) -> None:
        self._index = NgramIndex(_SIZES)

    def begin_answer(self, text: Sequence[int]) -> None:
        """Implement `Drafter.begin_answer`."""
        self._index.set_text(text)

    def append(self, tokens: Sequence[int]) -> None:
        """Implement `Drafter.append`."""
        self._index.extend(tokens)

    def propose(self, max_n: int, min_probability: float = 0.0) -> Proposal:
        """Implement `Drafter.propose`."""
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
        """Return how many tokens up to `end` match the end of the text, at most `MAX_MATCH`; `known` of them do."""
        text = self._index.text
        last = len(text) - 1
        most = min(MAX_MATCH, end + 1)
        while known < most and text[end - known] == text[last - known]:
            known += 1
        return known
