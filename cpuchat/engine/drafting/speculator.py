"""Who drafts next, and how much: the drafters of one loaded model and the controller over them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from time import perf_counter
from typing import Final, TypeVar

from cpuchat.engine.drafting.draft_model import DraftModel
from cpuchat.engine.drafting.overlap import DraftThread
from cpuchat.protocol import Speculation
from cpuchat.speculation.depth.controller import DepthController, Plan
from cpuchat.speculation.depth.costs import PassCosts
from cpuchat.speculation.depth.reason import UNCALIBRATED
from cpuchat.speculation.drafters.cascade import Cascade
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, UNKNOWN, Drafter, Proposal
from cpuchat.speculation.drafters.lookup import PromptLookup
from cpuchat.speculation.drafters.suffix import SuffixDecoding
from cpuchat.speculation.stats import SpeculationStats
from cpuchat.timings import SpeculationFigures

T = TypeVar("T")

_SCORED: Final = 32
"""Of a long text that the draft model reads, only its end is scored: rows of logits cost more than reading."""

LEAST_PLAIN_MS: Final = 2.0
"""Asking for drafts, choosing tokens from several rows and the bookkeeping take 0.1 to 0.3 ms for a pass. A toy model
whose step takes little longer cannot gain."""
LOOKING_SHARE: Final = 0.01
"""Of the time of plain steps that may be spent on finding out whether to draft."""
_REST: Final = 3
"""While the draft model is off, thinking about it at every token would cost more than a later start."""


class Speculator:
    """Proposes drafts for one answer after the other and learns from what became of them.

    The free drafters (suffix decoding, prompt lookup) are asked first; the draft model drafts when they have nothing
    that is worth a pass. The controller decides what is worth it.

    Args:
        costs: measured; None when there was no calibration.
        draft: the draft model, if one is loaded; `thread` if it has cores of its own.
        max_depth: longest draft that the target can verify and take back; 0 means never to draft.
        reason: why it is 0, in one plain sentence.
        uncalibrated: why there are no costs, in another.

    Attributes:
        seconds: time in this answer that went by waiting for the draft model.
    """

    def __init__(
        self,
        costs: PassCosts | None,
        draft: DraftModel | None = None,
        thread: DraftThread | None = None,
        *,
        max_depth: int = MAX_DEPTH,
        reason: str = "",
        uncalibrated: str = UNCALIBRATED,
    ) -> None:
        self._draft = draft
        self._thread = thread
        self._reason = self.why_not = reason
        self._plain_ms = costs.verify_ms[0] if costs is not None else None
        self._controller = DepthController(
            costs, max_depth=max_depth, has_draft_model=draft is not None, uncalibrated=uncalibrated
        )
        self._max_depth = max_depth
        self.least_plain_ms = LEAST_PLAIN_MS
        self.looking_share = LOOKING_SHARE
        self._suffix = SuffixDecoding()
        self._lookup = PromptLookup()
        self._cascade: Cascade | None = None
        self._options = Speculation()
        self._uses_draft = False
        self._stats = SpeculationStats()
        self.seconds = 0.0
        self._resting = 0  # plain steps before the draft model is thought of again
        self._quiet_ms, self._quiet_n = 0.0, 0  # plain steps that were not looked at one by one
        self._draft_ms = 0.0  # what was waited for since the last pass
        self._passes_before = 0  # of the draft model, when the answer began
        self._ahead_of: list[int] | None = None  # the block that the draft model goes on from meanwhile
        self._ready: list[int] = []  # drafted ahead, and the assumption was right
        self._overlaps = False

    def remember(self, text: Tokens[int]) -> None:
        """Another chat's text, for suffix decoding across chats."""
        self._suffix.remember(text)

    def forget(self, *, current: bool) -> None:
        """Forget what `remember` was told; with `current` also the text of the last answer."""
        self._suffix.forget()
        if current:
            for drafter in (self._suffix, self._lookup, self._draft):
                if drafter is not None:
                    drafter.begin(())

    def begin(self, options: Speculation, text: Tokens[int]) -> bool:
        """An answer to `text` begins; False when nothing is to be drafted, and `why_not` tells if it could be."""
        self._options = options
        self._stats = SpeculationStats()
        self._uses_draft = self._draft is not None and "draft" in options.drafters
        self._suffix.use_remembered = options.across_chats
        known: tuple[Drafter, ...] = (self._suffix, self._lookup)
        free = [d for d in known if d.name in options.drafters]
        self._cascade = Cascade(free, self._controller.free_depth) if free and self._max_depth else None
        self._resting = 0
        self._quiet_ms, self._quiet_n = 0.0, 0
        self._overlaps = False
        self._controller.begin(fixed=min(options.depth, self._max_depth))
        if self._cascade is not None:
            self._cascade.begin(text)
        self.seconds = self._draft_ms = 0.0
        if self._uses_draft and self._draft is not None:
            self._passes_before = self._draft.passes
            self._draft.begin(text)
        wanted = self._uses_draft or bool(free)
        self.why_not = (self._reason or self._too_fast(options)) if wanted else ""
        return wanted and not self.why_not

    @property
    def is_adaptive(self) -> bool:
        """It looks for drafts only as far as that pays."""
        return not self._options.depth

    def _too_fast(self, options: Speculation) -> str:
        """Why a model this quick is left alone; "" if it is not, or the user wants a fixed depth."""
        plain = self._plain_ms
        if options.depth or plain is None or plain >= self.least_plain_ms:
            return ""
        return f"off: a token takes this model {plain:.2g} ms, and drafting takes as long"

    def append(self, tokens: Tokens[int]) -> None:
        """These were written."""
        if self._cascade is not None:
            self._cascade.append(tokens)
            for drafter, grades, right in self._cascade.scores():
                self._controller.scored(drafter, grades, right)
        if self._uses_draft and self._draft is not None:
            ahead = self._take_ahead(tokens)
            self._draft.append(tokens)
            self._ready = ahead[1:] if ahead and ahead[0] == tokens[-1] else []

    def _take_ahead(self, tokens: Tokens[int]) -> list[int]:
        """What was drafted ahead, if the block that it goes on from was accepted."""
        block, self._ahead_of = self._ahead_of, None
        if block is None or self._thread is None:
            return []
        thread, is_right = self._thread, list(tokens[:-1]) == block
        return self._timed(lambda: thread.take(is_right))

    def verifying(self, proposal: Proposal) -> None:
        """The target begins to verify `proposal`; with cores of its own, the draft model goes on meanwhile."""
        if self._thread is not None and self._overlaps and proposal.drafter == "draft":
            self._ahead_of = proposal.tokens
            depth = self._controller.plan.depth
            self._thread.draft_ahead(proposal.tokens, depth, self._options.min_probability)

    def end(self) -> None:
        """The answer is over: what comes next, a prompt or an answer without drafts, computes on all cores."""
        self._ahead_of, self._ready = None, []
        if self._thread is not None:
            self._thread.drop()
            if not self._thread.always:
                self._thread.switch(False)

    def propose(self, room: int) -> Proposal | None:
        """A draft of at most `room` tokens to verify now; None: decode the next token without one.

        Raises:
            Aborted, GenerationFailed: the draft model was stopped, or failed.
        """
        room = min(room, self._max_depth)
        if room < 1:
            return None
        if self._cascade is not None:
            proposal = self._cascade.propose(room, self._options.min_probability)
            if proposal:
                return proposal
        if not self._uses_draft or self._draft is None:
            return None
        return self._from_model(self._draft, room)

    def _from_model(self, draft: DraftModel, room: int) -> Proposal | None:
        if self._resting:
            self._resting -= 1
            return None
        plan = self._plan(draft, room)
        if self._thread is not None:
            # Cores that were named for the draft model are its own whatever was measured.
            self._overlaps = plan.overlap or (self._thread.always and bool(self._options.depth))
            if not self._thread.always:
                self._thread.switch(plan.overlap)
        if plan.depth < 1:
            if not self._listen(draft):
                self._resting = _REST
            return None
        ready, self._ready = self._ready[: plan.depth], []
        if ready:
            return Proposal("draft", ready, [UNKNOWN] * len(ready))
        if draft.lag > 2:  # less than that is read together with the first drafted token
            self._read(draft, draft.lag)
        proposal = self._run(lambda: draft.propose(plan.depth, self._options.min_probability))
        return proposal if proposal.tokens else None

    def _plan(self, draft: DraftModel, room: int) -> Plan:
        if draft.lag_of_all is not None:
            # It was listening to the end of the text only. Once it is worth it, it reads all.
            plan = self._controller.draft_plan(room, draft.lag_of_all)
            if plan.depth:
                draft.restart(draft.lag_of_all)
                return plan
        return self._controller.draft_plan(room, draft.lag)

    def _run(self, work: Callable[[], T]) -> T:
        """Work of the draft model, on the thread that its cores belong to."""
        thread = self._thread
        return self._timed(work if thread is None else lambda: thread.run(work))

    def _timed(self, work: Callable[[], T]) -> T:
        """What the target waits for is the cost of the next pass, whatever becomes of it."""
        began = perf_counter()
        try:
            return work()
        finally:
            took = perf_counter() - began
            self.seconds += took
            self._draft_ms += 1e3 * took
            self._stats.draft_ms += 1e3 * took

    def _listen(self, draft: DraftModel) -> bool:
        """While the draft model is off: now and then see what it would have been worth. Whether it did."""
        n = self._controller.shadow_budget(draft.lag)
        if n <= 0:
            return False
        if n < draft.lag - 1:
            draft.restart(n + 1)
        waited = self._draft_ms
        self._read(draft, n)
        self._draft_ms = waited  # this is paid from a budget of its own
        return True

    def _read(self, draft: DraftModel, n: int) -> None:
        """Let it read `n` tokens; what it would have said to the newest of them tells what it is worth."""
        before = self.seconds
        n = min(n, draft.lag - 1)
        unscored = self._run(lambda: draft.read(n - _SCORED)) if n > _SCORED else 0
        right = self._run(lambda: draft.score(min(n, _SCORED)))
        self._controller.read(unscored + len(right), 1e3 * (self.seconds - before))
        if right:
            self._controller.scored("draft", [UNKNOWN] * len(right), right)

    def plain(self, ms: float, *, is_known: bool = True) -> None:
        """One token was decoded without a draft and took `ms`. Not `is_known`: nobody asked for a draft."""
        self._stats.plain()
        if not is_known:
            self._quiet_ms += ms
            self._quiet_n += 1
            return
        if self._quiet_n:  # steps in peace tell better what plain decoding costs than the one after looking for a draft
            ms, self._quiet_ms, self._quiet_n = self._quiet_ms / self._quiet_n, 0.0, 0
        draft_ms, self._draft_ms = self._draft_ms, 0.0
        if draft_ms:  # the draft model was asked and had nothing to offer
            overlap = self._overlaps
            self._controller.verified(Proposal("draft"), 0, ms, draft_ms=draft_ms, overlap=overlap)
        else:
            self._controller.plain(ms)

    def verified(self, proposal: Proposal, accepted: int, compared: int, ms: float) -> None:
        """A pass over 1 + len(proposal) tokens took `ms`: of `compared` drafted tokens `accepted` were right."""
        self._stats.verified(proposal.drafter, len(proposal), accepted)
        draft_ms, self._draft_ms = self._draft_ms, 0.0
        split = self._thread is not None and self._thread.is_on and not self._thread.always
        overlap = split or (proposal.drafter == "draft" and self._overlaps)
        self._controller.verified(proposal, accepted, ms, compared=compared, draft_ms=draft_ms, overlap=overlap)

    def figures(self) -> SpeculationFigures:
        """This answer so far."""
        controller, plan = self._controller, self._controller.plan
        draft = self._draft if self._uses_draft else None
        return self._stats.figures(
            depth=controller.depth,
            overlap=self._overlaps and plan.depth > 0,
            draft_passes=draft.passes - self._passes_before if draft is not None else 0,
            plain_ms=controller.plain_ms,
            reason=self.why_not or controller.reason,
        )
