"""Suffix decoding: continue the copy that is being made, or draft what most often followed the end of the text."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import Final

from cpuchat.base.text import common_prefix
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, Proposal, confidence_bucket

SIZES: Final = (8, 4, 2)
"""Lengths of the indexed n-grams, longest first."""
NOWHERE: Final = -1
MAX_CANDIDATES: Final = 8
"""Most recent occurrences that count: this bounds the time of a proposal."""
_WINDOW: Final = 12  # tokens of the source, from where a copy broke off, among which it may resume
_REACH: Final = 16  # tokens in a row that are not in the source after which a copy has ended
_CHANGE: Final = 4  # longest replacement, and longest replaced part of the source, that is remembered


class NgramIndex:
    """Index over a text: where its n-grams occurred before, and from where its end is being copied.

    For every size a dictionary maps the hash of an n-gram to the position of its last token where it occurred last, and
    an array maps every position to the occurrence before. (Two different n-grams of the same 64-bit hash would give a
    wrong draft, which verification rejects.) Appending or removing a token takes constant time.

    A copy begins with an n-gram of the longest size that occurred before. From there on its source is followed, across
    changes too: a token that is not the next one in the source replaces that, or stands somewhat later in the source.

    `previous`: for each of `SIZES`, where the n-gram that ends at a position ended before; `NOWHERE` the first time.
    `source`: where each token was copied from, or would have been; else `NOWHERE`. `run`: how many tokens up to each
    one are the same as in the source; 0 or less: minus those since the last one. `changed`: what was replaced in
    copies: its first token, the others, and the replacement."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.text = array("i")
        self.previous = tuple(array("i") for _ in SIZES)
        self.source, self.run = array("i"), array("i")
        self.changed: dict[int, tuple[array[int], array[int]]] = {}
        self._changes: list[tuple[int, int, tuple[array[int], array[int]] | None]] = []  # where, token, value before
        self._last: tuple[dict[int, int], ...] = tuple({} for _ in SIZES)
        self._tables = tuple(zip(SIZES, self._last, self.previous, strict=True))

    def __len__(self) -> int:
        return len(self.text)

    def set_text(self, text: Sequence[int]) -> None:
        """Replace the text; the prefix that it shares with the one before stays indexed. Takes 3 µs a new token."""
        new = array("i", text)
        shared = common_prefix(self.text, new)
        if 2 * shared < len(self.text):  # indexing it again is faster than removing the rest
            self._clear()
            shared = 0
        for end in range(len(self.text) - 1, shared - 1, -1):
            for size, last, previous in self._tables:
                key, before = _key(self.text, end, size), previous.pop()
                if before == NOWHERE:
                    del last[key]
                else:
                    last[key] = before
        for values in (self.text, self.source, self.run):
            del values[shared:]
        while self._changes and self._changes[-1][0] >= shared:
            _, token, change = self._changes.pop()
            self.changed.pop(token, None)
            if change is not None:
                self.changed[token] = change
        self.extend(new[shared:])

    def extend(self, tokens: Sequence[int]) -> None:
        text, first = self.text, len(self.text)
        text.extend(tokens)
        for end in range(first, len(text)):
            for size, last, previous in self._tables:
                key = _key(text, end, size)
                previous.append(last.get(key, NOWHERE))
                last[key] = end
            self._follow(end)

    def _follow(self, end: int) -> None:
        """Append to `source` and `run` the values of the token at `end`."""
        known = self.previous[0][end]
        at, run = (self.source[-1], self.run[-1]) if end else (NOWHERE, 0)
        if at < 0:
            at, run = (known, SIZES[0]) if known >= 0 else (NOWHERE, 0)
        elif self.text[at + 1] == self.text[end]:
            at, run = at + 1, max(0, run) + 1
            if self.text[at] in self.changed:
                self._set_change(end, self.text[at], None)
            if run == 2:
                self._note_change(end - 1, at - 1)
        else:
            at, run = self._resume(end, known, at + 1, min(0, run))
        self.source.append(at)
        self.run.append(run)

    def _resume(self, end: int, known: int, at: int, run: int) -> tuple[int, int]:
        """Return source and run of a token that differs from that at `at`, where it would have been copied from."""
        first = at + run  # behind the last token that was the same
        if known >= 0:  # the first place from there on where the longest n-gram ends too; else `known`
            nearest, previous = known, self.previous[0]
            for _ in range(MAX_CANDIDATES):
                if known < first:
                    break
                nearest, known = known, previous[known]
            return nearest, SIZES[0]
        try:
            return self.text.index(self.text[end], first, min(first + _WINDOW, end)), 1
        except ValueError:
            return (at, run - 1) if run > -_REACH else (NOWHERE, 0)

    def _note_change(self, end: int, at: int) -> None:
        """Remember what was replaced before `end`, from where on the text is the same as the source from `at` on."""
        for start in range(end, max(0, end - 1 - _CHANGE), -1):
            if self.run[start - 1] >= SIZES[0]:
                source = self.source[start - 1] + 1
                if start < end and source < at <= source + _CHANGE:
                    change = self.text[source + 1 : at], self.text[start:end]
                    self._set_change(end + 1, self.text[source], change)
                return

    def _set_change(self, end: int, token: int, change: tuple[array[int], array[int]] | None) -> None:
        self._changes.append((end, token, self.changed.pop(token, None)))
        if change is not None:
            self.changed[token] = change


