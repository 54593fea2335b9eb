"""The one small interface behind which every drafter stands."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from cpuchat.timings import DrafterName

MAX_DEPTH: Final = 31
"""Longest draft: a verify pass evaluates one token more."""

_GRADE_LIMITS: Final = (0.3, 0.5, 0.7, 0.85, 0.95, 0.99)
UNKNOWN: Final = 0
"""Grade of a token whose drafter tells no probability."""
N_GRADES: Final = len(_GRADE_LIMITS) + 2


def grade(probability: float) -> int:
    """Class of a drafter's own estimate, 1 (unsure) to `N_GRADES` - 1 (sure). What a class is worth is learnt."""
    return 1 + bisect_right(_GRADE_LIMITS, probability)


@dataclass(slots=True)
class Proposal:
    """Drafted tokens, in order, and the grade of each; empty when the drafter has nothing to say."""

    drafter: DrafterName
    tokens: list[int] = field(default_factory=list)
    grades: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, n: int) -> Proposal:
        """The first `n` tokens of it."""
        return self if n >= len(self.tokens) else Proposal(self.drafter, self.tokens[:n], self.grades[:n])


class Drafter(Protocol):
    """Proposes how a text goes on. It always knows the whole text, the token written last included."""

    @property
    def name(self) -> DrafterName: ...

    def begin(self, text: Sequence[int]) -> None:
        """`text` is what the next answer goes on from. What it shares with the text before is not read again."""
        ...

    def append(self, tokens: Sequence[int]) -> None:
        """These were written after it."""
        ...

    def propose(self, max_n: int, min_probability: float = 0.0) -> Proposal:
        """At most `max_n` tokens; the draft ends before one that is less likely than `min_probability`."""
        ...
