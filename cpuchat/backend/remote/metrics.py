"""Reads metrics in the text format of Prometheus."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'(?:^|,)position="(\d{1,3})"')
_MOST_POSITIONS = 64


@dataclass(frozen=True)
class Metrics:
    """Samples by name, those of several labels (such as the engines of one server) added up, and how many these were;
    `by_position` for those with a `position`."""

    values: Mapping[str, float] = field(default_factory=dict)
    by_position: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    series: Mapping[str, int] = field(default_factory=dict)

    def count(self, name: str) -> int | None:
        """Return a counter or gauge as a whole number; None when there is none."""
        value = self.values.get(name)
        return None if value is None else int(value)

    def mean(self, name: str) -> float | None:
        """Return a gauge that is a share, on average over its labels; None when there is none."""
        value = self.values.get(name)
        return None if value is None else value / self.series[name]

    def since(self, before: Metrics, name: str) -> float | None:
        """Return what a counter has grown by; None when it is not there, or was reset by a restart."""
        now, then = self.values.get(name), before.values.get(name)
        return None if now is None or then is None or now < then else now - then

    def positions_since(self, before: Metrics, name: str) -> tuple[int, ...]:
        """Return the same for each position."""
        now, then = self.by_position.get(name, ()), before.by_position.get(name, ())
        then = (*then, *(0.0,) * (len(now) - len(then)))
        return tuple(max(0, int(a - b)) for a, b in zip(now, then, strict=False))


def parse(text: str) -> Metrics:
    """Parse metrics. Skips what is malformed."""
    values: dict[str, float] = {}
    series: dict[str, int] = {}
    positions: dict[str, dict[int, float]] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if line.startswith("#") or found is None:
            continue
        name, labels = found[1], found[2] or ""
        try:
            value = float(found[3])
        except ValueError:
            continue
        if not math.isfinite(value) or not 0 <= value < 1e18:
            continue
        values[name] = values.get(name, 0.0) + value
        series[name] = series.get(name, 0) + 1
        at = _POSITION.search(labels)
        if at is not None and int(at[1]) < _MOST_POSITIONS:
            by_position = positions.setdefault(name, {})
            by_position[int(at[1])] = by_position.get(int(at[1]), 0.0) + value
    ordered = {
        name: tuple(found.get(n, 0.0) for n in range(max(found) + 1)) for name, found in positions.items()
    }  # fmt: skip
    return Metrics(values, ordered, series)