def _key(text: array[int], end: int, size: int) -> int:
    """Return the hash of the n-gram that ends at `end`, or of the shorter one at the text's beginning."""
    return hash(text[end + 1 - size if end >= size else 0 : end + 1].tobytes())


def following(text: array[int], end: int, n: int) -> array[int]:
    """Return the `n` tokens after `end`; past the end of the text they repeat: periodic text keeps its period."""
    part = text[end + 1 : end + 1 + n]
    return part if len(part) == n else (part * (n // len(part) + 1))[:n]


ENOUGH: Final = 6
"""A match with so many occurrences ends the search: shorter ones predict worse."""
MIN_PATH: Final = 0.05
"""A draft ends where its probability falls below this."""
LONG_RUN: Final = 32
"""Longer runs count as this."""
_CHANGED: Final = 0.6  # probability that what was replaced in a copy is replaced again
_REPLACED: Final = -1  # a run in the source of a copy: a token was just replaced
_SAME_AGAIN: Final = 2  # another: two tokens are the same again

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
    """Return the score and the buckets of a draft after a match of which `count` of `seen` occurrences continue with
    its tokens; 0: in a copy, after a run of `match`."""
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
    """Return the draft with the likeliest next token, from where the last tokens stood before, as long as all
    occurrences agree that continue with that token."""
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


SHADOW_TOKENS: Final = 8
"""Length of a draft that is made only to be scored."""
_KEPT_SCORES: Final = 256

Score = tuple[list[int], list[bool]]
"""The buckets of tokens that were drafted, and whether each was written: all but perhaps the last."""


class ScoredDrafter:
    """Notices when a drafter that is not worth a pass becomes worth it.

    While its proposal is not being verified it has a pending draft, its last one, until that is used up or refuted.
    Written tokens are compared with it as in a verify pass: up to the first different token. `index`: of the text that
    the drafter looks into. `worth`: returns how many tokens of a proposal to verify now, 0 = none."""

    def __init__(self, index: NgramIndex, drafter: SuffixDecoding, worth: Callable[[Proposal], int]) -> None:
        self._index = index
        self._drafter = drafter
        self._worth = worth
        self._pending: Proposal | None = None
        self._compared = 0  # tokens of it
        self._is_asked = False
        self._scores: list[Score] = []

    def propose(self, max_n: int) -> Proposal:
        """Return the proposal, cut to what is worth a pass. The caller verifies it, so it is not scored here."""
        proposal = self.offer(max_n)
        depth = min(self._worth(proposal), len(proposal)) if proposal.tokens else 0
        if depth > 0:
            self.start_verify()
        return proposal.cut(depth)

    def offer(self, max_n: int) -> Proposal:
        """Return the whole proposal. It is scored, unless `start_verify` says that the caller verifies some of it."""
        self._is_asked = True
        proposal = self._drafter.propose(max_n)
        if proposal.tokens and self._pending is None:
            self._pending, self._compared = proposal, 0
        return proposal

    def start_verify(self) -> None:
        self._pending = None

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
