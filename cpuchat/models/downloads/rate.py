"""Transfer rate, averaged over a few seconds so that the figure can be read."""

from __future__ import annotations

from collections import deque

WINDOW = 8.0
"""Seconds of the moving average."""


class Rate:
    """Computes bytes per second over the last seconds from readings of a counter."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def add(self, moment: float, count: int) -> None:
        """Add a reading: the counter stood at `count` at `moment` (seconds). A counter that falls starts over."""
        if self._readings and count < self._readings[-1][1]:
            self._readings.clear()
        self._readings.append((moment, count))
        while len(self._readings) > 2 and self._readings[1][0] <= moment - WINDOW:
            self._readings.popleft()

    def clear(self) -> None:
        self._readings.clear()

    @property
    def per_second(self) -> float:
        """Return bytes per second; 0.0 before the second reading."""
        if len(self._readings) < 2:
            return 0.0
        (first, before), (last, now) = self._readings[0], self._readings[-1]
        return (now - before) / (last - first) if last > first else 0.0
