"""Current costs of passes: calibrated, and corrected by every pass."""

from __future__ import annotations

from typing import Final

from cpuchat.speculation.depth.costs import PassCosts
from cpuchat.speculation.depth.observed_times import ObservedTime, ObservedTimes
from cpuchat.speculation.depth.steady import Prices, limit_gain
from cpuchat.speculation.pass_record import PassRecord

WORTHWHILE_GAIN: Final = 1.03
"""Smallest speed-up that is worth drafting, even if every drafted token were accepted."""


class CurrentCosts:
    """The costs of one loaded pair of models, in ms.

    Attributes:
        times: passes over n tokens, sequential; `overlap_times` while the draft model computes, None if it cannot.
        draft: one drafted token, sequential; `overlap_draft` while the target computes.
        read: one token of text that the draft model reads in a batch.
        rollback_ms: extra after a pass in which a token was rejected.
        offered: share of allowed tokens that the draft model drafts (it stops where it is unsure).
    """

    def __init__(self, costs: PassCosts, *, has_draft: bool) -> None:
        overlap = costs.overlap if has_draft else None
        self.times = ObservedTimes(costs.verify_ms)
        self.overlap_times = ObservedTimes(overlap.verify_ms) if overlap else None
        self.draft = ObservedTime(costs.draft_ms)
        self.overlap_draft = ObservedTime(overlap.draft_ms if overlap else 0.0)
        self.read = ObservedTime(costs.read_ms or costs.draft_ms)
        self.rollback_ms = costs.rollback_ms
        self.offered = 1.0
        self._after_rejection = False

    @property
    def plain_ms(self) -> float:
        """Return the ms of a plain pass."""
        return self.times.ms[0]

    def record_plain(self, ms: float, *, is_representative: bool) -> None:
        """Learn from a plain step."""
        if is_representative:
            self.times.observe(1, ms)
        self.draft.relax(1 / 200)

    def record_verify(self, record: PassRecord, planned: int) -> None:
        """Learn from a pass for which a drafter was asked; `planned` tokens, if it was the draft model."""
        n, ms = record.drafted, record.verify_ms
        if record.overlap and self.overlap_times is not None:
            self.overlap_times.observe(1 + n, ms)
            self.times.plain_at_most(self.overlap_times.ms[n])
        else:
            self.times.observe(1 + n, ms)
        if record.drafter != "draft":
            return
        is_short = n < planned
        self.offered += 0.03 * max(1, n) * ((n / (n + 1) if is_short else 1.0) - self.offered)
        if record.overlap and self._after_rejection and n:
            self.overlap_draft.observe(record.draft_ms / n)
        self._after_rejection = record.accepted < n
        catch_up = self.catch_up_ms(record.unread)
        if not record.overlap and n + is_short and catch_up < 0.2 * record.draft_ms:
            self.draft.observe((record.draft_ms - catch_up) / (n + is_short))

    def catch_up_ms(self, unread: int) -> float:
        """Return the time to read so many tokens; up to two are read together with the first drafted one."""
        return max(0, unread - 2) * self.read.ms

    def draft_pass_ms(self, depth: int) -> float:
        """Return the time to draft and verify so many tokens, sequentially."""
        return self.times.ms[depth] + depth * self.draft.ms

    def limit_gain(self, rate: float, max_depth: int) -> float:
        """Return the best speed-up over plain decoding if every drafted token is accepted with this probability."""
        return limit_gain(rate, max_depth, self.times.ms, self.draft.ms)

    def may_pay(self, max_depth: int) -> bool:
        """Return whether fully accepted drafts could pay, should the times be as much too high as they may."""
        if self.limit_gain(1.0, max_depth) >= WORTHWHILE_GAIN:
            return True
        times = self.times
        hoped = [times.ms[0], *(ms / (1.0 + times.overestimate(n)) for n, ms in enumerate(times.ms[1:], 2))]
        return limit_gain(1.0, max_depth, hoped, self.draft.ms) >= WORTHWHILE_GAIN

    def prices(self) -> Prices:
        """Return the costs that the steady rate is computed from."""
        return Prices(
            self.times.ms,
            self.draft.ms,
            self.rollback_ms,
            1.0 if self.offered > 0.995 else self.offered,
            self.overlap_times.ms if self.overlap_times else None,
            self.overlap_draft.ms,
        )
