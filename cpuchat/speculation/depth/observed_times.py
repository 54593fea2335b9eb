"""Calibrated times, corrected by what is observed while answers are written."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from typing import Final

from cpuchat.speculation.depth.costs import MAX_TOKENS

# Variances of log(time), so that 0.1 ** 2 is "10 %".
_COMMON: Final = 0.15**2
"""Calibration was done under other conditions: everything may be this much off together."""
_OWN: Final = 0.07**2
"""...and one number of tokens against the others by this much."""
_COMMON_DRIFT: Final = 0.015**2
_OWN_DRIFT: Final = 0.003**2
_RELAX: Final = 1 - 1 / 400
"""Factor per pass by which an unobserved correction decays towards the calibration."""
_NOISE: Final = 0.08**2
_SURPRISE: Final = 0.3
"""Relative error from which an observation is a surprise: a pause of the machine, or a real change, which repeats."""
_SLIGHT: Final = 0.1
"""Weight of a single surprise."""

_STALE: Final = (500, 2500)
"""Between as many passes, a time that was not observed turns from a measurement into a guess..."""
_STALE_OVERESTIMATE: Final = 1.5
"""...that may be too high by this share: as what passes the check of a calibration made beside other load (1.25 n
plain steps for n tokens, where a quiet machine takes half of that)."""
_STALE_DEVIATION: Final = 0.5

_SHORTEST: Final = 1e-6
_NEAR: Final = tuple(
    tuple(exp(-5 * abs(log(m / n))) for m in range(1, MAX_TOKENS + 1)) for n in range(1, MAX_TOKENS + 1)
)
"""What an error at n says about m: much when both are large and close (24 and 25), little between 1 and 2."""


class ObservedTimes:
    """Times of passes over n tokens: log T(n) = log calibrated(n) + common + own(n).

    A filter with one variance for the common part (load, clock, context length: follows fast) and one for each n
    (errors of the calibration: slow, shared by neighbors, and uncertain again when not observed for long).

    Attributes:
        ms: `ms[n - 1]` is the expected time of a pass over n tokens now.
    """

    def __init__(self, ms: Sequence[float]) -> None:
        self._calibrated = list(ms)
        self._common = 0.0
        self._common_variance = _COMMON
        self._own = [0.0] * len(ms)
        self._own_variance = [_OWN] * len(ms)
        self._seen_at = [0] * len(ms)
        self._surprises = [0] * len(ms)
        self._count = 0
        self.ms = list(ms)

    def uncertainty(self, n: int) -> float:
        """Return how far off `ms[n - 1]` may be against the other times: one standard deviation, as a share."""
        return sqrt(self._own_variance[n - 1])

    def overestimate(self, n: int) -> float:
        """Return by what share `ms[n - 1]` may be too high; more the longer it was not observed."""
        return self.uncertainty(n) + _STALE_OVERESTIMATE * self._staleness(n)

    def _staleness(self, n: int) -> float:
        first, last = _STALE
        return min(1.0, max(0.0, (self.passes_since(n) - first) / (last - first)))

    def needs_confirmation(self, n: int) -> bool:
        """Return whether the last observation of n was a surprise that one more would settle."""
        return self._surprises[n - 1] != 0

    def passes_since(self, n: int) -> int:
        """Return how many passes were observed since one over n tokens was."""
        return self._count - self._seen_at[n - 1]

    def observe(self, n: int, ms: float) -> None:
        """Add a pass over n tokens that took `ms`. A single pause hardly counts."""
        if ms <= 0 or not 1 <= n <= len(self.ms):
            return
        i, ms = n - 1, max(ms, _SHORTEST)
        self._count += 1
        stale = self._staleness(n)
        self._seen_at[i] = self._count
        own = self._own_variance[i] + (_STALE_DEVIATION * stale) ** 2
        common = min(_COMMON, self._common_variance + _COMMON_DRIFT)
        error = log(ms / self.ms[i])
        expected = abs(error) <= max(_SURPRISE, _STALE_OVERESTIMATE * stale if error < 0 else 0.0)
        self._surprises[i] = 0 if expected else _surprises(self._surprises[i], error)
        if _is_confirmed(self._surprises[i]):  # conditions changed, for this n at least
            own, common = max(own, _COMMON), 4 * _COMMON
        elif not expected:
            error = _SLIGHT if error > 0 else -_SLIGHT
        total = common + own + _NOISE
        self._common += error * common / total
        self._common_variance = min(_COMMON, common * (1 - common / total))
        factor = exp(self._common)
        for m, near in enumerate(_NEAR[i]):
            if near > 0.02:
                self._own[m] += error * own / total * near
                self._own_variance[m] *= 1 - own / total * near * near
            self._own[m] *= _RELAX
            self._own_variance[m] = min(_OWN, self._own_variance[m] + _OWN_DRIFT)
            self.ms[m] = self._calibrated[m] * factor * exp(self._own[m])

    def plain_at_most(self, ms: float) -> None:
        """Cap a plain step at `ms`, the time of a pass beside the draft model.

        The machine is as much faster than when the last plain step was observed: another program has ended.
        """
        if ms < self.ms[0]:
            share = ms / self.ms[0]
            self._common += log(share)
            self.ms = [share * one for one in self.ms]


def _surprises(before: int, error: float) -> int:
    """Return the surprises in a row, negative for faster ones."""
    side = 1 if error > 0 else -1
    return before + side if before * side > 0 else side


def _is_confirmed(surprises: int) -> bool:
    """Return whether it is a real change: nothing makes a pass faster by accident, but two pauses in a row happen."""
    return surprises <= -2 or surprises >= 3


class ObservedTime:
    """One cost per token in ms; a single pause hardly counts. 0 = not known yet: the first observation is taken."""

    def __init__(self, ms: float) -> None:
        self._calibrated = log(ms) if ms > 0 else None
        self._log = self._calibrated
        self._surprises = 0
        self._count = 0

    @property
    def ms(self) -> float:
        return 0.0 if self._log is None else exp(self._log)

    def observe(self, ms: float) -> None:
        if ms <= 0:
            return
        ms = max(ms, _SHORTEST)
        if self._log is None:
            self._log = log(ms)
            return
        self._count += 1
        error = log(ms) - self._log
        gain = max(0.1, 0.7 / self._count)
        expected = abs(error) <= _SURPRISE
        self._surprises = 0 if expected else _surprises(self._surprises, error)
        if _is_confirmed(self._surprises):
            gain = 0.6
        elif not expected:
            error = _SLIGHT if error > 0 else -_SLIGHT
        self._log += gain * error

    def relax(self, share: float) -> None:
        """Move towards the calibrated time, because the cost was not observed for a while."""
        if self._log is not None and self._calibrated is not None:
            self._log += share * (self._calibrated - self._log)
