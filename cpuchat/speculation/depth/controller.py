"""Chooses how many tokens to draft: the depth with the best expected tokens per second, depth 0 (plain decoding)
included.

Renewal reward: with pass cost C(g) and expected yield E(g), the best steady rate is lambda = max(1 / T(1), max E(g) /
C(g)). A free drafter's proposal is worth verifying to the depth g with the largest E(g) - lambda T(g + 1), if that is
more than the alternative is worth. Yields are learned (acceptance.py), costs calibrated and corrected by what is
observed (current_costs.py). Exploration is paid for from small budgets (budgets.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Final

from cpuchat.speculation.depth.acceptance import DRAFT_PRIORS, FREE_PRIORS, Acceptance
from cpuchat.speculation.depth.budgets import Budget, RegressionGuard
from cpuchat.speculation.depth.costs import PassCosts
from cpuchat.speculation.depth.current_costs import CurrentCosts
from cpuchat.speculation.depth.disabled_reason import NO_REPEATS, UNCALIBRATED, disabled_reason, slow_prefill
from cpuchat.speculation.depth.observed_times import ObservedTime
from cpuchat.speculation.depth.shadow_reading import ShadowReading
from cpuchat.speculation.depth.steady import Best, Plan, best_steady, overlap_is_better
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, Proposal
from cpuchat.speculation.pass_record import PassRecord
from cpuchat.timings import DrafterName

_KEPT: Final = 160.0
"""Compared tokens of earlier answers that still count in the next."""

_ON, _OFF = 1.03, 1.0
"""Speculation begins at the advantage `_ON` over plain decoding and ends below `_OFF`."""
_SURE: Final = 0.7
"""It begins only if that is not by chance: standard deviations by which acceptance may be worse."""
_FREE_ON, _RECENT = 0.02, 16
_KNOWN: Final = 8
"""Number of compared tokens from which the draft model's acceptance counts as known."""
_HORIZON: Final = 128
"""A catch-up must pay within as many tokens (or as many again as were written)."""
_PROBE: Final = 3
"""Plain passes to measure their cost, after the first: one, and two more if it is a surprise."""


