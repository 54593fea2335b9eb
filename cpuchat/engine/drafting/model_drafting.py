"""Decides when the draft model drafts, how far, and on which cores."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from time import perf_counter
from typing import Final, TypeVar

from cpuchat.engine.drafting.draft_model import DraftModel
from cpuchat.engine.drafting.overlap import DraftThread
from cpuchat.speculation.depth.choice import Plan
from cpuchat.speculation.depth.controller import DepthController
from cpuchat.speculation.drafters.drafter import UNKNOWN, Proposal

T = TypeVar("T")

_MAX_SCORED: Final = 32
"""Tokens at the end of a long text that are scored while the draft model reads it: rows of logits cost more than
reading.
"""
_REST: Final = 3
"""Plain passes between two explorations of a draft model that is off; more would cost more than a late start."""


class ModelDrafting:
    """Drafts with the draft model as the controller plans it.

    Args:
        thread: set if the draft model may have its own cores.

    Attributes:
        seconds: time in this answer that the target waited for the draft model.
        overlap: both models compute at the same time, as planned last.
        unread: tokens of the text that it had to read first when it was asked last.
    """

    def __init__(self, draft: DraftModel, thread: DraftThread | None, controller: DepthController) -> None:
        self._draft = draft
        self._thread = thread
        self.controller = controller
        self._begin(0.0)

    def _begin(self, min_probability: float) -> None:
        self._min_probability = min_probability
        self.seconds = 0.0
        self.overlap = False
        self.unread = 0
        self._wait_ms = 0.0  # since the last pass
        self._rest_steps = 0
        self._passes_before = self._draft.passes
        self._ahead_of: list[int] | None = None  # the block that is drafted on from meanwhile
        self._ready: list[int] = []  # drafted ahead, and the assumption held

    @property
    def passes(self) -> int:
        """Return the passes of the draft model in this answer."""
        return self._draft.passes - self._passes_before

    def begin_answer(self, text: Tokens[int], min_probability: float) -> None:
        """Begin an answer to `text`."""
        self._begin(min_probability)
        self._draft.begin_answer(text)

    def forget(self) -> None:
        """Forget the text of the last answer."""
        self._draft.begin_answer(())

    def append(self, tokens: Tokens[int]) -> None:
        """Append generated tokens."""
        ahead = self._take_ahead(tokens)
        self._draft.append(tokens)
        self._ready = ahead[1:] if ahead and ahead[0] == tokens[-1] else []

    def _take_ahead(self, tokens: Tokens[int]) -> list[int]:
        """Return what was drafted ahead, if the block before it was accepted."""
        block, self._ahead_of = self._ahead_of, None
        if block is None or self._thread is None:
            return []
        thread, is_accepted = self._thread, list(tokens[:-1]) == block
        return self._timed(lambda: thread.take(is_accepted))

    def start_verify(self, drafted: list[int]) -> None:
        """Draft ahead while the target verifies `drafted`, if both have their own cores."""
        if self._thread is not None and self.overlap:
            self._ahead_of = drafted
            self._thread.draft_ahead(drafted, self.controller.plan.depth, self._min_probability)

    def end_answer(self) -> None:
        """End the answer and return to the shared cores, which a prompt or an answer without drafts uses."""
        self._ahead_of, self._ready = None, []
        if self._thread is not None:
            self._thread.drop()
            if not self._thread.always:
                self._thread.switch(False)

    def propose(self, room: int, *, fixed_depth: bool) -> Proposal | None:
        """Return a draft of at most `room` tokens; None: no draft now.

        Raises:
            Aborted, GenerationFailed: the draft model was stopped, or failed.
        """
        draft, thread = self._draft, self._thread
        if self._rest_steps:
            self._rest_steps -= 1
            return None
        plan = self._plan(room)
        if thread is not None:
            # Cores that were named for the draft model are its own, whatever was measured.
            self.overlap = plan.overlap or (thread.always and fixed_depth)
            if not thread.always:
                thread.switch(plan.overlap)
        if plan.depth < 1:
            if not self._shadow_score():
                self._rest_steps = _REST
            return None
        ready, self._ready = self._ready[: plan.depth], []
        if ready:
            return Proposal("draft", ready, [UNKNOWN] * len(ready))
        if draft.n_unread > 2:  # fewer are read together with the first drafted token
            self._read(draft.n_unread, is_shadow=False)
        proposal = self._run(lambda: draft.propose(plan.depth, self._min_probability))
        return proposal if proposal.tokens else None

    def _plan(self, room: int) -> Plan:
        draft, from_start = self._draft, self._draft.n_unread_from_start
        if from_start is not None:  # it has followed only the end of the text; once it is worth it, it reads all
            self.unread = from_start
            plan = self.controller.plan_draft(room, from_start)
            if plan.depth:
                draft.restart(from_start)
                return plan
        self.unread = draft.n_unread
        return self.controller.plan_draft(room, self.unread)

    def _run(self, work: Callable[[], T]) -> T:
        """Run work of the draft model on the thread that owns its cores."""
        thread = self._thread
        return self._timed(work if thread is None else lambda: thread.run(work))

    def _timed(self, work: Callable[[], T]) -> T:
        start = perf_counter()
        try:
            return work()
        finally:
            took = perf_counter() - start
            self.seconds += took
            self._wait_ms += 1e3 * took

    def take_wait_ms(self) -> float:
        """Return the ms that the target has waited since the last pass: a cost of the next pass, whether accepted or
        not.
        """
        waited, self._wait_ms = self._wait_ms, 0.0
        return waited

    def _shadow_score(self) -> bool:
        """Occasionally score the draft model while it is off. Returns whether it did."""
        draft = self._draft
        n = self.controller.shadow_budget(draft.n_unread)
        if n <= 0:
            return False
        if n < draft.n_unread - 1:
            draft.restart(n + 1)
        waited = self._wait_ms
        self._read(n, is_shadow=True)
        self._wait_ms = waited  # this has its own budget
        return True

    def _read(self, n: int, *, is_shadow: bool) -> None:
        """Let the draft model read `n` tokens and score what it would have drafted after the newest of them."""
        draft, before = self._draft, self.seconds
        n = min(n, draft.n_unread - 1)
        unscored = self._run(lambda: draft.read(n - _MAX_SCORED)) if n > _MAX_SCORED else 0
        accepted = self._run(lambda: draft.score(min(n, _MAX_SCORED)))
        self.controller.record_read(unscored + len(accepted), 1e3 * (self.seconds - before), is_shadow=is_shadow)
        if accepted:
            self.controller.record_scores("draft", [UNKNOWN] * len(accepted), accepted)

    @property
    def has_split_cores(self) -> bool:
        """Return whether both models have their own cores; the target then computes on fewer, whichever drafter is
        used.
        """
        return self._thread is not None and self._thread.is_on and not self._thread.always
