"""Limits the cost of exploration, and pauses drafters that lose."""

from __future__ import annotations

from math import sqrt
from typing import Final

_PAUSE: Final = 3.0
_RESUME: Final = 1.5
_LEAK: Final = 1 / 64
_FADE: Final = 1 / 24


class Budget:
    """Milliseconds that may be spent: a share of the time that passes, at most `most` saved up."""

    def __init__(self, share: float, *, start: float, most: float) -> None:
        self._share = share
        self._most = most
        self.left = start

    def earn(self, ms: float) -> None:
        self.left = min(self._most, self.left + self._share * ms)

    def pay(self, ms: float) -> None:
        self.left -= ms

    def try_pay(self, ms: float) -> bool:
        """Pay if enough is left; returns whether it was."""
        if ms > self.left:
            return False
        self.left -= ms
        return True


class RegressionGuard:
    """Pauses a drafter whose passes gain clearly less than expected and lose against plain decoding.

    A safety net under the estimates, should they be wrong for a reason that the model of costs does not cover. The
    expected variance is allowed for; otherwise chance alone would trip it sooner or later.
    """

    def __init__(self) -> None:
        self._gained = 0.0
        self._missing = 0.0
        self._variance = 0.0
        self._paused = False

    def add(self, gained: float, expected: float, deviation: float) -> None:
        """Add a pass that gained so many ms over plain decoding; `expected` was known up to `deviation`."""
        keep = 1.0 - _LEAK
        self._gained = self._gained * keep + gained
        self._missing = self._missing * keep + expected - gained
        self._variance = self._variance * keep * keep + deviation * deviation

    def fade(self) -> None:
        """Forget a little, once per plain step."""
        self._gained *= 1.0 - _FADE
        self._missing *= 1.0 - _FADE
        self._variance *= 1.0 - _FADE

    def is_paused(self) -> bool:
        """Return whether the drafter is paused now."""
        limit = _RESUME if self._paused else _PAUSE
        self._paused = self._gained < 0 and self._missing > limit * sqrt(self._variance)
        return self._paused
