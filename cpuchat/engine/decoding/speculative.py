"""Decodes an answer with drafts: the target verifies several tokens in one pass.

Exact-match verification (speculative decoding without rejection sampling): the target's own sampler chooses a token
from each row in order, and drafted tokens are accepted as long as they are the ones it chooses. With any sampling
settings the text is the one that plain decoding gives with the same seed, up to floating-point differences between a
pass over one token and one over several.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Final

import numpy as np

from cpuchat.engine.decoding.decode import DecodeResult, token_limit
from cpuchat.engine.decoding.sampling import Sampler
from cpuchat.engine.drafting.speculator import Speculator
from cpuchat.engine.llama.sequence import Aborted, Sequence
from cpuchat.engine.text.output_thread import ThreadedStream
from cpuchat.engine.text.text_stream import TextStream
from cpuchat.protocol import StopReason
from cpuchat.speculation.drafters.drafter import Proposal
from cpuchat.timings import SpeculationFigures

UPDATE_SECONDS: Final = 0.25
"""Seconds between two reports of the speculation figures."""


class SpeculativeDecoder:
    """Decodes one answer with drafts. A stop inside a draft ends the answer there; the rest of the draft is dropped.

    Args:
        speculator: has begun the answer with the prompt.
        on_update: called with (tokens written, figures) a few times a second.
    """

    def __init__(
        self,
        sequence: Sequence,
        sampler: Sampler,
        stream: TextStream | ThreadedStream,
        is_eog: Callable[[int], bool],
        max_tokens: int,
        speculator: Speculator,
        on_update: Callable[[int, SpeculationFigures], None],
    ) -> None:
        self._sequence = sequence
        self._sampler = sampler
        self._feed, self._finish = stream.feed, stream.finish
        self._is_eog = is_eog
        self._speculator = speculator
        self._on_update = on_update
        self._next_update = 0.0
        self._at_limit: StopReason
        self._limit, self._at_limit = token_limit(sequence, max_tokens)
        self._result = DecodeResult()
        self._tokens = self._result.tokens

    def run(self, row: np.ndarray) -> DecodeResult:
        """Decode as `decode.decode`, starting from `row`, the logits after the prompt.

        Raises:
            GenerationFailed: llama.cpp rejected a batch, or the logits are NaN or infinite; the text so far was
                emitted.
        """
        sequence, speculator, result = self._sequence, self._speculator, self._result
        n_prompt = len(sequence)
        sequence.decode_seconds = 0.0
        start = perf_counter()
        reason: StopReason | None = None
        try:
            reason = "cancelled" if sequence.abort.is_set() else self._take(self._sampler.sample(row), "")
            while reason is None:
                reason = self._next_pass()
        except Aborted:
            reason = "cancelled"
            sequence.truncate(n_prompt + len(self._tokens))  # an aborted pass may have left a part of its draft
        finally:
            speculator.end_answer()
            result.stop_reason = reason or "cancelled"
            result.overhead_seconds = perf_counter() - start - sequence.decode_seconds - speculator.seconds
            self._finish(perf_counter(), stopped=reason == "stop_string")
        return result

    def _take(self, token: int, drafter: str) -> StopReason | None:
        """Add the next token of the answer; returns why it is the last one, if it is."""
        if self._is_eog(token):
            return "end"
        self._sampler.accept(token)
        self._tokens.append(token)
        result = self._result
        result.last = perf_counter()
        if len(self._tokens) == 1:
            result.first = result.last
        if self._feed(token, result.last, drafter):
            return "stop_string"
        return self._at_limit if len(self._tokens) >= self._limit else None

    def _next_pass(self) -> StopReason | None:
        tokens = self._tokens
        proposal = self._speculator.propose(tokens, self._limit - len(tokens) - 1)
        start = perf_counter()
        if start >= self._next_update:
            self._on_update(len(tokens), self._speculator.figures())
            start = perf_counter()
            self._next_update = start + UPDATE_SECONDS
        return self._plain_pass(start) if proposal is None else self._verify_pass(proposal, start)

    def _plain_pass(self, start: float) -> StopReason | None:
        row = self._sequence.step(self._tokens[-1])
        reason = self._take(self._sampler.sample(row), "")
        if reason != "end":  # that pass has written nothing, and comes after the time of the last token
            self._speculator.record_plain(perf_counter() - start)
        return reason

    def _verify_pass(self, proposal: Proposal, start: float) -> StopReason | None:
        sequence, sampler, tokens = self._sequence, self._sampler, self._tokens
        drafted, n = proposal.tokens, len(proposal)
        n_held, n_written = len(sequence), len(tokens)
        sequence.checkpoint()
        self._speculator.start_verify(proposal)
        sequence.extend([tokens[-1], *drafted], n_outputs=n + 1, whole=True)
        reason: StopReason | None = None
        accepted = compared = 0
        for i in range(n + 1):
            token = sampler.sample(sequence.logits(i))
            is_accepted = i < n and token == drafted[i]
            compared += i < n
            accepted += is_accepted
            reason = self._take(token, proposal.drafter if is_accepted else "")
            if reason is not None or not is_accepted:
                break
        verified = perf_counter()
        # The last token of the answer is never part of the sequence.
        kept = n_held + len(tokens) - n_written + (reason == "end")
        again = sequence.roll_back_to(min(kept, n_held + 1 + n))
        if len(tokens) > n_written:
            rolled_back = perf_counter() - verified
            if reason is not None:  # the rollback comes after the time of the last token
                again, rolled_back = 0, 0.0
            self._speculator.record_verify(proposal, accepted, compared, verified - start, rolled_back, again)
        return reason
