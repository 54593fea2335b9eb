"""Schedules how much of the text the draft model reads, only to be scored, while it is off."""

from __future__ import annotations

from typing import Final

from cpuchat.speculation.depth.budgets import Budget

_CHUNK: Final = 16
_FIRST_CHUNK: Final = 8
_LONGEST_INTERVAL: Final = 96
_HOPELESS_SHARE: Final = 0.004
"""Share of the time for reading along while acceptance is far too low."""


class ShadowReading:
    """Schedules the reading, within a budget of 0.8 % of the time.

    Args:
        plain_ms: one plain step; 0 when the costs are not known.
    """

    def __init__(self, plain_ms: float) -> None:
        self._budget = Budget(0.008, start=1.5 * plain_ms, most=4.0 * plain_ms)
        self._unread = 0
        self._scorable = 0
        self._interval = _CHUNK

    def begin_answer(self) -> None:
        self._unread = self._scorable = 0
        self._interval = min(self._interval, 2 * _CHUNK)

    def add_pass(self, tokens: int, ms: float) -> None:
        """Count the tokens of a pass, and the time that the budget grows by."""
        self._unread += tokens
        self._scorable += tokens
        self._budget.earn(ms)

    def add_draft(self) -> None:
        """Note that the draft model has drafted, so it has read everything."""
        self._unread = self._scorable = 0

    def add_read(self, ms: float, *, is_shadow: bool) -> None:
        """Note that it has read the text; a shadow reading is paid for."""
        if is_shadow:
            self._budget.pay(ms)
        self._unread = 0

    def take_scorable(self) -> int:
        """Return how many of the newest tokens may be scored: those of the prompt tell little about answers."""
        n, self._scorable = self._scorable, 0
        return n

    def tokens_due(self, lag: int, read_ms: float, *, is_known: bool) -> int:
        """Return how many of the newest tokens to read now; 0 = none.

        Args:
            lag: tokens of the text that the draft model has not read.
            is_known: its acceptance is known already.
        """
        if self._unread < (self._interval if is_known else _FIRST_CHUNK):
            return 0
        affordable = self._budget.left / max(read_ms, 1e-6)
        if lag <= affordable:
            return lag
        # Read from the middle of a text it has less context: the first of these tokens do not count.
        n = 2 * min(self._unread, _CHUNK if is_known else _FIRST_CHUNK)
        if n > affordable:
            return 0
        n = min(n, lag)
        self._scorable = min(self._scorable, n // 2)
        return n

    def set_interval(self, read_ms: float, plain_ms: float, *, is_doubtful: bool) -> None:
        """Read more rarely where drafting is hopeless, the more so the dearer reading is."""
        rare = _CHUNK * read_ms / (_HOPELESS_SHARE * plain_ms)
        longest = max(_CHUNK, min(_LONGEST_INTERVAL, self._interval * 2, round(rare)))
        self._interval = _CHUNK if is_doubtful else longest
