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
"""A correction that is not seen any more gives way to the calibration."""
_NOISE: Final = 0.08**2
_SURPRISE: Final = 0.3
"""A pause of the machine looks like this; so does a real change, which comes again."""
_SLIGHT: Final = 0.1
"""What a single surprise counts for."""

_STALE: Final = (500, 2500)
"""Between as many passes, a time that was not seen turns from a measurement into a guess..."""
_STALE_HOPE: Final = 1.5
"""...that may be too high by this share: as what passes the check of a calibration made beside other load (1.25 n
plain steps for n tokens, where a quiet machine takes half of that)."""
_STALE_DOUBT: Final = 0.5

_SHORTEST: Final = 1e-6
_NEAR: Final = tuple(
    tuple(exp(-5 * abs(log(m / n))) for m in range(1, MAX_TOKENS + 1)) for n in range(1, MAX_TOKENS + 1)
)
"""What an error at n says about m: much when both are large and close (24 and 25), little between 1 and 2."""


class ObservedTimes:
    """Times of passes over n tokens: log T(n) = log calibrated(n) + common + own(n).

    A filter with one variance for the common part (load, clock, context length: follows fast) and one for each n
    (errors of the calibration: slow, shared by neighbours, and doubtful again when not seen for long).
    """

    def __init__(self, ms: Sequence[float]) -> None:
        self._calibrated = list(ms)
        self._common = 0.0
        self._common_doubt = _COMMON
        self._own = [0.0] * len(ms)
        self._own_doubt = [_OWN] * len(ms)
        self._seen_at = [0] * len(ms)
        self._surprised = [0] * len(ms)
        self._count = 0
        self.ms = list(ms)
        """ms[n - 1]: what a pass over n tokens is expected to take now."""

    def doubt(self, n: int) -> float:
        """How far off `ms[n - 1]` may be against the other times: one standard deviation, as a share."""
        return sqrt(self._own_doubt[n - 1])

    def hope(self, n: int) -> float:
        """How much too high `ms[n - 1]` may be, as a share of what it should be; more the longer it was not seen."""
        return self.doubt(n) + _STALE_HOPE * self._stale(n)

    def _stale(self, n: int) -> float:
        """0 (seen lately) to 1."""
        first, last = _STALE
        return min(1.0, max(0.0, (self.since(n) - first) / (last - first)))

    def unsettled(self, n: int) -> bool:
        """The last observation of n was a surprise that one more would settle."""
        return self._surprised[n - 1] != 0

    def since(self, n: int) -> int:
        """Passes observed since one over n tokens was."""
        return self._count - self._seen_at[n - 1]

    def observe(self, n: int, ms: float) -> None:
        """A pass over n tokens took `ms`. A single pause hardly counts."""
        if ms <= 0 or not 1 <= n <= len(self.ms):
            return
        i, ms = n - 1, max(ms, _SHORTEST)
        self._count += 1
        stale = self._stale(n)
        self._seen_at[i] = self._count
        own, common = self._own_doubt[i] + (_STALE_DOUBT * stale) ** 2, min(_COMMON, self._common_doubt + _COMMON_DRIFT)
        error = log(ms / self.ms[i])
        if abs(error) <= max(_SURPRISE, _STALE_HOPE * stale if error < 0 else 0.0):
            self._surprised[i] = 0
        elif self._again(i, error):
            # Conditions changed, for this n at least.
            own, common = max(own, _COMMON), 4 * _COMMON
        else:
            error = _SLIGHT if error > 0 else -_SLIGHT
        whole = common + own + _NOISE
        self._common += error * common / whole
        self._common_doubt = min(_COMMON, common * (1 - common / whole))
        factor = exp(self._common)
        gain, settled = error * own / whole, own / whole
        for m, near in enumerate(_NEAR[i]):
            if near > 0.02:
                self._own[m] += gain * near
                self._own_doubt[m] *= 1 - settled * near * near
            self._own[m] *= _RELAX
            self._own_doubt[m] = min(_OWN, self._own_doubt[m] + _OWN_DRIFT)
            self.ms[m] = self._calibrated[m] * factor * exp(self._own[m])

    def plain_at_most(self, ms: float) -> None:
        """A plain step takes no longer than a pass beside the draft model, which takes `ms` now: the machine is as
        much faster than when the last plain step was seen (another program has ended)."""
        if ms < self.ms[0]:
            share = ms / self.ms[0]
            self._common += log(share)
            self.ms = [share * one for one in self.ms]

    def _again(self, i: int, error: float) -> bool:
        self._surprised[i] = _surprises(self._surprised[i], error)
        return _confirmed(self._surprised[i])


def _surprises(before: int, error: float) -> int:
    """Surprises in a row, negative for faster ones."""
    side = 1 if error > 0 else -1
    return before + side if before * side > 0 else side


def _confirmed(surprises: int) -> bool:
    """Nothing makes a pass faster by accident, but two pauses in a row happen."""
    return surprises <= -2 or surprises >= 3


class ObservedTime:
    """One cost per token; a single pause hardly counts. 0 = not known yet, then the first observation is taken."""

    def __init__(self, ms: float) -> None:
        self._calibrated = log(ms) if ms > 0 else None
        self._log = self._calibrated
        self._surprised = 0
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
        if abs(error) <= _SURPRISE:
            self._surprised = 0
        else:
            self._surprised = _surprises(self._surprised, error)
            if _confirmed(self._surprised):
                gain = 0.6
            else:
                error = _SLIGHT if error > 0 else -_SLIGHT
        self._log += gain * error

    def relax(self, share: float) -> None:
        """Not seen for a while: what was observed slowly gives way to what was calibrated."""
        if self._log is not None and self._calibrated is not None:
            self._log += share * (self._calibrated - self._log)
