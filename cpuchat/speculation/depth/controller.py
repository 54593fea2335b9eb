"""Chooses how many tokens to draft: the depth with the best expected tokens per second, depth 0 (plain) included.

Acceptance is learned and the depth with the best expected rate chosen (acceptance.py), under costs that are calibrated
and followed (costs.py). A proposal of suffix decoding is verified to the depth g with the largest E(g) - rate * T(g +
1), if that is more than the next step is worth without it (renewal reward).

One budget holds from the first token on. It accrues at a share of elapsed time, and what drafts gain or lose against
plain decoding is booked in it. Shadow drafting, which only judges the draft model, is paid from it. While speculation
is off, `DepthController.off` says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from cpuchat.costs.calibrations import PassCosts
from cpuchat.costs.model import tokens_per_pass
from cpuchat.protocol.drafters import DrafterName
from cpuchat.protocol.reasons import UNCALIBRATED, DraftsOff
from cpuchat.speculation.depth.acceptance import Acceptance, limit_gain, rates
from cpuchat.speculation.depth.constants import CONSTANTS
from cpuchat.speculation.depth.costs import CurrentCosts, Following
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, Proposal
from cpuchat.speculation.stats import PassRecord


class DepthController:
    """Learns from every pass and decides how much to draft. `plan`: the depth planned last for the draft model.
    `costs`: None when there was no calibration; then only a fixed depth works. `max_depth`: longest
    draft that can be verified. `known`: accepted and compared tokens of earlier answers, as in `learned`."""

    def __init__(
        self,
        costs: PassCosts | None,
        *,
        max_depth: int = MAX_DEPTH,
        has_draft_model: bool,
        known: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self._costs = CurrentCosts(costs) if costs else None
        self._max_depth = max(0, min(max_depth, MAX_DEPTH))
        self._has_draft = has_draft_model
        self._plain = Following([0.0])
        self._is_rough = costs is not None and costs.disturbed
        self._untimed = CONSTANTS.timing_steps if self._is_rough else 0  # plain steps to come
        self._draft_acceptance = Acceptance(
            CONSTANTS.draft_priors, CONSTANTS.draft_prior_tokens, CONSTANTS.draft_window_tokens, known
        )
        self._acceptance: dict[DrafterName, Acceptance] = {
            "draft": self._draft_acceptance,
            "suffix": Acceptance(CONSTANTS.free_priors, CONSTANTS.free_prior_tokens, CONSTANTS.free_window_tokens),
        }
        self._budget = 0.0 if self._is_known else CONSTANTS.budget_start * (self.plain_ms or 0.0)
        self._won: dict[DrafterName, float] = {}
        self._after_read = Following([0.0])  # how much slower the plain step after a shadow draft is
        self._has_read = False
        self._was_plain = True
        self._last_depth = 0
        self._passes_since_draft = 1 << 30
        self._reset(0)

    def _reset(self, fixed: int) -> None:
        self._fixed = fixed
        self.plan = 0
        self._is_asked = False  # about the draft model, in this answer
        self._n_written = 0
        self._n_proposed = 0  # by suffix decoding
        self._unread = self._scorable = 0
        self._slow_prefill_ms = 0.0
        self._recent = (0.0, 0.0)  # tokens and ms, forgetting
        self._rates: tuple[int, list[float]] | None = None

    def begin_answer(self, *, fixed: int = 0) -> None:
        """Begin an answer with a `fixed` depth, 0 = adaptive. What was learned is kept with less weight."""
        self._reset(max(0, min(fixed, self._max_depth)))
        for acceptance in self._acceptance.values():
            acceptance.fade(CONSTANTS.max_tokens_kept)

    def record(self, record: PassRecord) -> None:
        n, costs, plain = record.drafted, self._costs, self.plain_ms or record.verify_ms
        ms, gained = record.verify_ms + record.draft_ms + record.rollback_ms, 0.0
        if record.drafter is not None:
            acceptance = self._observe(record.drafter, record)
            if costs is not None and (n or record.drafter == "draft"):
                ms = costs.record_verify(record)
            is_model, gained = record.drafter == "draft", (record.accepted + 1) * plain - ms
            max_gain = CONSTANTS.max_gain_before_loss if is_model else CONSTANTS.free_max_gain_before_loss
            won = self._won.get(record.drafter, 0.0) + gained
            won = max(CONSTANTS.min_budget * plain, min(max_gain * plain, won))
            self._won[record.drafter] = won
            if gained < 0 and won <= 0:
                acceptance.fade(CONSTANTS.max_tokens_after_loss if is_model else CONSTANTS.free_max_tokens_after_loss)
            if not is_model:
                gained = 0.0  # the budget is the draft model's
            else:
                self._unread = self._scorable = 0
                if n:
                    surprise = tokens_per_pass(acceptance.mean, n) - record.accepted - 1
                    gained += CONSTANTS.expected_share * surprise * plain
        elif self._has_read:
            self._after_read.observe(max(0.01 * plain, min(ms - plain, plain)))
        elif self._was_plain:
            # The first plain step after another pass is slower than those that follow (its graph is rebuilt, the
            # caches hold something else): it is not representative.
            self._plain.observe(ms)
            self._untimed = max(0, self._untimed - 1)
            if costs is not None:
                costs.times.observe(ms)
        if self._has_read:
            self._has_read = False
            gained -= self._after_read.ms[0]
        self._was_plain = n == 0
        self._count(record)
        weight = CONSTANTS.recent_weight
        self._recent = (weight * self._recent[0] + record.accepted + 1, weight * self._recent[1] + ms)
        left = self._budget + CONSTANTS.budget_share * ms
        if gained < 0:  # bad luck must not keep it from being asked again
            gained = max(gained, min(0.0, CONSTANTS.min_budget * plain - left))
        self._budget = min(CONSTANTS.max_budget * plain, left + gained)
        self._rates = None

    def record_shared(self, record: PassRecord) -> None:
        """Learn from a pass over tokens of other answers too, which tells nothing of what passes cost."""
        if record.drafter is not None:
            self._observe(record.drafter, record)
        self._was_plain = False
        self._count(record)
        self._rates = None

    def _observe(self, drafter: DrafterName, record: PassRecord) -> Acceptance:
        acceptance = self._acceptance[drafter]
        for position, bucket in enumerate(record.buckets[: min(record.accepted + 1, record.compared)]):
            acceptance.observe(bucket, position < record.accepted)
        return acceptance

    def _count(self, record: PassRecord) -> None:
        n, tokens = record.drafted, record.accepted + 1
        self._passes_since_draft = 0 if n else self._passes_since_draft + 1
        self._last_depth = n or self._last_depth
        self._n_written += tokens
        self._unread += tokens
        self._scorable += tokens

    def record_scores(self, drafter: DrafterName, buckets: Sequence[int], accepted: Sequence[bool]) -> None:
        """Learn from what a drafter would have proposed, in the order of the text, and whether it was written."""
        if drafter == "draft":  # what it would have drafted in the prompt tells little about answers
            first = max(0, len(accepted) - self._scorable)
            buckets, accepted, self._scorable = buckets[first:], accepted[first:], 0
            if self._has_read:
                self._draft_acceptance.fade(CONSTANTS.max_tokens_after_loss)
        else:
            self._n_proposed += len(accepted)
        for bucket, was_accepted in zip(buckets, accepted, strict=True):
            self._acceptance[drafter].observe(bucket, was_accepted)
        self._rates = None

    def record_read(self, n: int, ms: float, *, is_shadow: bool = False) -> None:
        """Learn from a batch of `n` tokens that the draft model read; `is_shadow`: `shadow_budget` allowed it."""
        if n <= 0 or self._costs is None:
            return
        self._costs.read.observe(ms / n)
        self._unread = 0
        if is_shadow:
            self._budget -= ms
            self._has_read = True
        self._rates = None

    def chances(self, proposal: Proposal) -> list[float]:
        """Return the chances that the tokens of a proposal are accepted, each with all before it."""
        return list(accumulate(map(self._acceptance[proposal.drafter].rate, proposal.buckets), mul))

    def free_depth(self, proposal: Proposal) -> int:
        """Return how many tokens of a proposal of suffix decoding are worth verifying now."""
        max_depth = min(len(proposal), self._max_depth)
        self._n_proposed += max_depth
        if self._fixed:
            return min(self._fixed, max_depth)
        costs = self._costs
        if costs is None or max_depth == 0:
            return 0
        rate, read = 1.0 / costs.plain_ms, 0.0
        if self.plan:
            rate = max(self._current_rates(costs, self._max_depth))
            # Without the proposal comes a draft of the best rate, which is worth what it costs.
            read = costs.read.ms[0]
        if self._passes_since_draft < CONSTANTS.recent_rate_passes and self._recent[1] > 0:
            rate = max(rate, CONSTANTS.recent_rate_share * self._recent[0] / self._recent[1])
        total = 1.0
        best, depth = CONSTANTS.free_min_gain + (0.0 if self.plan else 1.0 - rate * costs.plain_ms), 0
        for n, reached in enumerate(self.chances(proposal)[: self._max_depth], 2):
            total += reached
            extra = read * (total - 1) + costs.rollback.ms[0] * (1.0 - reached)
            if (worth := total - rate * (costs.times.ms[n - 1] + extra)) > best:
                best, depth = worth, n - 1
        return depth

    def plan_draft(self, room: int, unread: int) -> int:
        """Return the depth of the draft model's next draft: at most `room`, with `unread` tokens to read first."""
        self._is_asked = True
        self.plan = self._decide(min(room, self._max_depth), unread)
        return self.plan

    def _decide(self, max_depth: int, unread: int) -> int:
        costs = self._costs
        if not self._has_draft or max_depth <= 0:
            return 0
        if self._fixed:
            return min(self._fixed, max_depth)
        if costs is None:
            return 0
        by_depth = self._current_rates(costs, max_depth)
        rate = max(by_depth)
        depth = by_depth.index(rate)  # of equal ones the shortest draft
        plain, catch_up = costs.plain_ms, costs.catch_up_ms(unread)
        is_near = catch_up < CONSTANTS.near_share * plain
        tokens = max(CONSTANTS.catch_up_tokens, self._n_written)
        pays = (1.0 - 1.0 / (rate * plain)) * plain * tokens if depth else 0.0
        self._slow_prefill_ms = catch_up if depth and pays <= catch_up else 0.0
        if not is_near and (pays <= catch_up or not self._is_known):
            return 0
        return depth

    @property
    def _is_known(self) -> bool:
        return self._draft_acceptance.n_observed >= CONSTANTS.min_tokens_known

    def _current_rates(self, costs: CurrentCosts, max_depth: int) -> list[float]:
        """Return the draft model's rates up to depth `max_depth`; kept until the next event."""
        if self._rates is None or self._rates[0] != max_depth:
            self._rates = max_depth, rates(self._draft_acceptance.mean, costs, max_depth)
        return self._rates[1]

    def shadow_budget(self, lag: int) -> int:
        """Return how many of the `lag` unread tokens, the newest, the draft model may read now only to be scored."""
        costs = self._costs
        if costs is None or not self._has_draft or self._fixed or self.plan:
            return 0
        if self._unread < (CONSTANTS.shadow_tokens if self._is_known else CONSTANTS.first_shadow_tokens):
            return 0
        loan = 0.0 if self._is_known else CONSTANTS.budget_loan * costs.plain_ms
        left = self._budget - self._after_read.ms[0] + loan
        if lag * costs.read.ms[0] > left:
            # Read from the middle of a text it has less context: the first of these tokens do not count.
            lag = min(lag, 2 * min(self._unread, CONSTANTS.shadow_tokens), int(left / costs.read.ms[0]))
            if lag < 2 * CONSTANTS.first_shadow_tokens:
                return 0
            self._scorable = min(self._scorable, lag // 2)
        return lag if limit_gain(costs, self._max_depth) >= CONSTANTS.worthwhile_gain else 0

    @property
    def learned(self) -> tuple[float, float]:
        """Return accepted and compared tokens of the draft model in all texts, the older ones partly forgotten."""
        return self._draft_acceptance.lasting

    @property
    def plain_ms(self) -> float | None:
        """Return the current ms of a plain pass: calibrated, corrected by observations. None if unknown."""
        return self._costs.plain_ms if self._costs is not None else self._plain.ms[0] or None

    @property
    def timed_plain_ms(self) -> float | None:
        """Return `plain_ms` as a figure for the user: None also while it rests on a disturbed calibration alone."""
        return self.plain_ms if not self._untimed else None

    @property
    def depth(self) -> int:
        """Return the draft depth now: as planned for the draft model, or that of the last draft while it is recent."""
        return self.plan or (self._last_depth if self._passes_since_draft <= CONSTANTS.recent_passes else 0)

    @property
    def off(self) -> DraftsOff | None:
        """Return why speculation is off; None while it is on."""
        if self.plan or self._passes_since_draft <= CONSTANTS.recent_passes:
            return None
        costs, asked = self._costs, self._is_asked
        if costs is None:
            return None if self._fixed else UNCALIBRATED
        if not asked and not self._n_proposed:
            return DraftsOff("nothing to draft from") if self._n_written else None
        if asked and self._slow_prefill_ms:
            return DraftsOff("slow prefill", prefill_s=self._slow_prefill_ms / 1e3)
        plain_ms, draft_ms = costs.plain_ms, costs.draft.ms[0]
        if limit_gain(costs, self._max_depth) < CONSTANTS.worthwhile_gain:
            if asked and draft_ms > CONSTANTS.max_draft_share * plain_ms:
                return DraftsOff("slow draft model", plain_ms=plain_ms, draft_ms=draft_ms)
            return DraftsOff("slow verification")
        if not asked or not self._is_known:
            return DraftsOff("acceptance unknown" if asked else "rare repeats")
        rate = max(self._current_rates(costs, self._max_depth)[1:], default=0.0)
        slower = 1.0 / (rate * plain_ms) - 1.0 if rate > 0 else 0.0
        acceptance = self._draft_acceptance.mean
        return DraftsOff("low acceptance", acceptance=acceptance, slower_share=None if self._is_rough else slower)
