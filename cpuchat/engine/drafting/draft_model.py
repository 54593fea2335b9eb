"""Drafts with a small model that has the target's vocabulary.

Its KV cache is kept for what was accepted: after a verify pass it reads only the target's own token and at most one
drafted token. Drafts are greedy whatever the sampling settings are, because the target's sampler decides anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Final

import numpy as np

from cpuchat.engine.llama.sequence import Sequence
from cpuchat.prefix import common_prefix
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, UNKNOWN, Proposal, confidence_bucket
from cpuchat.timings import DrafterName

_READ_ROWS: Final = MAX_DEPTH + 1
"""Tokens per batch when each needs a row of logits."""
_MARGIN: Final = np.float32(12.0)
_UNREADABLE: Final = 0
"""Replacement for tokens that only the target has."""


class DraftModel:
    """Drafts with a second model. Implements `speculation.drafters.drafter.Drafter`.

    The text may be longer than the model's context, and reading all of it may cost more than it gains: the sequence
    may hold only the end of the text, from `_start` on.

    Args:
        sequence: of the draft model; it must be able to roll back.
        n_vocab: ids that both models have; others are never proposed.

    Attributes:
        passes: evaluations of the model so far, each of which reads all its weights.
    """

    name: DrafterName = "draft"

    def __init__(self, sequence: Sequence, n_vocab: int) -> None:
        self._sequence = sequence
        self._n_vocab = n_vocab
        self._text: list[int] = []
        self._start = 0
        self._synced = 0  # tokens of the sequence that are the text's
        self.passes = 0

    @property
    def n_unread(self) -> int:
        """Return the number of unread tokens of the text."""
        return len(self._text) - self._start - self._synced

    @property
    def n_unread_from_start(self) -> int | None:
        """Return the tokens to read to have the text from its beginning; None when it has it, or has no room for it."""
        if not self._start or len(self._text) > self._sequence.n_ctx // 2:
            return None
        return len(self._text)

    def begin_answer(self, text: Tokens[int]) -> None:
        """Implement `Drafter.begin_answer`. What the sequence holds of it stays."""
        self._text = self._readable(text)
        held = self._sequence.tokens
        if self._start and held[:64] != self._text[self._start : self._start + min(64, len(held))]:
            self._start = 0
        self._synced = common_prefix(held, self._text[self._start :])
        if self._start and not self._synced:
            self._start = 0

    def append(self, tokens: Tokens[int]) -> None:
        """Implement `Drafter.append`. Tokens that it drafted itself are in the sequence already."""
        held = self._sequence.tokens
        at = self._start + self._synced
        self._text.extend(self._readable(tokens))
        if at + len(tokens) >= len(self._text):  # else it lags behind, and holds nothing after that
            while self._synced < len(held) and at < len(self._text) and held[self._synced] == self._text[at]:
                self._synced += 1
                at += 1

    def _readable(self, tokens: Tokens[int]) -> list[int]:
        """Replace tokens that only the target's vocabulary has, which llama.cpp would reject."""
        n_vocab = self._sequence.n_vocab
        return [token if token < n_vocab else _UNREADABLE for token in tokens]

    def restart(self, n: int) -> None:
        """Clear the sequence and continue from the last `n` tokens of the text, unread."""
        self._sequence.clear()
        self._synced = 0
        self._start = max(len(self._text) - max(n, 1), 0)

    def propose(self, max_n: int, min_probability: float = 0.0) -> Proposal:
        """Implement `Drafter.propose`; reads first what is unread.

        Raises:
            Aborted, GenerationFailed: as `Sequence.extend`.
        """
        proposal = Proposal("draft")
        if max_n <= 0 or not self._text:
            return proposal
        row = self._catch_up(max_n)
        tokens, buckets = proposal.tokens, proposal.buckets
        while True:
            row = row[: self._n_vocab]
            token = int(row.argmax())
            if min_probability > 0:
                share = _share(row, row[token])
                if share < min_probability:
                    break
                buckets.append(confidence_bucket(share))
            else:
                buckets.append(UNKNOWN)
            tokens.append(token)
            if len(tokens) >= max_n:
                break
            row = self._step(token)
        return proposal

    def draft_ahead(self, drafted: list[int], n: int, min_probability: float, is_over: Callable[[], bool]) -> list[int]:
        """Continue after a draft that is not verified yet: at most `n` tokens, fewer when `is_over`.

        The first one is a guess of what the target will add, the others are a draft as from `propose`. The text stays
        as it is; `append` finds out how much of this was accepted.

        Raises:
            Aborted, GenerationFailed: as `Sequence.extend`.
        """
        sequence, tokens = self._sequence, []
        at = len(self._text) - self._start + len(drafted) - 1  # place of the last drafted token
        if not drafted or at + n > sequence.n_ctx:
            return []
        sequence.truncate(at)  # a draft that ended early, or was cut, may have been read further
        token = drafted[-1]
        while len(tokens) < n and not is_over():
            row = self._step(token)[: self._n_vocab]
            token = int(row.argmax())
            if tokens and min_probability > 0 and _share(row, row[token]) < min_probability:
                break
            tokens.append(token)
        return tokens

    def read(self, n: int) -> int:
        """Read the next `n` tokens of the text in large batches; returns how many that were.

        The newest token is left for `propose`, and of a text that is longer than the context only the end is read.

        Raises:
            Aborted, GenerationFailed: as `Sequence.extend`.
        """
        self._drop_rejected(0)
        before = self._synced
        at = self._start + before
        try:
            self._extend(self._text[at : at + min(n, self.n_unread - 1)], n_outputs=0)
        finally:
            self._synced = min(max(self._synced, len(self._sequence)), len(self._text) - self._start)
        return self._synced - before

    def score(self, n: int) -> list[bool]:
        """Read the next `n` tokens; returns for each whether the one after it would have been drafted.

        One pass scores all of them: the acceptance that it would have had, without having drafted anything. The newest
        token of the text has no successor yet and is left for `propose`.

        Raises:
            Aborted, GenerationFailed: as `Sequence.extend`.
        """
        accepted: list[bool] = []
        try:
            self._drop_rejected(0)
            n = min(n, self.n_unread - 1)
            while n > 0:
                at = self._start + self._synced
                batch = self._text[at : at + min(n, _READ_ROWS, self._sequence.n_batch)]
                self.passes += 1
                self._sequence.extend(batch, n_outputs=len(batch))
                self._synced += len(batch)
                n -= len(batch)
                for i in range(len(batch)):
                    row = self._sequence.logits(i)[: self._n_vocab]
                    accepted.append(int(row.argmax()) == self._text[at + i + 1])
        finally:
            self._synced = min(self._synced, len(self._sequence))
        return accepted

    def _drop_rejected(self, max_n: int) -> None:
        """Roll back rejected tokens, and make room for `max_n` more."""
        sequence = self._sequence
        if len(self._text) - self._start + max_n > sequence.n_ctx:
            self.restart(sequence.n_ctx // 2)
        if len(sequence) > self._synced:
            self._synced = sequence.truncate(self._synced)

    def _catch_up(self, max_n: int) -> np.ndarray:
        """Read the rest of the text; returns the logits after it."""
        sequence = self._sequence
        self._synced = min(self._synced, len(self._text) - self._start - 1)  # the last token gives the logits
        self._drop_rejected(max_n)
        pending = self._text[self._start + self._synced :]
        row = self._step(pending[0]) if len(pending) == 1 else self._extend(pending, n_outputs=1)
        assert row is not None
        self._synced = len(sequence)
        return row

    def _step(self, token: int) -> np.ndarray:
        """Evaluate one token; returns the logits after it."""
        self.passes += 1
        return self._sequence.step(token)

    def _extend(self, tokens: list[int], n_outputs: int) -> np.ndarray | None:
        """Evaluate any number of tokens; returns the logits after the last one if `n_outputs`."""
        sequence = self._sequence
        size = min(sequence.n_batch, sequence.n_ubatch)
        for i in range(0, len(tokens), size):
            batch = tokens[i : i + size]
            is_last = i + size >= len(tokens)
            self.passes += 1
            sequence.extend(batch, n_outputs=n_outputs if is_last else 0)
        return sequence.logits(len(batch) - 1) if n_outputs and tokens else None


def _share(row: np.ndarray, peak: np.float32) -> float:
    """Return the probability of the largest entry, `peak`; entries too small to count are left out."""
    near = row[row > peak - _MARGIN]
    return 1.0 / float(np.exp(near - peak).sum())
