"""Suffix decoding: draft what most often followed the longest suffix of the text that occurred before."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Final

from cpuchat.prefix import common_prefix
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, Proposal, confidence_bucket
from cpuchat.speculation.drafters.ngrams import NgramIndex
from cpuchat.timings import DrafterName

SIZES: Final = (2, 3, 5, 8)
"""Lengths of the indexed n-grams, shortest first."""
LONG: Final = (16, 32)
"""Longer match lengths, found among the occurrences of the longest n-gram."""
MAX_CANDIDATES: Final = 8
"""Most recent occurrences that count: this bounds the time of a proposal."""
ENOUGH: Final = 6
"""A match with so many occurrences ends the search: shorter ones predict worse."""
END: Final = -1
"""Ends every remembered chat; no draft goes past it."""


def escape(match: int, seen: int) -> float:
    """Return the pseudo-count of "something else follows" after a match of `match` tokens seen `seen` times.

    The share of rejected tokens among unanimous predictions, measured over source code and technical prose, falls with
    both about like this (1.3 to 2.8 after two tokens seen once, 0.2 after sixteen, 0.3 after two tokens seen often).
    """
    return 3 / (match * sqrt(seen))


_ESCAPE: Final = tuple(
    tuple(escape(max(1, match), max(1, seen)) for match in range(LONG[-1] + MAX_DEPTH + 1))
    for seen in range(MAX_CANDIDATES + 1)
)


class SuffixDecoding:
    """Drafts along the most frequent continuation of a suffix.

    After Oliaro et al., "SuffixDecoding", arXiv 2411.04975. The paper's suffix trees are implicit here: hash tables map
    the last 8, 5, 3 and 2 tokens to the places where they occurred, and the tree below such a match is what follows at
    these places, read on demand. So every token can be removed (an edited chat), at about 75 bytes per token and n-gram
    length. Limited are the occurrences that count (the `MAX_CANDIDATES` most recent), the match lengths (`SIZES` and
    `LONG`) and the length of a draft (`factor` times the match, the paper's alpha, down to a path probability of
    `min_path`). Of all matches, in this chat and in others, the draft with the highest score is taken: the sum of its
    path probabilities, which is the number of tokens expected to be accepted.

    Where the text ends, the continuation of an occurrence repeats itself: periodic text stays periodic.

    Args:
        other_chats: tokens of earlier chats kept at most, an end mark each included.

    Attributes:
        use_remembered: proposals may come from other chats.
    """

    name: DrafterName = "suffix"

    def __init__(self, *, factor: float = 2.0, min_path: float = 0.05, other_chats: int = 1 << 16) -> None:
        self.use_remembered = True
        self._factor = factor
        self._min_path = min_path
        self._chat = NgramIndex(SIZES)
        # Two generations: when the newer is full, the older one is dropped as a whole.
        self._half = other_chats // 2
        self._newer, self._older = NgramIndex(SIZES), NgramIndex(SIZES)
        self._newer_texts: list[array[int]] = []

    def begin_answer(self, text: Sequence[int]) -> None:
        """Implement `Drafter.begin_answer`."""
        self._chat.set_text(text)

    def append(self, tokens: Sequence[int]) -> None:
        """Implement `Drafter.append`."""
        self._chat.extend(tokens)

    def remember(self, tokens: Sequence[int]) -> None:
        """Keep the text of another chat to draft from; the oldest texts are dropped when there are too many tokens.

        A prefix shared with a recent text (the same chat when it was shorter, the same system prompt) is not kept
        twice. Of a text longer than half of the limit, the end is kept.
        """
        if self._half < 2 or not tokens:
            return
        text = array("i", tokens)
        new = self._unknown(text)
        if len(self._newer) + len(new) + 1 > self._half:
            self._older, self._newer, self._newer_texts = self._newer, NgramIndex(SIZES), []
            new = text[-(self._half - 1) :]
        if new:
            self._newer.extend([*new, END])
            self._newer_texts.append(text)

    def forget(self) -> None:
        """Forget all other chats."""
        self._newer, self._older = NgramIndex(SIZES), NgramIndex(SIZES)
        self._newer_texts = []

    def _unknown(self, text: array[int]) -> array[int]:
        """Return what of `text` the newer generation does not hold, with enough before it to match."""
        known = max((common_prefix(text, other) for other in self._newer_texts), default=0)
        return text[max(0, known - SIZES[-1]) :] if known < len(text) else array("i")

    def propose(self, max_n: int, min_probability: float = 0.0) -> Proposal:
        """Implement `Drafter.propose`. Buckets are of each token's probability given that those before are accepted."""
        max_n = min(max_n, MAX_DEPTH)
        tokens: list[int] = []
        probabilities: list[float] = []
        best = 0.0
        for source in (self._chat, self._newer, self._older):
            if source is not self._chat and not (self.use_remembered and source.text):
                continue
            for match, ends in self._matches(source):
                limit = min(max_n, int(self._factor * match))
                if best >= 0.9 * limit:
                    break
                drafted, estimates, score = self._path(source, ends, match, limit, min_probability)
                if score > best:
                    tokens, probabilities, best = drafted, estimates, score
                if len(ends) >= ENOUGH:
                    break
        return Proposal("suffix", tokens, [confidence_bucket(p) for p in probabilities])

    def _matches(self, source: NgramIndex) -> Iterator[tuple[int, list[int]]]:
        """Yield match lengths, longest first, each with the positions in `source` where it ends, latest first.

        A length with the same occurrences as a longer one is left out.
        """
        found = 0
        for size in reversed(SIZES):
            ends = self._ends(source, size)
            if size == SIZES[-1] and ends:
                for longer in self._longer(source, ends):
                    if len(longer[1]) > found:
                        found = len(longer[1])
                        yield longer
            if len(ends) > found:
                found = len(ends)
                yield size, ends

    def _ends(self, source: NgramIndex, size: int) -> list[int]:
        """Return where the chat's last `size` tokens ended in `source`, without the chat's own end, latest first."""
        if source is self._chat:
            previous = source.previous[size]
            end = previous[-1] if previous else -1
        else:
            key = self._chat.key(size)
            if key is None:
                return []
            previous = source.previous[size]
            end = source.last(size, key)
        ends: list[int] = []
        while end >= 0 and len(ends) < MAX_CANDIDATES:
            ends.append(end)
            end = previous[end]
        return ends

    def _longer(self, source: NgramIndex, ends: list[int]) -> list[tuple[int, list[int]]]:
        """Return those of `ends` that end a longer match too, longest first."""
        longer: list[tuple[int, list[int]]] = []
        text, own = source.text, self._chat.text
        for length in LONG:
            if len(own) < length:
                break
            tail = own[-length:]
            ends = [end for end in ends if end + 1 >= length and text[end + 1 - length : end + 1] == tail]
            if not ends:
                break
            longer.insert(0, (length, ends))
        return longer

    def _path(
        self, source: NgramIndex, ends: list[int], match: int, limit: int, min_probability: float
    ) -> tuple[list[int], list[float], float]:
        """Return the most frequent continuation of `ends`: tokens, each one's probability, and the score."""
        tokens: list[int] = []
        probabilities: list[float] = []
        path, score, seen = 1.0, 0.0, len(ends)
        alive = _continuations(source.text, ends, limit)
        for depth in range(limit):
            if len(alive) == 1:
                token, count = alive[0][0][depth], seen
            else:
                tally: dict[int, int] = {}
                for continuation, n in alive:
                    token = continuation[depth]
                    tally[token] = tally.get(token, 0) + n
                ended = tally.pop(END, 0)
                # On a tie the one seen last: it came first in `alive`.
                token = max(tally, key=tally.__getitem__, default=END)
                if token == END:
                    break
                count = tally[token]
                if len(tally) > 1 or ended:
                    alive = [item for item in alive if item[0][depth] == token]
            probability = count / (seen + _ESCAPE[seen][match + depth])
            path *= probability
            if token == END or probability < min_probability or path < self._min_path:
                break
            tokens.append(token)
            probabilities.append(probability)
            score += path
            seen = count
        return tokens, probabilities, score


def _continuations(text: array[int], ends: list[int], length: int) -> list[tuple[array[int], int]]:
    """Return the `length` tokens after each of `ends`, with weights; past the end of the text they repeat.

    Equal ones are merged: repetitive text has few different ones. In the order of `ends`.
    """
    different: dict[bytes, array[int]] = {}
    weights: dict[bytes, int] = {}
    known = len(text)
    for end in ends:
        part = text[end + 1 : end + 1 + length]
        if end + length >= known:
            part = (part * (length // len(part) + 1))[:length]
        key = part.tobytes()
        if key in weights:
            weights[key] += 1
        else:
            different[key], weights[key] = part, 1
    return list(zip(different.values(), weights.values(), strict=True))
