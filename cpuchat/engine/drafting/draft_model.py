"""Drafts with a small model that has the target's vocabulary: when, and how far.

After a verify pass it reads only the target's own token and at most one drafted token. Drafts are greedy whatever the
sampling settings are, because the target's sampler decides anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from time import perf_counter
from typing import Final, TypeVar

import numpy as np

from cpuchat.base.text import common_prefix
from cpuchat.engine.llama.sequence import Sequence
from cpuchat.speculation.depth.controller import DepthController
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, UNKNOWN, Proposal

_READ_ROWS: Final = MAX_DEPTH + 1
"""Tokens per batch when each needs a row of logits."""
_UNREADABLE: Final = 0
"""Replacement for tokens that only the target has."""


class DraftModel:
    """Drafts with a second model, which must be able to roll back.

    Reading a whole text may cost more than it gains, or exceed the context: the sequence may hold only its end, from
    `_start` on. `n_vocab`: ids that both models have; others are never proposed. `follows`: a head follows what the
    model evaluates, which costs a little of each pass. `passes`: evaluations of the model so far."""

    rereads = False
    """It reads again what it has drafted and was accepted."""

    def __init__(self, sequence: Sequence, n_vocab: int) -> None:
        self.sequence = sequence
        self._n_vocab = n_vocab
        self._text: list[int] = []
        self.follows = True
        self._start = 0
        self._synced = 0  # tokens of the sequence that are the text's
        self.passes = 0

    @property
    def n_unread(self) -> int:
        return len(self._text) - self._start - self._synced

    @property
    def n_unread_from_start(self) -> int | None:
        """Return the tokens to read to have the text from its beginning; None when it has it, or has no room for it."""
        if not self._start or len(self._text) > self.sequence.n_ctx // 2:
            return None
        return len(self._text)

    def begin_answer(self, text: Tokens[int]) -> None:
        """Begin an answer to `text`. What the sequence holds of it stays."""
        self._text = self._readable(text)
        held = self.sequence.tokens
        if self._start and held[:64] != self._text[self._start : self._start + min(64, len(held))]:
            self._start = 0
        self._synced = common_prefix(held, self._text[self._start :])
        if self._start and not self._synced:
            self._start = 0

    def append(self, tokens: Tokens[int]) -> None:
        """Add tokens that were written. Tokens that it drafted itself are in the sequence already."""
        held = self.sequence.tokens
        at = self._start + self._synced
        self._text.extend(self._readable(tokens))
        if at + len(tokens) >= len(self._text):  # else it lags behind, and holds nothing after that
            while self._synced < len(held) and at < len(self._text) and held[self._synced] == self._text[at]:
                self._synced += 1
                at += 1

    def _readable(self, tokens: Tokens[int]) -> list[int]:
        """Replace tokens that only the target's vocabulary has, which llama.cpp would reject."""
        n_vocab = self.sequence.n_vocab
        return [token if token < n_vocab else _UNREADABLE for token in tokens]

    def end_answer(self) -> None:
        """End an answer."""

    def restart(self, n: int) -> None:
        """Clear the sequence and continue from the last `n` tokens of the text, unread."""
        self.sequence.clear()
        self._synced = 0
        self._start = max(len(self._text) - max(n, 1), 0)

    def propose(self, max_n: int) -> Proposal:
        """Draft at most `max_n` tokens; reads first what is unread. Raises as `Sequence.extend`."""
        proposal = Proposal("draft")
        if max_n <= 0 or not self._text or not self._is_ready():
            return proposal
        self._synced = min(self._synced, len(self._text) - self._start - 1)  # the last token gives the logits
        self._drop_rejected(max_n)
        pending = self._text[self._start + self._synced :]
        row = self._step(pending[0]) if len(pending) == 1 else self._extend(pending, n_outputs=1)
        assert row is not None
        self._synced = len(self.sequence)
        while True:
            token = int(row[: self._n_vocab].argmax())
            proposal.tokens.append(token)
            proposal.buckets.append(UNKNOWN)
            if len(proposal) >= max_n:
                return proposal
            row = self._step(token)

    def read(self, n: int) -> int:
        """Read the next `n` tokens of the text in large batches; returns how many that were. The newest token is left
        for `propose`, and of a text longer than the context only the end is read. Raises as `Sequence.extend`."""
        if not self._is_ready():
            return 0
        self._drop_rejected(0)
        before = self._synced
        at = self._start + before
        try:
            self._extend(self._text[at : at + min(n, self.n_unread - 1)], n_outputs=0)
        finally:
            self._synced = min(max(self._synced, len(self.sequence)), len(self._text) - self._start)
        return self._synced - before

    def score(self, n: int) -> list[bool]:
        """Read the next `n` tokens; returns for each whether the one after it would have been drafted: the acceptance,
        without having drafted anything. The newest token is left for `propose`. Raises as `Sequence.extend`."""
        accepted: list[bool] = []
        if not self._is_ready():
            return accepted
        try:
            self._drop_rejected(0)
            n = min(n, self.n_unread - 1)
            while n > 0:
                at = self._start + self._synced
                batch = self._text[at : at + min(n, _READ_ROWS, self.sequence.n_batch)]
                self._evaluate(batch, len(batch))
                self._synced += len(batch)
                n -= len(batch)
                for i in range(len(batch)):
                    row = self.sequence.logits(i)[: self._n_vocab]
                    accepted.append(int(row.argmax()) == self._text[at + i + 1])
        finally:
            self._synced = min(self._synced, len(self.sequence))
        return accepted

    def _is_ready(self) -> bool:
        """Return whether it can read and draft now."""
        return True

    def _drop_rejected(self, max_n: int) -> None:
        """Roll back rejected tokens, and make room for `max_n` more."""
        sequence = self.sequence
        if len(self._text) - self._start + max_n > sequence.n_ctx:
            self.restart(sequence.n_ctx // 2)
        if len(sequence) > self._synced:
            self._synced = sequence.truncate(self._synced)

    def _step(self, token: int) -> np.ndarray:
        self.passes += 1
        return self.sequence.step(token)

    def _evaluate(self, tokens: list[int], n_outputs: int) -> None:
        """Evaluate the next tokens in one batch; the last `n_outputs` get a row of logits."""
        self.passes += 1
        self.sequence.extend(tokens, n_outputs=n_outputs)

    def _extend(self, tokens: list[int], n_outputs: int) -> np.ndarray | None:
        """Evaluate any number of tokens; returns the logits after the last one if `n_outputs`."""
        size = self.sequence.n_ubatch
        for i in range(0, len(tokens), size):
            self._evaluate(tokens[i : i + size], n_outputs if i + size >= len(tokens) else 0)
        return self.sequence.logits(-1) if n_outputs and tokens else None


T = TypeVar("T")


_MAX_SCORED: Final = 32
"""Tokens at the end of a long text that are scored while it is read: rows of logits cost more than reading."""
_REST: Final = 3
"""Plain passes between two explorations of a draft model that is off; more would cost more than a late start."""


class ModelDrafting:
    """Drafts with a `drafter` as the controller plans it. `seconds`: time in this answer that the target waited
    for it. `unread`: tokens of the text that it had to read first when it was asked last."""

    def __init__(self, draft: DraftModel, controller: DepthController) -> None:
        self.drafter = draft
        self.controller = controller
        self.begin_answer(())

    def begin_answer(self, text: Tokens[int]) -> None:
        self.seconds = 0.0
        self.unread = 0
        self._wait_ms = 0.0  # since the last pass
        self._rest_steps = 0
        self._passes_before = self.drafter.passes
        self.drafter.begin_answer(text)

    @property
    def passes(self) -> int:
        return self.drafter.passes - self._passes_before

    def propose(self, room: int) -> Proposal | None:
        """Return a draft of at most `room` tokens; None: no draft now. Raises as `Sequence.extend`."""
        draft, from_start = self.drafter, self.drafter.n_unread_from_start
        room = min(room, draft.sequence.max_draft)
        if self._rest_steps:
            self._rest_steps -= 1
            return None
        depth = 0
        if from_start is not None:  # it has followed only the end of the text; once it is worth it, it reads all
            self.unread = from_start
            depth = self.controller.plan_draft(room, from_start)
            if depth:
                draft.restart(from_start)
        if not depth:
            self.unread = draft.n_unread
            depth = self.controller.plan_draft(room, self.unread)
        if depth < 1:
            n = self.controller.shadow_budget(draft.n_unread)
            if n <= 0:
                self._rest_steps = _REST
                return None
            if n < draft.n_unread - 1:
                draft.restart(n + 1)
            waited = self._wait_ms
            self._read(n, is_shadow=True)
            self._wait_ms = waited  # this has its own budget
            return None
        # Fewer are read together with the first drafted token.
        if draft.n_unread > (MAX_DEPTH + 1 if draft.rereads else 2):
            self._read(draft.n_unread, is_shadow=False)
        proposal = self._timed(lambda: draft.propose(depth))
        return proposal if proposal.tokens else None

    def _timed(self, work: Callable[[], T]) -> T:
        start = perf_counter()
        try:
            return work()
        finally:
            took = perf_counter() - start
            self.seconds += took
            self._wait_ms += 1e3 * took

    def take_wait_ms(self) -> float:
        """Return the ms that the target has waited since the last pass: a cost of the next one."""
        waited, self._wait_ms = self._wait_ms, 0.0
        return waited

    def _read(self, n: int, *, is_shadow: bool) -> None:
        """Let the draft model read `n` tokens and score what it would have drafted after the newest of them."""
        draft, before = self.drafter, self.seconds
        n = min(n, draft.n_unread - 1)
        unscored = self._timed(lambda: draft.read(n - _MAX_SCORED)) if n > _MAX_SCORED else 0
        accepted = self._timed(lambda: draft.score(min(n, _MAX_SCORED)))
        self.controller.record_read(unscored + len(accepted), 1e3 * (self.seconds - before), is_shadow=is_shadow)
        if accepted:
            self.controller.record_scores("draft", [UNKNOWN] * len(accepted), accepted)
