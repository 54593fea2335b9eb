"""A figure is a value or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Metric(Generic[_T]):
    """A figure: its `value`, or `why` it is missing, in a few words that can be shown behind "n/a".

    Code that computes a figure gives the reason where the value fails: `Metric.of(rate, "needs two tokens")`. Raises
    ValueError: without a value there is no reason, or there are both."""

    value: _T | None
    why: str = ""

    def __post_init__(self) -> None:
        if (self.value is None) != bool(self.why):
            raise ValueError(f"a figure has a value or a reason: {self}")

    @classmethod
    def of(cls, value: _T | None, why: str) -> Metric[_T]:
        """Return the figure of `value`; of None, the reason `why`."""
        return cls(value, "" if value is not None else why)


def missing(why: str) -> Metric[Any]:
    """Return a figure without a value."""
    return Metric(None, why)


NO_MODEL = "no model loaded"
NO_ANSWER = "no answer yet"
"""Reasons that hold for most figures at the same time."""
