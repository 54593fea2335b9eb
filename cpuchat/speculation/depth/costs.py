"""Costs of passes in milliseconds, from the calibrated ones on as they are observed."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Final

from cpuchat.costs.calibrations import PassCosts
from cpuchat.speculation.stats import PassRecord

# Variances of log(time), so that 0.1 ** 2 is "10 %".
_DRIFT: Final = 0.15**2
"""Calibration was done under other conditions: everything may be this much off together."""
_FOLLOW: Final = 0.02**2
"""Variance that the drift gains per pass."""
_NOISE: Final = 0.08**2
_PAUSE: Final = 0.25
"""A pass that seems this much slower may be a pause of the machine; nothing makes a pass faster by accident."""
_CONFIRMED: Final = 3
"""As many in a row are no pause."""
_SHORTEST: Final = 1e-6


class Drifting:
    """Times of passes over n tokens: calibrated(n), times one drift factor.

    Attributes:
        ms: `ms[n - 1]` is the expected time of a pass over n tokens now.
    """

    def __init__(self, calibrated: Sequence[float]) -> None:
        self.ms = list(calibrated)
        self._variance = _DRIFT
        self._pauses = 0

    def observe(self, n: int, ms: float) -> float:
        """Add a pass over n tokens. Returns its ms without a pause of the machine."""
        if ms <= 0 or not 1 <= n <= len(self.ms):
            return ms
        drift = min(_DRIFT, self._variance + _FOLLOW)
        expected = self.ms[n - 1]
        error = log(max(ms, _SHORTEST) / expected)
        self._pauses = self._pauses + 1 if error > _PAUSE else 0
        if self._pauses >= _CONFIRMED:  # conditions changed
            drift = 4 * _DRIFT
        else:
            error = min(error, _PAUSE)
        share = drift / (drift + _NOISE)
        self._variance = min(_DRIFT, drift * (1 - share))
        change = exp(error * share)
        self.ms = [max(_SHORTEST, one * change) for one in self.ms]
        return expected * exp(error)


class Following:
    """One time per token in ms: the first one taken, then an average in which a pause hardly counts."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def observe(self, ms: float) -> None:
        if ms > 0:
            self.ms = (
                self.ms * exp(0.15 * min(_PAUSE, log(max(ms, _SHORTEST) / self.ms)))
                if self.ms > 0
                else max(ms, _SHORTEST)
            )


class CurrentCosts:
    """The costs of one loaded pair of models, in ms.

    Attributes:
        times: passes over n tokens, sequential; `overlap_times` while the draft model computes, None if it cannot.
        draft: one drafted token, sequential; `overlap_draft` while the target computes.
        read: one token of text that the draft model reads in a batch.
        rollback: after a pass in which a token was rejected.
    """

    def __init__(self, costs: PassCosts, *, has_draft: bool) -> None:
        overlap = costs.overlap if has_draft else None
        self.times = Drifting(costs.verify_ms)
        self.overlap_times = Drifting(overlap.verify_ms) if overlap else None
        self.draft = Following(costs.draft_ms)
        self.overlap_draft = Following(overlap.draft_ms if overlap else 0.0)
        self.read = Following(costs.read_ms or costs.draft_ms)
        self.rollback = Following(costs.rollback_ms)
        self._offered = 1.0

    @property
    def plain_ms(self) -> float:
        """Return the ms of a plain pass."""
        return self.times.ms[0]

    @property
    def offered(self) -> float:
        """Return the share of allowed tokens that the draft model drafts (it stops where it is unsure)."""
        return 1.0 if self._offered > 0.995 else self._offered

    def record_verify(self, record: PassRecord, planned: int) -> float:
        """Learn from a pass for which a drafter was asked; `planned` tokens, if it was the draft model.

        Returns its ms, drafting and rollback included, the pass without a pause of the machine.
        """
        n, ms = record.drafted, record.verify_ms
        if record.overlap and self.overlap_times is not None:
            ms = self.overlap_times.observe(1 + n, ms)
            # A plain step takes no longer than a pass beside the draft model: the machine is as much faster now.
            if (faster := self.overlap_times.ms[n] / self.plain_ms) < 1.0:
                self.times.ms = [max(_SHORTEST, faster * one) for one in self.times.ms]
        else:
            ms = self.times.observe(1 + n, ms)
        if record.drafter == "draft":
            is_short = n < planned
            self._offered += 0.03 * max(1, n) * ((n / (n + 1) if is_short else 1.0) - self._offered)
            catch_up = self.catch_up_ms(record.unread)
            if n + is_short and catch_up < 0.2 * record.draft_ms:
                drafting = self.overlap_draft if record.overlap else self.draft
                drafting.observe((record.draft_ms - catch_up) / (n + is_short))
        self.rollback.observe(record.rollback_ms if record.accepted < record.compared else 0.0)
        return ms + record.draft_ms + record.rollback_ms

    def catch_up_ms(self, unread: int) -> float:
        """Return the time to read so many tokens; up to two are read together with the first drafted one."""
        return max(0, unread - 2) * self.read.ms
