"""Finds where two greedy answers diverge: the first token that differs."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from cpuchat.prefix import common_prefix
from cpuchat.protocol import TextDelta


class TokenText:
    """Everything that a model wrote, reasoning included, and the token that each character came from."""

    def __init__(self) -> None:
        self.text = ""
        self._ends: list[int] = []  # where the text of each token ends

    def add(self, delta: TextDelta) -> None:
        """Append a delta."""
        at = len(self.text)
        self.text += delta.text
        lengths = delta.lengths if len(delta.lengths) == delta.n_tokens else ()
        for number in range(delta.n_tokens):
            if lengths:
                at += lengths[number]
            else:  # nobody counted: spread evenly
                at = len(self.text) - len(delta.text) * (delta.n_tokens - 1 - number) // delta.n_tokens
            self._ends.append(at)
        if self._ends:
            self._ends[-1] = len(self.text)

    @property
    def n_tokens(self) -> int:
        return len(self._ends)

    def token_at(self, character: int) -> int:
        """Return the number of the token that wrote this character, from 1; one more than all at the end."""
        return bisect_right(self._ends, character) + 1


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of two texts: at `character` of both, which are written by token `a` and `b`, from 1."""

    character: int
    a: int
    b: int


def first_difference(a: TokenText, b: TokenText, *, complete: bool) -> Difference | None:
    """Return where the texts diverge; None if they are equal up to the end of the shorter one.

    `complete`: both models ended their answers by themselves, so that a shorter one is a difference too.
    """
    at = common_prefix(a.text, b.text)
    if at == min(len(a.text), len(b.text)) and (not complete or len(a.text) == len(b.text)):
        return None
    return Difference(at, a.token_at(at), b.token_at(at))
