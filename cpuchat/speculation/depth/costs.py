"""Costs of passes in milliseconds, from the calibrated ones on as they are observed."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import Final

from cpuchat.costs.calibrations import PassCosts
from cpuchat.speculation.depth.constants import CONSTANTS
from cpuchat.speculation.stats import PassRecord

_MIN_MS: Final = 1e-6


class Following:
    """Times that follow what is observed: of passes over n tokens the `calibrated` ones, times one factor. `ms`: `ms[n
    - 1]` is the expected time of a pass over n tokens now; 0: not known, the first one is taken."""

    def __init__(self, calibrated: Sequence[float]) -> None:
        self.ms = list(calibrated)
        self._n = self._pauses = 0

    def observe(self, ms: float, n: int = 1) -> float:
        """Add a pass over n tokens. Returns its ms without a pause of the machine."""
        if ms <= 0 or not 1 <= n <= len(self.ms):
            return ms
        expected = self.ms[n - 1] or ms
        error = log(max(ms, _MIN_MS) / expected)
        self._n += 1
        self._pauses = self._pauses + 1 if error > CONSTANTS.pause else 0
        if self._pauses >= CONSTANTS.confirming_passes or error < -CONSTANTS.pause:  # conditions changed
            self._n = 0
        else:
            error = min(error, CONSTANTS.pause)
        factor = exp(error * max(CONSTANTS.follow_share, CONSTANTS.quick_follow_share / max(1, self._n)))
        self.ms = [max(_MIN_MS, (one or expected) * factor) for one in self.ms]
        return expected * exp(error)


class CurrentCosts:
    """The costs of one loaded pair of models, in ms: of passes over n tokens (`times`), of one drafted token (`draft`),
    of one token that the draft model reads in a batch, and of a rollback after a pass with a rejected token."""

    def __init__(self, costs: PassCosts) -> None:
        self.times = Following(costs.verify_ms)
        self.draft = Following([costs.draft_ms])
        self.read = Following([costs.read_ms or costs.draft_ms])
        self.rollback = Following([costs.rollback_ms])

    @property
    def plain_ms(self) -> float:
        return self.times.ms[0]

    def record_verify(self, record: PassRecord) -> float:
        """Learn from a pass for which a drafter was asked. Returns its ms without a pause of the machine."""
        n = record.drafted
        ms = self.times.observe(record.verify_ms, 1 + n)
        if record.drafter == "draft" and n:
            catch_up = self.catch_up_ms(record.unread)
            if catch_up < 0.2 * record.draft_ms:
                self.draft.observe((record.draft_ms - catch_up) / n)
        self.rollback.observe(record.rollback_ms if record.accepted < record.compared else 0.0)
        return ms + record.draft_ms + record.rollback_ms

    def catch_up_ms(self, unread: int) -> float:
        """Return the time to read so many tokens; up to two are read together with the first drafted one."""
        return max(0, unread - 2) * self.read.ms[0]
