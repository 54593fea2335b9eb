"""Suffix decoding: continue the copy that is being made, or draft what most often followed the end of the text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from typing import Final

from cpuchat.base.text import common_prefix
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, Proposal, confidence_bucket
from cpuchat.speculation.drafters.ngrams import MAX_CANDIDATES, SIZES, NgramIndex, following

ENOUGH: Final = 6
"""A match with so many occurrences ends the search: shorter ones predict worse."""
MIN_PATH: Final = 0.05
"""A draft ends where its probability falls below this."""
LONG_RUN: Final = 32
"""Longer runs count as this."""
_CHANGED: Final = 0.6
"""Probability that what was replaced in a copy is replaced again."""
_REPLACED: Final = -1
_SAME_AGAIN: Final = 2
"""Runs in the source of a copy: a token was just replaced; two tokens are the same again."""

Draft = tuple[float, Sequence[int], Sequence[int]]
"""Score, tokens and their buckets."""
_NOTHING: Final[Draft] = (0.0, (), ())


def copied(run: int) -> float:
    """Return the probability that a copy continues as its source after `run` tokens that are the same.

    Fitted to edited files, quotations and JSON: 0.85 to 0.9 from two tokens on, 0.95 to 1 after 32; after a replaced
    token 0.14 to 0.32, after the first one that is the same again 0.28 to 0.61."""
    return 1 - 0.3 / run if run > 1 else 0.42 if run == 1 else 0.3


def escape(match: int, seen: int) -> float:
    """Return the pseudo-count of "something else follows" after a match of `match` tokens seen `seen` times.

    Fitted to the same texts and to prose, where unanimous predictions are accepted at a rate of 0.3 to 0.7 after two
    tokens seen once, 0.5 to 0.8 after four, and 0.9 or more after any seen three times in a text that repeats itself.
    """
    return 4 / (match**1.5 * seen)


_ESCAPES: Final = {size: [escape(size, max(1, seen)) for seen in range(MAX_CANDIDATES + 1)] for size in SIZES}


@cache
def _plan(match: int, count: int, seen: int, limit: int) -> tuple[float, list[int]]:
    """Return the score and the buckets of a draft.

    After a match of which `count` of `seen` occurrences continue with its tokens; 0: in a copy, after a run of `match`.
    """
    estimates = [
        count / ((count if i else seen) + escape(match + i, count))
        if count
        else copied(max(0, match) + i if i else match)
        for i in range(limit)
    ]
    path, score = 1.0, 0.0
    for n, probability in enumerate(estimates):
        path *= probability
        if path < MIN_PATH:
            del estimates[n:]
            break
        score += path
    return score, list(map(confidence_bucket, estimates))


class SuffixDecoding:
    """Drafts along the source of a copy, or along the most frequent continuation of a suffix.

    After Oliaro et al., "SuffixDecoding", arXiv 2411.04975. The paper's suffix trees are implicit here: the index says
    where the last 8, 4 and 2 tokens occurred, and the tree below such a match is what follows at these places, read on
    demand. What is being copied is followed across changes as well, which the paper does not do, and what was replaced
    in the copy before is replaced in the draft. Of all these the draft with the highest score is taken: the sum of its
    path probabilities, which is the number of tokens expected to be accepted.

    An example, words in place of tokens. The chat has "def area ( self , w ) : return w * self . h ;", and the line is
    being written again:

    - "def area ( self , w ) : return": more than 8 words as before, so this is a copy. Draft: "w * self . h ;".
    - "… return x": the copy may have ended here, or "x" replaces "w". Draft, of low confidence: "* self . h ;".
    - "… return x *": it goes on. Draft: "self . h ;", sure again after its first word. With the second word as in the
      source, "w" is noted as replaced by "x".
    - "… ;": what followed the source is the line once more, in which "w" is replaced. Draft: "def area ( self , x )".

    Nothing is being copied after "to be or not to be , that is to be": the last two words occurred twice before, and
    the draft is what followed the last time, ", that is to be"."""

    def __init__(self, index: NgramIndex) -> None:
        self._index = index

    def propose(self, max_n: int) -> Proposal:
        """Draft at most `max_n` tokens; buckets are of probabilities given that the tokens before are accepted."""
        chat, limit = self._index, min(max_n, MAX_DEPTH)
        if limit < 1 or not chat.text:
            return Proposal("suffix")
        run = chat.run[-1]
        best = self._copy(run, limit) if chat.source[-1] >= 0 and run >= _REPLACED else _NOTHING
        if run < SIZES[0] and chat.previous[-1][-1] >= 0:
            best = max(best, _likeliest(chat, limit), key=itemgetter(0))
        return Proposal("suffix", list(best[1]), list(best[2]))

    def _copy(self, run: int, limit: int) -> Draft:
        """Return the continuation of the copy that is being made."""
        chat = self._index
        if run == 1 and (end := chat.previous[-1][-1]) >= 0:  # where the last two tokens stood before has a say
            run = _SAME_AGAIN if chat.text[end + 1] == chat.text[chat.source[-1] + 1] else _REPLACED
        score, buckets = _plan(min(run, LONG_RUN), 0, 0, limit)
        tokens = following(chat.text, chat.source[-1], len(buckets))
        if not chat.changed.keys().isdisjoint(tokens):
            return score, *self._with_changes(tokens, buckets)
        return score, tokens.tolist(), buckets

    def _with_changes(self, tokens: array[int], buckets: list[int]) -> tuple[list[int], list[int]]:
        """Return the draft with what was replaced in copies before replaced in it too."""
        changed, drafted, marks, at = self._index.changed, array("i"), buckets.copy(), 0
        while at < len(tokens) and len(drafted) < len(tokens):
            others, new = changed.get(tokens[at], (tokens[:0], tokens[at : at + 1]))
            if tokens[at + 1 : at + 1 + len(others)] != others:
                others, new = tokens[:0], tokens[at : at + 1]
            elif tokens[at] in changed:
                marks[len(drafted)] = confidence_bucket(_CHANGED)
            drafted += new
            at += 1 + len(others)
        drafted = drafted[: len(tokens)].tolist()
        return drafted, marks[: len(drafted)]


def _likeliest(index: NgramIndex, limit: int) -> Draft:
    """Return the draft with the likeliest next token, from where the last tokens stood before.

    It goes on as long as all occurrences agree that continue with that token."""
    text, found, likeliest = index.text, 0, 0.0
    best: tuple[int, int, list[int]] = (0, 0, [])
    for size, previous in zip(SIZES, index.previous, strict=True):
        ends: list[int] = []
        end = previous[-1]
        while end >= 0 and len(ends) < MAX_CANDIDATES:
            ends.append(end)
            end = previous[end]
        tokens = [text[end + 1] for end in ends]
        if len(ends) <= found:  # those of the longer match
            continue
        found = len(ends)
        # On a tie the one seen last: it comes first.
        token = max(tokens, key=tokens.count) if found > 1 else tokens[0]
        probability = tokens.count(token) / (found + _ESCAPES[size][found])
        if probability > likeliest:
            likeliest, best = probability, (size, token, ends)
        if found >= ENOUGH:
            break
    size, token, ends = best
    ways = [following(text, end, limit) for end in ends if text[end + 1] == token]
    way = ways[0]
    for other in ways:
        if other != way:
            way = way[: common_prefix(way, other[: len(way)])]
    score, buckets = _plan(size, len(ways), len(ends), len(way))
    return score, way[: len(buckets)].tolist(), buckets
