"""What finding out may cost, and what a drafter has cost so far."""

from __future__ import annotations

from math import sqrt
from typing import Final

_PAUSE: Final = 3.0
_RESUME: Final = 1.5
_LEAK: Final = 1 / 64
_FADE: Final = 1 / 24


class Budget:
    """Milliseconds that may be spent: a share of the time that passes, never more than `most` saved up."""

    def __init__(self, share: float, *, start: float, most: float) -> None:
        self._share = share
        self._most = most
        self.left = start

    def earn(self, ms: float) -> None:
        self.left = min(self._most, self.left + self._share * ms)

    def pay(self, ms: float) -> None:
        self.left -= ms

    def spend(self, ms: float) -> bool:
        """Pays if it can."""
        if ms > self.left:
            return False
        self.left -= ms
        return True


class Doubt:
    """Whether passes with a draft gain clearly less than expected, and lose against plain decoding.

    A net under the estimates: should they be wrong for a reason that no model here knows, the drafter pauses for a
    while. Expected luck is allowed for, or the luck of the draw alone would fill the net sooner or later.
    """

    def __init__(self) -> None:
        self._gained = 0.0
        self._missing = 0.0
        self._variance = 0.0
        self._paused = False

    def add(self, gained: float, expected: float, deviation: float) -> None:
        """A pass gained so many ms over plain decoding; `expected`, give or take `deviation`."""
        keep = 1.0 - _LEAK
        self._gained = self._gained * keep + gained
        self._missing = self._missing * keep + expected - gained
        self._variance = self._variance * keep * keep + deviation * deviation

    def fade(self) -> None:
        """A plain step went by."""
        self._gained *= 1.0 - _FADE
        self._missing *= 1.0 - _FADE
        self._variance *= 1.0 - _FADE

    def pauses(self) -> bool:
        """Whether the drafter pauses."""
        limit = _RESUME if self._paused else _PAUSE
        self._paused = self._gained < 0 and self._missing > limit * sqrt(self._variance)
        return self._paused
