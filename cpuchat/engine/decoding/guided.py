"""Samples an answer that may reason first, for a limited number of tokens, and then match a grammar, all of it or the
calls of tools in it.

The sampled token is checked first, and only if the grammar rejects it is another one sampled from those allowed, as in
llama.cpp (common/sampling.cpp). Reasoning, and the markers around it, come before the grammar; at the end of its budget
the tokens that close it follow, whatever the model would write. Nothing is ever rolled back: drafted tokens are
accepted one by one, after their check.
"""

from __future__ import annotations

import codecs
from collections import deque
from typing import Final

import numpy as np

from cpuchat.engine.decoding.call_guide import CallGuide
from cpuchat.engine.decoding.grammar import Grammar
from cpuchat.engine.decoding.sampling import Candidates, Row, Sampler, largest
from cpuchat.engine.llama.vocab import Vocab
from cpuchat.engine.text.reasoning import ReasoningSplitter
from cpuchat.errors import GrammarUnmet
from cpuchat.protocol import Sampling

_STAGES: Final = (64, 1024)
"""Most likely tokens that are checked before the whole vocabulary is: 150,000 take 10 to 20 ms."""


class GuidedSampler(Sampler):
    """Samples tokens for reasoning within a budget, and for an answer that a grammar allows.

    Args:
        grammar: GBNF; "": none.
        calls: has the grammar of the calls in an answer without a grammar; None: there are none.
        budget: most tokens of reasoning; None: no limit.

    Raises:
        UsageError: as `Sampler` and `Grammar`.
    """

    def __init__(
        self, sampling: Sampling, vocab: Vocab, grammar: str = "", budget: int | None = None,
        calls: CallGuide | None = None, banned: tuple[int, ...] = (),
    ) -> None:  # fmt: skip
        super().__init__(sampling, vocab.n_tokens, banned)
        self._vocab = vocab
        self._grammar = Grammar(vocab, grammar) if grammar else None
        self._calls = calls if self._grammar is None else None
        self._budget = budget
        self._prelude: ReasoningSplitter | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_reasoned = 0
        self._must_answer = False
        self._forced: deque[int] = deque()
        self._resampling = False

    def begin(self, splitter: ReasoningSplitter) -> None:
        """Let the answer begin as `splitter`, which has seen the prompt, expects it: it may reason first."""
        self._prelude = splitter
        self._limit_reasoning(splitter)

    def end_reasoning(self) -> None:
        """End the reasoning with its next token. From any thread."""
        self._must_answer = True

    @property
    def matches_grammar(self) -> bool:
        """Whether the text is complete under the grammar of the answer, or there is none."""
        if self._grammar is None or self._calls is not None:
            return True
        reasons = self._prelude is not None and self._prelude.in_reasoning
        return not reasons and self._grammar.is_complete()

    def sample(self, row: Row) -> int:
        """Return the next token, as `Sampler.sample`.

        Raises:
            GrammarUnmet: no token of the vocabulary can continue the text.
        """
        if self._forced:
            return self._forced[0]
        token = super().sample(row)
        if self._grammar is None or self._is_prelude(token):
            return self._answer_after_all(token)
        if self._grammar.allows(token):
            return token
        self._resampling = True
        try:
            return super().sample(row)
        finally:
            self._resampling = False

    def _answer_after_all(self, token: int) -> int:
        """Return `token`, unless it would end the reasoning without the answer that the grammar describes."""
        prelude = self._prelude
        if self._grammar is not None and prelude is not None and prelude.in_reasoning and self._vocab.is_eog(token):
            self._must_answer = True
            self._limit_reasoning(prelude)
        return self._forced[0] if self._forced else token

    def accept(self, token: int) -> None:
        """Add `token` to the text that penalties and the grammar apply to."""
        super().accept(token)
        if self._forced:
            self._forced.popleft()
        if self._prelude is not None and self._is_prelude(token):
            self._extend_prelude(self._prelude, token)
            return
        self._prelude = None
        if self._grammar is not None:
            self._grammar.accept(token)
        elif self._calls is not None:
            self._grammar = self._calls.follow(token)

    def _is_prelude(self, token: int) -> bool:
        """Return whether `token` belongs to the reasoning or what marks it, or, without a grammar, may do so."""
        prelude = self._prelude
        if prelude is None or prelude.in_reasoning or self._grammar is None:
            return prelude is not None
        vocab = self._vocab
        text = vocab.piece(token).decode("utf-8", "replace")
        return bool(text) and not vocab.is_eog(token) and prelude.awaits(text, is_marker=token in vocab.markers)

    def _extend_prelude(self, prelude: ReasoningSplitter, token: int) -> None:
        pieces = prelude.feed(self._decoder.decode(self._vocab.piece(token)))
        if prelude.in_reasoning:
            self._n_reasoned += 1
            self._limit_reasoning(prelude)
        if not prelude.in_answer:
            return
        # The token that ends the reasoning holds the beginning of the answer, too.
        self._prelude = None
        rest = "".join(text for channel, text in [*pieces, *prelude.flush()] if channel == "answer")
        if self._grammar is None:
            if self._calls is not None:
                self._grammar = self._calls.follow_text(rest)
            return
        for part in self._vocab.spell(rest.encode()):
            if not self._grammar.allows(part):
                raise GrammarUnmet("The text after the model's reasoning does not match the grammar.", "Ask again.")
            self._grammar.accept(part)

    def _limit_reasoning(self, prelude: ReasoningSplitter) -> None:
        """Close the reasoning, if the model is at it, when its budget is used up or the user wants the answer."""
        is_over = self._must_answer or (self._budget is not None and self._n_reasoned >= self._budget)
        if is_over and prelude.in_reasoning and not self._forced:
            tokens = self._vocab.tokenize(f"\n{prelude.transition}".encode(), add_special=False)
            if not any(map(self._vocab.is_eog, tokens)):
                self._forced.extend(tokens)

    def _filtered(self, row: Row) -> Candidates:
        if not self._resampling or self._grammar is None:
            return super()._filtered(row)
        for n in _STAGES:
            if n >= row.size:
                break
            ids = largest(row, n)
            found = self._of_largest(row, ids[self._grammar.allowed(ids)].tolist(), row.item(ids[-1]))
            if found is not None:
                return found
        masked = np.where(self._grammar.allowed(np.arange(row.size)), row, np.float32(-np.inf))
        if np.isneginf(masked.max()):
            raise GrammarUnmet(
                "No token of this model's vocabulary can continue the answer under the grammar.",
                "Allow other characters, or choose another model.",
            )
        return super()._filtered(masked)

    def _of_largest(self, row: Row, ids: list[int], limit: float) -> Candidates | None:
        """Return the candidates if they are among `ids`, descending; None when others could be, below `limit`."""
        if not ids:
            return None
        if self._greedy:
            return ids[:1], [1.0]
        if self._shortlist is None:
            return None
        ids = ids[: self._shortlist.k]
        logits = row[ids].tolist()
        return self._cut(ids, logits, limit, logits[0])