class DepthController:
    """Learns from every pass and decides how much to draft.

    Args:
        costs: None when there was no calibration, with `uncalibrated` as the reason; adaptive depth then stays off and
            only a fixed depth works.
        max_depth: longest draft that can be verified.
        known: accepted and compared tokens of the draft model in earlier answers, as in `learned`.

    Attributes:
        plan: the last plan for the draft model.
    """

    def __init__(
        self,
        costs: PassCosts | None,
        *,
        max_depth: int = MAX_DEPTH,
        has_draft_model: bool,
        uncalibrated: str = UNCALIBRATED,
        known: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        self._costs = CurrentCosts(costs, has_draft=has_draft_model) if costs else None
        self._uncalibrated = uncalibrated
        self._max_depth = max(0, min(max_depth, MAX_DEPTH))
        self._has_draft = has_draft_model
        self._plain = ObservedTime(0.0)
        self._draft_acceptance = Acceptance(DRAFT_PRIORS, 1.0, 240.0, known)
        self._acceptance: dict[DrafterName, Acceptance] = {"draft": self._draft_acceptance}
        self._acceptance["lookup"], self._acceptance["suffix"] = (Acceptance(FREE_PRIORS, 6.0, 64.0) for _ in range(2))
        self._guards: dict[DrafterName, RegressionGuard] = {name: RegressionGuard() for name in self._acceptance}
        plain = self.plain_ms or 0.0
        self._shadow = ShadowReading(plain)
        self._probing = Budget(0.002, start=0.0, most=2.0 * plain)
        self._exploring = Budget(0.003, start=0.5 * plain, most=1.0 * plain)
        self._rechecking = Budget(0.002, start=0.0, most=4.0 * plain)
        self._last_pass: PassRecord | None = None
        self._last_depth = 0
        self._passes_since_draft = 1 << 30
        self._best_of: dict[int, Best] = {}
        self._reset(0)

    def _reset(self, fixed: int) -> None:
        self._fixed = fixed
        self.plan = Plan()
        self._is_on = False
        self._is_asked = False  # about the draft model, in this answer
        self._n_written = self._n_proposed = 0  # the latter by free drafters
        self._probes_left = 0
        self._slow_prefill_ms = 0.0
        self._recent = (0.0, 0.0)  # tokens and ms, forgetting

    # --- what happened ------------------------------------------------------------------------------------------

    def begin_answer(self, *, fixed: int = 0) -> None:
        """Begin an answer with a `fixed` depth, 0 = adaptive. What was learned is kept with less weight."""
        self._reset(max(0, min(fixed, self._max_depth)))
        self._shadow.begin_answer()
        for acceptance in self._acceptance.values():
            acceptance.fade(_KEPT)
        self._best_of.clear()

    def record(self, record: PassRecord) -> None:
        """Learn from a pass."""
        # The first plain step after a pass of another size is slower than those that follow (its graph is rebuilt,
        # the caches hold something else): it is not representative.
        is_representative = self._last_pass is None or not self._last_pass.drafted
        self._last_pass = record
        if record.drafter is None:
            self._record_plain(record.verify_ms, is_representative)
        else:
            self._record_verify(record, record.drafter)

    def _record_plain(self, ms: float, is_representative: bool) -> None:
        if is_representative:
            self._plain.observe(ms)
        if self._costs is not None:
            self._costs.record_plain(ms, is_representative=is_representative)
        for guard in self._guards.values():
            guard.fade()
        self._passes_since_draft += 1
        self._count(1, ms)

    def _record_verify(self, record: PassRecord, name: DrafterName) -> None:
        n, ms, acceptance = record.drafted, record.verify_ms, self._acceptance[name]
        expected, variance = _moments(acceptance, record.buckets[: record.compared])
        for j, bucket in enumerate(record.buckets[: min(record.accepted + 1, record.compared)]):
            acceptance.observe(bucket, j < record.accepted)
        if n == 0:
            self._plain.observe(ms)
        catch_up = rolled_back = 0.0
        if self._costs is not None:
            self._costs.record_verify(record, self.plan.depth)
            catch_up = self._costs.catch_up_ms(record.unread)
            rolled_back = self._costs.rollback_ms if record.accepted < record.compared else 0.0
        spent = ms + record.draft_ms + rolled_back
        if n:
            # Judged by the tokens alone: times are corrected as they are seen.
            plain = self.plain_ms or ms
            gained = (record.accepted + 1) * plain - spent + catch_up
            self._guards[name].add(gained, gained + (expected - record.accepted - 1) * plain, sqrt(variance) * plain)
        self._count(record.accepted + 1, spent)
        if name == "draft":
            self._shadow.add_draft()
        self._passes_since_draft = 0 if n else self._passes_since_draft + 1
        self._last_depth = n or self._last_depth

    def _count(self, tokens: int, ms: float) -> None:
        self._n_written += tokens
        self._shadow.add_pass(tokens, ms)
        for budget in (self._probing, self._exploring, self._rechecking):
            budget.earn(ms)
        self._recent = (0.85 * self._recent[0] + tokens, 0.85 * self._recent[1] + ms)
        self._best_of.clear()

    def record_scores(self, drafter: DrafterName, buckets: Sequence[int], accepted: Sequence[bool]) -> None:
        """Learn from what a drafter would have proposed, in the order of the text, and whether it was written."""
        if drafter == "draft":
            first = max(0, len(accepted) - self._shadow.take_scorable())
            buckets, accepted = buckets[first:], accepted[first:]
        else:
            self._n_proposed += len(accepted)
        for bucket, was_accepted in zip(buckets, accepted, strict=True):
            self._acceptance[drafter].observe(bucket, was_accepted)
        self._best_of.clear()

    def record_read(self, n: int, ms: float, *, is_shadow: bool = False) -> None:
        """Learn from a batch of `n` tokens that the draft model read; `is_shadow`: `shadow_budget` allowed it."""
        if n <= 0 or self._costs is None:
            return
        self._costs.read.observe(ms / n)
        self._shadow.add_read(ms, is_shadow=is_shadow)
        self._best_of.clear()

    # --- free drafters ------------------------------------------------------------------------------------------

    def free_depth(self, proposal: Proposal) -> int:
        """Return how many tokens of a free drafter's proposal are worth verifying now."""
        most = min(len(proposal), self._max_depth)
        self._n_proposed += most
        if self._fixed:
            return min(self._fixed, most)
        costs = self._costs
        if costs is None or most == 0:
            return 0
        rate, read = 1.0 / costs.plain_ms, 0.0
        if self._has_draft and self._is_on:
            rate = max(rate, self._best(costs, self._max_depth).rate)
            read = costs.read.ms
        if self._passes_since_draft < 4 and self._recent[1] > 0:
            rate = max(rate, 0.9 * self._recent[0] / self._recent[1])
        alternative = self._alternative(costs, rate)
        depth, _ = self._worthwhile_depth(costs, proposal, rate, alternative, read)
        if self._guards[proposal.drafter].is_paused():
            return 0
        if depth:
            return depth
        # A depth whose cost was not seen for long, if it would pay should its time be as much too high as it may.
        depth, loss = self._worthwhile_depth(costs, proposal, rate, alternative, hopeful=True)
        return depth if depth and self._rechecking.try_pay(max(loss, 0.0)) else 0

    def _worthwhile_depth(
        self,
        costs: CurrentCosts,
        proposal: Proposal,
        rate: float,
        alternative: float,
        read: float = 0.0,
        *,
        hopeful: bool = False,
    ) -> tuple[int, float]:
        """Return the depth of the proposal worth most at this price of time (0 = none), and what it loses if not."""
        acceptance, times = self._acceptance[proposal.drafter], costs.times
        reached = total = 1.0
        best, depth, loss = alternative + _FREE_ON, 0, 0.0
        for j, bucket in enumerate(proposal.buckets[: self._max_depth]):
            reached *= acceptance.rate(bucket, acceptance.accept_streak + j)
            total += reached
            rollback = costs.rollback_ms * (1.0 - reached)
            ms = times.ms[j + 1] / (1.0 + times.overestimate(j + 2)) if hopeful else times.ms[j + 1]
            worth = total - rate * (ms + read * (total - 1) + rollback)
            if worth > best:
                best, depth, loss = worth, j + 1, times.ms[j + 1] + rollback - total / rate
        return depth, loss

    def _alternative(self, costs: CurrentCosts, rate: float) -> float:
        """Return what the next step is worth without the free proposal, at this price of time."""
        plain = 1.0 - rate * costs.plain_ms
        if not (self._has_draft and self._is_on):
            return plain
        best = self._best(costs, self._max_depth)
        # A draft pass of the best steady rate over about as many tokens.
        length = best.depth / 2 + 1
        return max(plain, length * (1.0 - rate / best.rate))

    # --- the draft model ----------------------------------------------------------------------------------------

    def plan_draft(self, room: int, unread: int) -> Plan:
        """Plan the draft model's next draft: at most `room` tokens, with `unread` tokens of text to read first."""
        self._is_asked = True
        self.plan = self._decide(min(room, self._max_depth), unread)
        return self.plan

    def _decide(self, most: int, unread: int) -> Plan:
        costs, acceptance = self._costs, self._draft_acceptance
        if not self._has_draft or most <= 0:
            return Plan()
        if self._fixed:
            depth = min(self._fixed, most)
            if costs is None or costs.overlap_times is None:
                return Plan(depth)
            return Plan(depth, overlap_is_better(depth, acceptance, costs.prices(), self.plan))
        if costs is None:
            return Plan()
        best = self._best(costs, most)
        gain = best.rate * costs.plain_ms
        if self._guards["draft"].is_paused():
            self._is_on = False
            return Plan()
        catch_up = costs.catch_up_ms(unread)
        is_near = catch_up < 0.25 * costs.plain_ms
        self._is_on = self._is_worthwhile(costs, best, gain, catch_up, is_near)
        if self._is_on:
            if self._probes_plain(costs, best.rate):
                return Plan()
            if best.explore and self._explores(costs, best.explore, best.rate):
                return Plan(best.explore)
            return Plan(best.depth, best.overlap)
        if is_near and gain > 0.85 and self._is_known and self._tests_draft(costs, best, gain):
            return Plan(best.depth)
        if is_near and best.explore and self._explores(costs, best.explore, max(1.0 / costs.plain_ms, best.rate)):
            return Plan(best.explore)
        return Plan()

    def _is_worthwhile(self, costs: CurrentCosts, best: Best, gain: float, catch_up: float, is_near: bool) -> bool:
        pays = (1.0 - 1.0 / gain) * costs.plain_ms * max(_HORIZON, self._n_written)
        self._slow_prefill_ms = catch_up if gain > _ON and pays <= catch_up else 0.0
        if gain <= (_OFF if self._is_on else _ON) or not (pays > catch_up or is_near):
            return False
        if not self._is_known:  # a draft that is rejected then costs no more than one plain token
            return is_near and costs.draft_pass_ms(best.depth) < 2.0 * costs.plain_ms
        if self._is_on:
            return True
        return costs.limit_gain(self._draft_acceptance.quantile(-_SURE), self._max_depth) > 1.0 or best.overlap

    @property
    def _is_known(self) -> bool:
        return self._draft_acceptance.n_observed >= _KNOWN

    def _explores(self, costs: CurrentCosts, depth: int, rate: float) -> bool:
        """Return whether a depth that may be better than thought is worth a pass to find out."""
        total = reached = 1.0
        for one in self._draft_acceptance.rates()[:depth]:
            reached *= one
            total += reached
        loss = max(0.0, costs.draft_pass_ms(depth) + costs.rollback_ms * (1.0 - reached) - total / rate)
        return self._exploring.try_pay(loss)

    def _tests_draft(self, costs: CurrentCosts, best: Best, gain: float) -> bool:
        """Return whether a draft that probably loses a little is the cheapest way to learn more about acceptance."""
        if costs.limit_gain(self._draft_acceptance.quantile(1.5), self._max_depth) < _ON:
            return False
        # At least a few percent: among many depths the best looks better than it is.
        loss = max(0.03, 1.0 - gain) * costs.draft_pass_ms(best.depth)
        return loss < 2.0 * costs.read.ms * best.depth and self._exploring.try_pay(loss)

    def _probes_plain(self, costs: CurrentCosts, rate: float) -> bool:
        """Return whether to take a plain step now, only to see what one costs."""
        if self._probes_left and (self._probes_left == _PROBE or costs.times.needs_confirmation(1)):
            self._probes_left -= 1
            return True
        if costs.times.passes_since(1) < _RECENT:
            return False
        if not self._probing.try_pay(2 * max(0.02 * costs.plain_ms, costs.plain_ms - 1.0 / rate)):
            return False
        self._probes_left = _PROBE
        return True

    def shadow_budget(self, lag: int) -> int:
        """Return how many of the newest tokens the draft model, while it is off, may read now only to be scored."""
        costs = self._costs
        if costs is None or not self._has_draft or self._fixed or self._is_on:
            return 0
        n = self._shadow.tokens_due(lag, costs.read.ms, is_known=self._is_known)
        if n == 0 or not costs.may_pay(self._max_depth):
            return 0
        is_doubtful = costs.limit_gain(self._draft_acceptance.quantile(2.0), self._max_depth) > 1.0
        self._shadow.set_interval(costs.read.ms, costs.plain_ms, is_doubtful=is_doubtful)
        return n

    def _best(self, costs: CurrentCosts, most: int) -> Best:
        """Return the draft model's best steady rate with drafts of at most `most` tokens; kept until the next event."""
        best = self._best_of.get(most)
        if best is None:
            times = costs.times
            off = times.uncertainty if self._is_on else times.overestimate
            best = best_steady(most, self._draft_acceptance, costs.prices(), off, self.plan)
            self._best_of[most] = best
        return best

    # --- figures ------------------------------------------------------------------------------------------------

    @property
    def learned(self) -> tuple[float, float]:
        """Return accepted and compared tokens of the draft model, the older ones partly forgotten."""
        return self._draft_acceptance.counted

    @property
    def plain_ms(self) -> float | None:
        """Return the current ms of a plain pass: calibrated, corrected by observations. None if unknown."""
        return self._costs.plain_ms if self._costs is not None else self._plain.ms or None

    @property
    def depth(self) -> int:
        """Return the current draft depth: as planned for the draft model, or that of the last draft while recent."""
        return self.plan.depth or (self._last_depth if self._passes_since_draft <= _RECENT else 0)

    @property
    def acceptance(self) -> float:
        """Return the recent acceptance rate of the draft model, or without one of the free drafters."""
        if self._is_asked or (self._has_draft and not self._n_proposed):
            return self._draft_acceptance.mean
        return max(self._acceptance["lookup"], self._acceptance["suffix"], key=lambda one: one.n_observed).mean

    @property
    def reason(self) -> str:
        """Return why speculation is off, in one plain sentence with figures; "" while it is on."""
        if self.plan.depth > 0 or self._is_on or self._passes_since_draft <= _RECENT:
            return ""
        costs = self._costs
        if costs is None:
            return "" if self._fixed else self._uncalibrated
        if not self._is_asked and not self._n_proposed:
            return NO_REPEATS if self._n_written else ""
        if self._is_asked and self._slow_prefill_ms:
            return slow_prefill(self._slow_prefill_ms / 1e3)
        return disabled_reason(
            costs.plain_ms,
            costs.draft.ms if self._is_asked else 0.0,
            self._best(costs, self._max_depth).rate if self._is_asked and self._max_depth else 0.0,
            costs.limit_gain(1.0, self._max_depth),
            self.acceptance,
            has_draft=self._is_asked,
            is_scored=self._is_known,
        )


def _moments(acceptance: Acceptance, buckets: Sequence[int]) -> tuple[float, float]:
    """Return the expected tokens of a pass over a draft of these buckets, and their variance."""
    reached = total = 1.0
    squares = 0.0
    for j, bucket in enumerate(buckets):
        reached *= acceptance.rate(bucket, acceptance.accept_streak + j)
        total += reached
        squares += (2 * j + 1) * reached
    return total, max(0.0, squares - (total - 1.0) ** 2)
