"""The index of a growing text in which suffix decoding finds what was written before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from cpuchat.base.text import common_prefix

SIZES: Final = (8, 4, 2)
"""Lengths of the indexed n-grams, longest first."""
NOWHERE: Final = -1
MAX_CANDIDATES: Final = 8
"""Most recent occurrences that count: this bounds the time of a proposal."""
_WINDOW: Final = 12
"""Tokens of the source, from where a copy broke off, among which it may resume."""
_REACH: Final = 16
"""Tokens in a row that are not in the source after which a copy has ended."""
_CHANGE: Final = 4
"""Longest replacement, and longest replaced part of the source, that is remembered."""


class NgramIndex:
    """Index over a text: where its n-grams occurred before, and from where its end is being copied.

    For every size a dictionary maps the hash of an n-gram to the position of its last token where it occurred last, and
    an array maps every position to the occurrence before. (Two different n-grams of the same 64-bit hash would give a
    wrong draft, which verification rejects.) Appending or removing a token takes constant time.

    A copy begins with an n-gram of the longest size that occurred before. From there on its source is followed, across
    changes too: a token that is not the next one in the source replaces that, or stands somewhat later in the source.

    Attributes:
        previous: for each of `SIZES`, where the n-gram that ends at a position ended before; `NOWHERE` the first time.
        source: where each token was copied from, or would have been; `NOWHERE` where nothing is copied.
        run: how many tokens up to each one are the same as in the source; 0 or less: minus those since the last one.
        changed: what was replaced in copies: its first token, the others, and the replacement.
    """

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
