"""How long the rest of a prompt takes."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from cpuchat.protocol import PrefillProgress

_LEAST_SECONDS = 0.5  # of prefill, before its speed is known


def seconds_left(points: Sequence[tuple[float, int]], total: int) -> float | None:
    """Return the seconds until `total` tokens are evaluated; None before that can be told.

    The time of a token grows linearly with the tokens before it, which its attention reads: the slope comes from the
    two halves of what is done.

    Args:
        points: (seconds, tokens evaluated), ascending; the first is where the clock began.
    """
    if not points:
        return None
    (start, first), (now, done) = points[0], points[-1]
    if now - start < _LEAST_SECONDS or done <= first:
        return None
    mean = (now - start) / (done - first)
    middle, half = next(point for point in points if 2 * point[1] >= first + done)
    slope = 0.0  # seconds per token and token before it
    if first < half < done:
        growth = (now - middle) / (done - half) - (middle - start) / (half - first)
        slope = min(max(0.0, 2 * growth / (done - first)), 2 * mean / (done + first))
    return (total - done) * (mean + slope * (total - first) / 2)


class PrefillClock:
    """Estimates the time left of a prompt from its progress alone, from the second event on."""

    def __init__(self) -> None:
        self._points: list[tuple[float, int]] = []

    def seconds_left(self, event: PrefillProgress) -> float | None:
        """Return the estimate with an event that has come now; None before there is one."""
        if self._points and event.processed < self._points[-1][1]:  # another prompt
            self._points.clear()
        self._points.append((monotonic(), event.processed))
        return seconds_left(self._points, event.total)
