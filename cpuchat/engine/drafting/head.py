"""Drafts with a head: a layer or two that predict further tokens from what the model has computed.

For the token at position p a head takes that token and the hidden state that the model had at p - 1, and predicts the
token at p + 1; further ahead it is fed its own hidden state. The model's hidden state is its last one (MTP, NextN:
DeepSeek-V3, arXiv 2412.19437, section 2.2), or is made from those of three layers (EAGLE-3, arXiv 2503.01840). A head
has a context of its own, with the KV cache of its own layers. (llama.cpp: src/models/qwen35.cpp, src/models/eagle3.cpp;
how rows and tokens are paired: common/speculative.cpp.)
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Tokens
from typing import Final

import numpy as np

from cpuchat.base.errors import GenerationFailed
from cpuchat.engine.drafting.draft_model import DraftModel
from cpuchat.engine.llama.head_sequence import HeadSequence
from cpuchat.engine.llama.sequence import Aborted, Sequence
from cpuchat.speculation.drafters.drafter import MAX_DEPTH

_KEPT: Final = 512
"""Hidden states of the newest tokens that are kept: what is further back while it is off, it never reads."""
_LONGEST_PASS: Final = MAX_DEPTH + 1
_READ_AFTER: Final = 256
"""Unread tokens of a prompt after which it reads them: every batch loads its weights once."""


class HiddenStates:
    """The model's hidden states of its newest tokens, by position: those of `first` to `end`."""

    def __init__(self, n_embd: int, n_batch: int) -> None:
        self._rows = np.empty((2 * _KEPT + n_batch, n_embd), np.float32)
        self._begin = 0  # row of the array that holds `first`
        self.first = self.end = 0

    def forget(self, at: int) -> None:
        """Begin at position `at`, with nothing known."""
        self.first = self.end = at
        self._begin = 0

    def put(self, at: int, rows: np.ndarray) -> None:
        """Keep the rows of the tokens from position `at` on, in place of what was known of them."""
        if not self.first <= at <= self.end:
            self.forget(at)
        n, held = len(rows), at - self.first
        if self._begin + held + n > len(self._rows):
            kept = min(held, _KEPT)
            start = self._begin + held - kept
            self._rows[:kept] = self._rows[start : start + kept].copy()
            self.first, self._begin, held = at - kept, 0, kept
        self._rows[self._begin + held : self._begin + held + n] = rows
        self.end = at + n

    def of(self, at: int, n: int) -> np.ndarray:
        """Return the rows of `n` tokens from position `at` on: a view of shape (n, n_embd)."""
        start = self._begin + at - self.first
        return self._rows[start : start + n]


class Head(DraftModel):
    """Drafts with a head of the model whose answers it is for.

    It knows the hidden states of what the model has evaluated since it was made (`observe`). Where some are missing,
    after a state was restored, it begins behind them: one layer above the hidden states of a whole model needs little
    of what is far. `sequence` is the head's, `target` the model's. While it `follows`, it keeps hidden states, and
    reads prompts beside the model."""

    rereads = True

    def __init__(self, sequence: HeadSequence, target: Sequence, n_vocab: int) -> None:
        super().__init__(sequence, n_vocab)
        self._head = sequence
        self._target = target
        self._known = HiddenStates(sequence.n_features, target.n_batch)
        sequence.read_from(target)
        target.on_evaluated = self.observe

    def observe(self, at: int, n: int) -> None:
        """Keep the hidden states of the `n` tokens that the model has just evaluated at `at`; 0: it has others."""
        if not n or not self.follows:
            return self._known.forget(at)
        self._known.put(at, self._head.features(self._target, n))
        if n > _LONGEST_PASS and at + n - self._start - len(self.sequence) >= _READ_AFTER:
            self.begin_answer(self._target.tokens)
            with contextlib.suppress(GenerationFailed):  # the answer does not need it
                self.read(len(self._target))
        return None

    @property
    def n_unread_from_start(self) -> int | None:
        """Return None: the hidden states of what it has not read are gone."""
        return None

    def begin_answer(self, text: Tokens[int]) -> None:
        super().begin_answer(text)
        self._begin_behind_unknown()

    def append(self, tokens: Tokens[int]) -> None:
        """Add tokens that were written. What it drafted is read again, with the model's hidden states for its own."""
        self._text.extend(self._readable(tokens))

    def restart(self, n: int) -> None:
        super().restart(n)
        self._begin_behind_unknown()

    @property
    def _is_blind(self) -> bool:
        """Return whether the hidden state before the newest token is unknown: the model has evaluated nothing since."""
        return not self._known.first < len(self._text) - 1 <= self._known.end

    def _is_ready(self) -> bool:
        if self._is_blind:
            return False
        self._begin_behind_unknown()
        return True

    def end_answer(self) -> None:
        """Read all that the model has evaluated, and drop what was not accepted: this is saved with its state."""
        if self.follows:
            self.begin_answer(self._target.tokens)
            if not self._is_blind:
                self._drop_rejected(0)
                with contextlib.suppress(Aborted, GenerationFailed):
                    self._extend(self._text[self._start + self._synced :], n_outputs=0)
                self._synced = len(self.sequence)

    def _begin_behind_unknown(self) -> None:
        """Let the sequence begin where the hidden states before its unread tokens are known."""
        first = self._known.first + 1 if self._known.first else 0
        at = self._start + self._synced
        if at < first - 1 and first < len(self._text):
            self.sequence.clear()
            self._start, self._synced = first, 0

    def _step(self, token: int) -> np.ndarray:
        at = self._start + len(self.sequence)
        if at < len(self._text):
            self._give_states(at, 1)
        else:
            self._head.states[0] = self._head.hidden_state()
        return super()._step(token)

    def _evaluate(self, tokens: list[int], n_outputs: int) -> None:
        self._give_states(self._start + len(self.sequence), len(tokens))
        super()._evaluate(tokens, n_outputs)

    def _give_states(self, at: int, n: int) -> None:
        """Set the states of a batch of the text's tokens from position `at` on: those before them. There is none before
        the first token, nor before the newest one after a state was restored: the next one's has to do."""
        states, known = self._head.states, self._known
        missing = int(at <= known.first)
        rows = self._head.states_of(known.of(at - 1 + missing, n - missing))
        states[missing:n] = rows
        if missing:
            states[0] = states[1] if at and n > 1 else 0.0
