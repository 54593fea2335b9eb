"""Suffix decoding: continue the copy that is being made, or draft what most often followed the end of the text."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache
from operator import itemgetter
from typing import Final

from cpuchat.base.text import common_prefix
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, Drafter, Proposal, confidence_bucket
from cpuchat.speculation.drafters.ngrams import MAX_CANDIDATES, SIZES, NgramIndex, following

ENOUGH: Final = 6
"""A match with so many occurrences ends the search: shorter ones predict worse."""
MIN_PATH: Final = 0.05
"""A draft ends where its probability falls below this."""
LONG_RUN: Final = 32
"""Longer runs count as this."""
END: Final = -1
"""Ends every remembered chat; no draft goes past it."""
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
    token 0.14 to 0.32, after the first one that is the same again 0.28 to 0.61.
    """
    return 1 - 0.3 / run if run > 1 else 0.42 if run == 1 else 0.3


def escape(match: int, seen: int) -> float:
    """Return the pseudo-count of "something else follows" after a match of `match` tokens seen `seen` times.

    Fitted to the same texts and to prose, where unanimous predictions are accepted at a rate of 0.3 to 0.7 after two
    tokens seen once, 0.5 to 0.8 after four, and 0.9 or more after any seen three times in a text that repeats itself.
    """
    return 4 / (match**1.5 * seen)


_ESCAPES: Final = {size: [escape(size, max(1, seen)) for seen in range(MAX_CANDIDATES + 1)] for size in SIZES}


@cache
def _plan(match: int, count: int, seen: int, limit: int) -> tuple[float, list[int], float]:
    """Return the score, the buckets and the first probability of a draft.

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
    return score, list(map(confidence_bucket, estimates)), estimates[0] if estimates else 0.0


class SuffixDecoding(Drafter):
    """Drafts along the source of a copy, or along the most frequent continuation of a suffix.

    After Oliaro et al., "SuffixDecoding", arXiv 2411.04975. The paper's suffix trees are implicit here: the index says
    where the last 8, 4 and 2 tokens occurred, and the tree below such a match is what follows at these places, read on
    demand. What is being copied is followed across changes as well, which the paper does not do, and what was replaced
    in the copy before is replaced in the draft. Of all these the draft with the highest score is taken: the sum of its
    path probabilities, which is the number of tokens expected to be accepted.

    An example, words in place of tokens. The chat has "def area ( self , w ) : return w * self . h ;", and the line
    is being written again:

    - "def area ( self , w ) : return": more than 8 words as before, so this is a copy. Draft: "w * self . h ;".
    - "… return x": the copy may have ended here, or "x" replaces "w". Draft, of low confidence: "* self . h ;".
    - "… return x *": it goes on. Draft: "self . h ;", sure again after its first word. With the second word as in the
      source, "w" is noted as replaced by "x".
    - "… ;": what followed the source is the line once more, in which "w" is replaced. Draft: "def area ( self , x )".

    Nothing is being copied after "to be or not to be , that is to be": the last two words occurred twice before, and
    the draft is what followed the last time, ", that is to be".

    Args:
        index: of this chat.
        other_chats: tokens of earlier chats kept at most, an end mark each included.
    """

    name = "suffix"

    def __init__(self, index: NgramIndex, *, other_chats: int = 1 << 16) -> None:
        self._chat = index
        # Two generations: when the newer is full, the older one is dropped as a whole.
        self._half = other_chats // 2
        self.forget()

    def remember(self, tokens: Sequence[int]) -> None:
        """Keep the text of another chat to draft from; the oldest texts are dropped when there are too many tokens.

        A prefix shared with a recent text (the same chat when it was shorter, the same system prompt) is not kept
        twice. Of a text longer than half of the limit, the end is kept.
        """
        if self._half < 2 or not tokens:
            return
        text = array("i", tokens)
        known = max((common_prefix(text, other) for other in self._newer_texts), default=0)
        # With enough before what is new to match.
        new = text[max(0, known - SIZES[0]) :] if known < len(text) else array("i")
        if len(self._newer) + len(new) + 1 > self._half:
            self._older, self._newer, self._newer_texts = self._newer, NgramIndex(), []
            new = text[-(self._half - 1) :]
        if new:
            self._newer.extend([*new, END])
            self._newer_texts.append(text)

    def forget(self) -> None:
        """Forget all other chats."""
        self._newer, self._older = NgramIndex(), NgramIndex()
        self._newer_texts: list[array[int]] = []

    def propose(self, max_n: int, min_probability: float = 0.0) -> Proposal:
        """Implement `Drafter.propose`. Buckets are of each token's probability given that those before are accepted."""
        chat, limit = self._chat, min(max_n, MAX_DEPTH)
        if limit < 1 or not chat.text:
            return Proposal("suffix")
        run = chat.run[-1]
        best = self._copy(run, limit, min_probability) if chat.source[-1] >= 0 and run >= _REPLACED else _NOTHING
        if run < SIZES[0]:
            latest = [one[-1] for one in chat.previous]
            if latest[-1] >= 0:
                best = max(best, _likeliest(chat, latest, limit, min_probability), key=itemgetter(0))
            for other in (self._newer, self._older) if self.use_remembered else ():
                if other.text:
                    best = max(
                        best, _likeliest(other, other.find(chat.text), limit, min_probability), key=itemgetter(0)
                    )
        return Proposal("suffix", list(best[1]), list(best[2]))

    def _copy(self, run: int, limit: int, min_probability: float) -> Draft:
        """Return the continuation of the copy that is being made."""
        chat = self._chat
        if run == 1 and (end := chat.previous[-1][-1]) >= 0:  # where the last two tokens stood before has a say
            run = _SAME_AGAIN if chat.text[end + 1] == chat.text[chat.source[-1] + 1] else _REPLACED
        score, buckets, probability = _plan(min(run, LONG_RUN), 0, 0, limit)
        if probability < min_probability:
            return _NOTHING
        tokens = following(chat.text, chat.source[-1], len(buckets))
        if min_probability <= _CHANGED and not chat.changed.keys().isdisjoint(tokens):
            return score, *self._with_changes(tokens, buckets)
        return score, tokens.tolist(), buckets

    def _with_changes(self, tokens: array[int], buckets: list[int]) -> tuple[list[int], list[int]]:
        """Return the draft with what was replaced in copies before replaced in it too."""
        changed, drafted, marks, at = self._chat.changed, array("i"), buckets.copy(), 0
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


def _likeliest(source: NgramIndex, latest: list[int], limit: int, min_probability: float) -> Draft:
    """Return the draft with the likeliest next token, from the matches in `source` whose latest ends are given by size.

    It goes on as long as all occurrences agree that continue with that token.
    """
    text, found, likeliest = source.text, 0, 0.0
    best: tuple[int, int, list[int]] = (0, 0, [])
    for size, previous, end in zip(SIZES, source.previous, latest, strict=True):
        ends: list[int] = []
        tokens: list[int] = []
        while end >= 0 and len(ends) < MAX_CANDIDATES:
            if (token := text[end + 1]) != END:
                ends.append(end)
                tokens.append(token)
            end = previous[end]
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
    if not ways:
        return _NOTHING
    way = ways[0]
    for other in ways:
        if other != way:
            way = way[: common_prefix(way, other[: len(way)])]
    if END in way:
        way = way[: way.index(END)]
    score, buckets, probability = _plan(size, len(ways), len(ends), len(way))
    if probability < min_probability:
        return _NOTHING
    return score, way[: len(buckets)].tolist(), buckets
