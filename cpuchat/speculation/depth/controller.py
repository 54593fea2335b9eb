"""How many tokens to draft: the depth with the best expected tokens per second, depth 0 (plain decoding) included.

Renewal reward: with pass cost C(g) and expected yield E(g), the best steady rate is lambda = max(1 / T(1), max E(g) /
C(g)). A free drafter's proposal is worth verifying to the depth g with the largest E(g) - lambda T(g + 1), if that is
more than the alternative is worth. Yields are learnt (acceptance.py), costs calibrated (costs.py) and corrected by what
is observed (observed.py). What it may cost to find out more is paid from small budgets (ledger.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Final

from cpuchat.speculation.depth.acceptance import Acceptance
from cpuchat.speculation.depth.budgets import Budget, Doubt
from cpuchat.speculation.depth.costs import PassCosts
from cpuchat.speculation.depth.observed_times import ObservedTime, ObservedTimes
from cpuchat.speculation.depth.reason import UNCALIBRATED, why_off
from cpuchat.speculation.depth.steady import Best, Plan, Prices, best_steady, limit_gain
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, Proposal
from cpuchat.timings import DrafterName

__all__ = ["DepthController", "Plan"]

_DRAFT_PRIORS: Final = (0.62, 0.25, 0.4, 0.55, 0.7, 0.82, 0.92, 0.97)
_FREE_PRIORS: Final = (0.35, 0.12, 0.3, 0.45, 0.6, 0.75, 0.88, 0.95)
_KEPT: Final = 160.0
"""Compared tokens of earlier answers that still count in the next."""

_ON: Final = 1.03
"""Speculation begins at this advantage over plain decoding..."""
_SURE: Final = 0.7
"""...if it is none by luck: standard deviations of acceptance that it may be worse."""
_OFF: Final = 1.0
"""...and ends below this one."""
_WORTH: Final = 1.03
"""Less than this is no reason to bother, even if every draft were right."""
_FREE_ON: Final = 0.02
_READ_CHUNK: Final = 16
_SHORT: Final = 8
_HOPELESS_SHARE: Final = 0.004
"""Share of the time for reading along while acceptance is far too low."""
_HORIZON: Final = 128
"""A catch-up must pay within as many tokens (or as many again as were written)."""
_RECENT: Final = 16
_PROBE: Final = 3
"""Plain steps to see what one costs, after the first: one, and two more if it surprises."""


class DepthController:
    """Learns and decides. `costs` None: not calibrated, `uncalibrated` says why; adaptive depth then stays off, a fixed
    depth works."""

    def __init__(
        self,
        costs: PassCosts | None,
        *,
        max_depth: int = MAX_DEPTH,
        has_draft_model: bool,
        uncalibrated: str = UNCALIBRATED,
    ) -> None:
        self._costs = costs
        self._uncalibrated = uncalibrated
        self._max_depth = max(0, min(max_depth, MAX_DEPTH))
        self._has_draft = has_draft_model
        overlap = costs.overlap if costs and has_draft_model else None
        self._times = ObservedTimes(costs.verify_ms) if costs else None
        self._overlap_times = ObservedTimes(overlap.verify_ms) if overlap else None
        self._overlap_draft = ObservedTime(overlap.draft_ms if overlap else 0.0)
        self._plain = ObservedTime(0.0)
        self._draft = ObservedTime(costs.draft_ms if costs else 0.0)
        self._read = ObservedTime((costs.read_ms or costs.draft_ms) if costs else 0.0)
        self._acceptance: dict[DrafterName, Acceptance] = {
            "draft": Acceptance(_DRAFT_PRIORS, 1.0, 240.0),
            "lookup": Acceptance(_FREE_PRIORS, 6.0, 64.0),
            "suffix": Acceptance(_FREE_PRIORS, 6.0, 64.0),
        }
        self._doubts: dict[DrafterName, Doubt] = {name: Doubt() for name in self._acceptance}
        plain = self.plain_ms or 0.0
        self._reading = Budget(0.008, start=1.5 * plain, most=4.0 * plain)
        self._probing = Budget(0.002, start=0.0, most=2.0 * plain)
        self._exploring = Budget(0.003, start=0.5 * plain, most=1.0 * plain)
        self._rechecking = Budget(0.002, start=0.0, most=4.0 * plain)
        self._offered = 1.0
        self._fixed = 0
        self._plan = Plan()
        self._on = False
        self._lag = 0
        self._probe = 0
        self._settled = True
        self._written = 0
        self._unread = 0
        self._fresh = 0
        self._granted = False
        self._refused = False
        self._asked = False
        self._catch_up = 0.0
        self._interval = _READ_CHUNK
        self._last_use = 1 << 30
        self._last_depth = 0
        self._proposed = 0
        self._recent = (0.0, 0.0)
        self._cache: dict[int, Best] = {}

    # --- what happened ------------------------------------------------------------------------------------------

    def begin(self, *, fixed: int = 0) -> None:
        """An answer begins; what was learnt is kept, with less weight. `fixed` depth, 0 = adaptive."""
        self._fixed = max(0, min(fixed, self._max_depth))
        self._written = self._unread = self._fresh = 0
        self._on = self._asked = self._granted = False
        self._plan = Plan()
        self._interval = min(self._interval, 2 * _READ_CHUNK)
        self._probe = 0
        self._proposed = 0
        self._recent = (0.0, 0.0)
        for acceptance in self._acceptance.values():
            acceptance.fade(_KEPT)
        self._cache.clear()

    def plain(self, ms: float) -> None:
        """One plain step took `ms`. The first one after a pass of another size is slower than those that follow (its
        graph is built anew, the caches hold something else): it says nothing about plain decoding."""
        if self._settled:
            self._plain.observe(ms)
            if self._times is not None:
                self._times.observe(1, ms)
        self._settled = True
        self._passed(1, ms)
        for doubt in self._doubts.values():
            doubt.fade()
        self._draft.relax(1 / 200)
        self._last_use += 1

    def verified(
        self,
        proposal: Proposal,
        accepted: int,
        ms: float,
        *,
        compared: int | None = None,
        draft_ms: float = 0.0,
        overlap: bool = False,
    ) -> None:
        """A pass over 1 + len(proposal) tokens took `ms` (without a rollback), after `draft_ms` of drafting that it
        had to wait for. `accepted` tokens were right; of `compared` (None: all) that were looked at."""
        self._settled = len(proposal) == 0
        n, name = len(proposal), proposal.drafter
        compared = n if compared is None else min(compared, n)
        acceptance = self._acceptance[name]
        grades = proposal.grades or [0] * n
        expected, variance = self._moments(acceptance, grades[:compared])
        for j in range(min(accepted + 1, compared)):
            acceptance.observe(grades[j], j < accepted)
        if overlap and self._overlap_times is not None:
            self._overlap_times.observe(1 + n, ms)
            if self._times is not None:
                self._times.plain_at_most(self._overlap_times.ms[n])
        elif self._times is not None:
            self._times.observe(1 + n, ms)
        if n == 0:
            self._plain.observe(ms)
        catch_up = 0.0
        if name == "draft":
            asked, self._lag, lag = self._plan.depth, 0, self._lag
            short = n < asked
            self._offered += 0.03 * max(1, n) * ((n / (n + 1) if short else 1.0) - self._offered)
            catch_up = max(0, lag - 2) * self._read.ms
            if overlap and self._refused and n:
                self._overlap_draft.observe(draft_ms / n)
            self._refused = accepted < n
            if not overlap and n + short and catch_up < 0.2 * draft_ms:
                self._draft.observe((draft_ms - catch_up) / (n + short))
        rolled_back = self._costs.rollback_ms if self._costs and accepted < compared else 0.0
        spent = ms + draft_ms + rolled_back
        plain = self.plain_ms or ms
        if n:
            # Judged by the tokens alone: times are corrected as they are seen.
            gained = (accepted + 1) * plain - spent + catch_up
            self._doubts[name].add(gained, gained + (expected - accepted - 1) * plain, sqrt(variance) * plain)
        self._passed(accepted + 1, spent)
        if name == "draft":
            self._unread = self._fresh = 0
        self._last_use = 0 if n else self._last_use + 1
        self._last_depth = n or self._last_depth

    @staticmethod
    def _moments(acceptance: Acceptance, grades: Sequence[int]) -> tuple[float, float]:
        """Expected tokens of a pass over a draft of these grades, and their variance."""
        reached = total = 1.0
        squares = 0.0
        for j, grade in enumerate(grades):
            reached *= acceptance.rate(grade, acceptance.run + j)
            total += reached
            squares += (2 * j + 1) * reached
        return total, max(0.0, squares - (total - 1.0) ** 2)

    def scored(self, drafter: DrafterName, grades: Sequence[int], right: Sequence[bool]) -> None:
        """What a drafter would have said for tokens in the order of the text, against what was written."""
        acceptance = self._acceptance[drafter]
        if drafter == "draft":
            # What it would have said about the prompt tells little about answers.
            first = max(0, len(right) - self._fresh)
            grades, right = grades[first:], right[first:]
            self._fresh = 0
        else:
            self._proposed += len(right)
        for grade, was_right in zip(grades, right, strict=True):
            acceptance.observe(grade, was_right)
        self._cache.clear()

    def read(self, n: int, ms: float) -> None:
        """The draft model read `n` tokens of text in a batch and took `ms`."""
        if n <= 0:
            return
        self._read.observe(ms / n)
        if self._granted:
            self._reading.pay(ms)
            self._granted = False
        self._unread = 0
        self._cache.clear()

    def _passed(self, tokens: int, ms: float) -> None:
        self._written += tokens
        self._unread += tokens
        self._fresh += tokens
        for budget in (self._reading, self._probing, self._exploring, self._rechecking):
            budget.earn(ms)
        self._recent = (0.85 * self._recent[0] + tokens, 0.85 * self._recent[1] + ms)
        self._cache.clear()

    # --- what to do ---------------------------------------------------------------------------------------------

    def free_depth(self, proposal: Proposal) -> int:
        """Tokens of a free drafter's proposal worth verifying now, 0 = none."""
        most = min(len(proposal), self._max_depth)
        self._proposed += most
        if self._fixed:
            return min(self._fixed, most)
        if self._times is None or most == 0:
            return 0
        acceptance = self._acceptance[proposal.drafter]
        times = self._times.ms
        rate, read = 1.0 / times[0], 0.0
        if self._has_draft and self._on:
            rate = max(rate, self._best(self._max_depth).rate)
            read = self._read.ms
        if self._last_use < 4 and self._recent[1] > 0:
            rate = max(rate, 0.9 * self._recent[0] / self._recent[1])
        plain = self._alternative(rate)
        reached = total = 1.0
        best, depth = plain + _FREE_ON, 0
        rollback = self._costs.rollback_ms if self._costs else 0.0
        grades = proposal.grades or [0] * most
        for j in range(most):
            reached *= acceptance.rate(grades[j], acceptance.run + j)
            total += reached
            worth = total - rate * (times[j + 1] + read * (total - 1) + rollback * (1 - reached))
            if worth > best:
                best, depth = worth, j + 1
        if self._doubts[proposal.drafter].pauses():
            return 0
        return depth or self._recheck(proposal, rate, plain)

    def _recheck(self, proposal: Proposal, rate: float, plain: float) -> int:
        """A depth whose cost was not seen for long, if it would pay should the calibration be as far off as it may."""
        assert self._times is not None
        acceptance, times = self._acceptance[proposal.drafter], self._times
        reached = total = 1.0
        best, depth, loss = plain + _FREE_ON, 0, 0.0
        rollback = self._costs.rollback_ms if self._costs else 0.0
        for j, grade in enumerate(proposal.grades[: self._max_depth]):
            reached *= acceptance.rate(grade, acceptance.run + j)
            total += reached
            worth = total - rate * (times.ms[j + 1] / (1.0 + times.hope(j + 2)) + rollback * (1.0 - reached))
            if worth > best:
                best, depth = worth, j + 1
                loss = times.ms[j + 1] + rollback * (1.0 - reached) - total / rate
        return depth if depth and self._rechecking.spend(max(loss, 0.0)) else 0

    def _alternative(self, rate: float) -> float:
        """What the next step is worth without the free proposal, at this price of time."""
        plain = 1.0 - rate * self._times.ms[0] if self._times else 0.0
        if not (self._has_draft and self._on):
            return plain
        best = self._best(self._max_depth)
        # A draft pass of the best steady rate over about as many tokens.
        length = best.depth / 2 + 1
        return max(plain, length * (1.0 - rate / best.rate))

    def draft_plan(self, most: int, lag: int) -> Plan:
        """For the draft model, before it drafts. `most`: room; `lag`: tokens of text that it has not read yet."""
        self._lag = lag
        self._plan = self._decide(min(most, self._max_depth), lag)
        return self._plan

    def _decide(self, most: int, lag: int) -> Plan:
        self._asked = True
        if not self._has_draft or most <= 0:
            return Plan()
        if self._fixed:
            depth = min(self._fixed, most)
            return Plan(depth, self._overlap_times is not None and self._search(depth, at_depth=True).overlap)
        if self._times is None:
            return Plan()
        best = self._best(most)
        plain_ms = self._times.ms[0]
        gain = best.rate * plain_ms
        if self._doubts["draft"].pauses():
            self._on = False
            return Plan()
        catch_up = max(0, lag - 2) * self._read.ms
        pays = (1.0 - 1.0 / gain) * plain_ms * max(_HORIZON, self._written)
        wanted = gain > (_OFF if self._on else _ON) and (pays > catch_up or catch_up < 0.25 * plain_ms)
        known = self._acceptance["draft"].seen >= _SHORT
        if wanted and not known:
            wanted = catch_up < 0.25 * plain_ms and self._cheap(best.depth)
        elif wanted and not self._on:
            wanted = self._limit_gain(self._acceptance["draft"].at(-_SURE)) > 1.0 or best.overlap
        self._on = wanted
        self._catch_up = catch_up if gain > _ON and pays <= catch_up else 0.0
        if not wanted:
            if known and gain > 0.85 and catch_up < 0.25 * plain_ms and self._learn(best, gain):
                return Plan(best.depth)
            if best.explore and catch_up < 0.25 * plain_ms and self._try(best.explore, max(1.0 / plain_ms, best.rate)):
                return Plan(best.explore)
            return Plan()
        if self._probe_plain(best.rate):
            return Plan()
        if best.explore and self._try(best.explore, best.rate):
            return Plan(best.explore)
        return Plan(best.depth, best.overlap)

    def _cheap(self, depth: int) -> bool:
        """A pass that turns out to be in vain costs no more than one plain token."""
        assert self._times is not None
        return self._times.ms[depth] + depth * self._draft.ms < 2.0 * self._times.ms[0]

    def _try(self, depth: int, rate: float) -> bool:
        """Whether a depth that may be better than thought is worth a pass to find out."""
        assert self._times is not None and self._costs is not None
        yields, reached = self._yields(depth)
        cost = self._times.ms[depth] + depth * self._draft.ms + self._costs.rollback_ms * (1.0 - reached)
        loss = max(0.0, cost - yields / rate)
        stale = not self._on and self._times.hope(depth + 1) > self._times.doubt(depth + 1)
        return self._exploring.spend(loss) or (stale and self._rechecking.spend(loss))

    def _learn(self, best: Best, gain: float) -> bool:
        """Whether a draft that probably loses a little is the cheapest way to learn more about acceptance."""
        assert self._times is not None
        if self._limit_gain(self._acceptance["draft"].at(1.5)) < _ON:
            return False
        # At least a few percent: among many depths the best looks better than it is.
        loss = max(0.03, 1.0 - gain) * (self._times.ms[best.depth] + best.depth * self._draft.ms)
        return loss < 2.0 * self._read.ms * best.depth and self._exploring.spend(loss)

    def _yields(self, depth: int) -> tuple[float, float]:
        """Expected tokens, and the probability that none is refused."""
        total = reached = 1.0
        for rate in self._acceptance["draft"].rates()[:depth]:
            reached *= rate
            total += reached
        return total, reached

    def _probe_plain(self, rate: float) -> bool:
        """Whether to take a plain step now, only to see what one costs."""
        assert self._times is not None
        if self._probe and (self._probe == _PROBE or self._times.unsettled(1)):
            self._probe -= 1
            return True
        if self._times.since(1) < _RECENT:
            return False
        if not self._probing.spend(2 * max(0.02 * self._times.ms[0], self._times.ms[0] - 1.0 / rate)):
            return False
        self._probe = _PROBE
        return True

    def shadow_budget(self, lag: int) -> int:
        """While the draft model is off: how many of the newest tokens it may read now just to be scored; 0 = none."""
        if self._times is None or not self._has_draft or self._fixed or self._on:
            return 0
        known = self._acceptance["draft"].seen >= _SHORT
        if self._unread < (self._interval if known else _SHORT):
            return 0
        affordable = self._reading.left / max(self._read.ms, 1e-6)
        if lag <= affordable:
            k = lag
        else:
            # Read from the middle of a text it has less to go by: the first of these tokens do not count.
            k = 2 * min(self._unread, _READ_CHUNK if known else _SHORT)
            if k > affordable:
                return 0
            k = min(k, lag)
            self._fresh = min(self._fresh, k // 2)
        if not self._may_pay():
            return 0
        doubtful = self._limit_gain(self._acceptance["draft"].at(2.0)) > 1.0
        # Rarely enough where it is hopeless; the dearer to read, the rarer.
        rare = _READ_CHUNK * self._read.ms / (_HOPELESS_SHARE * self._times.ms[0])
        self._interval = _READ_CHUNK if doubtful else max(_READ_CHUNK, min(96, self._interval * 2, round(rare)))
        self._granted = True
        return k

    def _limit_gain(self, rate: float) -> float:
        """Best advantage over plain decoding if every drafted token were right with this probability."""
        assert self._times is not None
        return limit_gain(rate, self._max_depth, self._times.ms, self._draft.ms)

    def _may_pay(self) -> bool:
        """Whether drafts that are always right could pay, should the calibration be as far off as it may."""
        assert self._times is not None
        if self._limit_gain(1.0) >= _WORTH:
            return True
        times = self._times
        hoped = [times.ms[0], *(ms / (1.0 + times.hope(n)) for n, ms in enumerate(times.ms[1:], 2))]
        return limit_gain(1.0, self._max_depth, hoped, self._draft.ms) >= _WORTH

    def _best(self, most: int) -> Best:
        """The draft model's best steady rate with drafts of at most `most` tokens. Nothing happened since: kept."""
        found = self._cache.get(most)
        if found is None:
            found = self._cache[most] = self._search(most)
        return found

    def _search(self, most: int, *, at_depth: bool = False) -> Best:
        assert self._times is not None and self._costs is not None
        overlap = self._overlap_times
        prices = Prices(
            self._times.ms,
            self._draft.ms,
            self._costs.rollback_ms,
            1.0 if self._offered > 0.995 else self._offered,
            overlap.ms if overlap else None,
            self._overlap_draft.ms,
        )
        off = self._times.doubt if self._on else self._times.hope
        return best_steady(most, self._acceptance["draft"], prices, off, self._plan, at_depth=at_depth)

    # --- what to tell -------------------------------------------------------------------------------------------

    @property
    def plain_ms(self) -> float | None:
        """What one plain step costs now: calibrated, corrected by what is observed. None: not known."""
        if self._times is not None:
            return self._times.ms[0]
        return self._plain.ms or None

    @property
    def plan(self) -> Plan:
        """The last plan for the draft model."""
        return self._plan

    @property
    def depth(self) -> int:
        """Tokens per draft now, whoever drafts: as planned, or those of the last draft while it is recent."""
        return self._plan.depth or (self._last_depth if self._last_use <= _RECENT else 0)

    @property
    def acceptance(self) -> float:
        """Share of compared tokens of the draft model (without one: of the free drafters) that were right lately."""
        if self._asked or (self._has_draft and not self._proposed):
            return self._acceptance["draft"].mean
        return max(self._acceptance["lookup"], self._acceptance["suffix"], key=lambda one: one.seen).mean

    @property
    def reason(self) -> str:
        """Why speculation is off, in one plain sentence with figures; "" while it is on."""
        if self._plan.depth > 0 or self._on or self._last_use <= _RECENT:
            return ""
        if self._times is None or self._costs is None:
            return "" if self._fixed else self._uncalibrated
        if not self._asked and not self._proposed:
            return "off: nothing in this text repeats" if self._written else ""
        if self._asked and self._catch_up:
            return f"off: the draft model would take {self._catch_up / 1e3:.1f} s to read the text first"
        draft = self._draft.ms if self._asked else 0.0
        best = self._best(self._max_depth).rate if self._asked and self._max_depth else 0.0
        return why_off(
            self._times.ms[0],
            draft,
            best,
            self._limit_gain(1.0),
            self.acceptance,
            has_draft=self._asked,
            known=self._acceptance["draft"].seen >= _SHORT,
        )
