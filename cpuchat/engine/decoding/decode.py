"""Evaluates a prompt, and decodes an answer: token by token, or verifying drafts of several tokens in one pass.

Exact-match verification (speculative decoding without rejection sampling): the target's own sampler chooses a token
from each row in order, and accepts drafted tokens as long as they are its choice. With the same seed the text is that
of plain decoding, up to floating-point differences between passes over one token and over several.

A prompt is evaluated in batches so small that cancelling takes effect within 50 ms: llama.cpp checks the abort flag
between the nodes of its graph, and one node over a large batch can take much longer. Their size depends on the model,
the thread count and the position, never on measured time: a prompt is always split the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final

import numpy as np

from cpuchat.costs.model import ATTENTION_TILE
from cpuchat.engine.decoding.sampling import Sampler
from cpuchat.engine.drafting.speculator import Speculator
from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.model import Model
from cpuchat.engine.llama.sequence import Aborted, Sequence
from cpuchat.engine.states.prompt import RenderedPrompt
from cpuchat.engine.states.store import EvaluationStart, StateStore
from cpuchat.engine.text.text_stream import TextStream, ThreadedStream
from cpuchat.protocol.messages import StopReason
from cpuchat.protocol.timings import SpeculationFigures
from cpuchat.speculation.drafters.drafter import Proposal

_NODE_SECONDS: Final = 0.05

# Operations per second of one core, on the low side of what was measured (Zen 4, 1.5B shape: 160e9 with quantized
# weights, 120e9 with float ones, 30e9 in attention without tiles), with and without AVX-512.
_QUANTIZED_RATE: Final = {True: 150e9, False: 75e9}
_FLOAT_RATE: Final = {True: 100e9, False: 50e9}
_FLOATS: Final = ("F32", "F16", "BF16")
_ATTENTION_RATE: Final = {True: 40e9, False: 20e9}


@dataclass(frozen=True)
class PrefillChunking:
    """Work of the largest nodes of a graph, in operations per token: `matmul` of the largest weight matrix (`is_float`:
    not quantized), `attention` of one layer for each token of context. `wide_vectors`: the CPU has AVX-512."""

    matmul: float
    attention: float
    n_threads: int
    wide_vectors: bool
    is_float: bool = False

    @classmethod
    def of(cls, model: Model) -> PrefillChunking:
        """Return the sizes for a loaded model. The output layer does not count: it works on the last token only."""
        header, features = model.header, bindings.engine_info().features
        experts = max(header.number("expert_count"), 1)
        used = header.number("expert_used_count") or experts
        largest, is_float = 0.0, False
        for tensor in header.tensors:
            if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
                share = used / experts if len(tensor.shape) == 3 else 1.0
                if tensor.n_elements * share > largest:
                    largest, is_float = tensor.n_elements * share, tensor.type in _FLOATS
        attention = 2.0 * header.n_head * (header.key_length + header.value_length)
        return cls(2 * largest, attention, model.pool.n_threads, "AVX512" in features, is_float)

    def size(self, n_past: int, left: int, n_ubatch: int) -> int:
        """Return the tokens for one batch after `n_past`, of `left` that follow: whole tiles, at most `n_ubatch`."""
        tokens, tile = float(n_ubatch), ATTENTION_TILE
        if self.matmul:
            rates = _FLOAT_RATE if self.is_float else _QUANTIZED_RATE
            rate = rates[self.wide_vectors] * self.n_threads
            tokens = min(tokens, _NODE_SECONDS * rate / self.matmul)
        if self.attention:
            # tokens * (n_past + tokens) = most_pairs
            rate = _ATTENTION_RATE[self.wide_vectors] * self.n_threads
            max_pairs = _NODE_SECONDS * rate / self.attention
            tokens = min(tokens, (math.sqrt(n_past**2 + 4 * max_pairs) - n_past) / 2)
        size = min(max(int(tokens) // tile * tile, tile), n_ubatch)
        if size < left < size + tile:  # what would be left is less than a tile
            return left if left <= n_ubatch else size - tile if size > tile else size
        return min(size, left)


@dataclass
class DecodeResult:
    """A decoded answer. `tokens`: without the one that ended it. `first`, `last`: `perf_counter()` of the first and the
    last token. `overhead_seconds`: time outside of llama_decode and of the draft model."""

    tokens: list[int] = field(default_factory=list)
    stop_reason: StopReason = "end"
    first: float = 0.0
    last: float = 0.0
    overhead_seconds: float = 0.0


def prefill(
    store: StateStore,
    prompt: RenderedPrompt,
    start: EvaluationStart,
    chunking: PrefillChunking,
    on_progress: Callable[[int], None],
) -> np.ndarray:
    """Evaluate `prompt` from where the store has begun, with checkpoints for later prompts; returns the logits after
    it. `on_progress` gets the tokens processed. Raises Aborted: stopped; the sequence holds the finished part, which a
    next call reuses; GenerationFailed: llama.cpp rejected a batch."""
    sequence, tokens, row, at, now = store.sequence, prompt.tokens, start.row, start.n, perf_counter()
    on_progress(at)
    ahead = iter(store.places(prompt, at))
    place = next(ahead, len(tokens))
    while at < len(tokens):
        if sequence.abort.is_set():
            raise Aborted
        # Batches of one graph each: as fast as larger ones, finer progress, no finished work lost to a stop. The first
        # one of many is short: it tells how long the rest takes.
        is_first = at == start.n and len(tokens) - at > sequence.n_ubatch
        most = min(ATTENTION_TILE, sequence.n_ubatch) if is_first else sequence.n_ubatch
        batch = tokens[at : at + chunking.size(at, place - at, most)]
        at += len(batch)
        is_last = at == len(tokens)
        sequence.extend(batch, n_outputs=int(is_last), whole=store.is_quick(len(batch)))
        if is_last:
            row = sequence.logits(len(batch) - 1)
        then, now = now, perf_counter()
        store.evaluated(len(batch), now - then)
        if at == place:
            store.keep_head()
            if sequence.partial_bytes or is_last:
                store.checkpoint(row)
            place = next(ahead, len(tokens))
        on_progress(at)
    assert row is not None
    return row


UPDATE_SECONDS: Final = 0.25
"""Seconds between two reports of the speculation figures."""


class Decoder:
    """Decodes one answer, until the model ends it, a stop string, `max_tokens` (0 = no limit), a full context or a
    cancel: token by token, or with the drafts of a `speculator`, which has begun the answer with the prompt.
    `on_update` gets the tokens written and the figures a few times a second, where there is a speculator."""

    def __init__(
        self,
        sequence: Sequence,
        sampler: Sampler,
        stream: TextStream | ThreadedStream,
        is_eog: Callable[[int], bool],
        max_tokens: int,
        speculator: Speculator | None = None,
        on_update: Callable[[int, SpeculationFigures], None] = lambda n, figures: None,
    ) -> None:
        self._sequence = sequence
        self._sampler = sampler
        self._feed, self._finish = stream.feed, stream.finish
        self._is_eog = is_eog
        self._speculator = speculator
        self._on_update = on_update
        self._next_update = 0.0
        room = sequence.n_ctx - len(sequence) + 1  # one more: the last token needs no cell of the KV cache
        self._limit = max_tokens if 0 < max_tokens <= room else room
        self._at_limit: StopReason = "max_tokens" if self._limit == max_tokens else "context"
        self._result = DecodeResult()
        self._tokens = self._result.tokens

    def run(self, row: np.ndarray) -> DecodeResult:
        """Decode, starting from `row`, the logits after the prompt. The last token is part of the answer but not of the
        sequence. Raises GenerationFailed: llama.cpp rejected a batch, or the logits are NaN or infinite."""
        sequence, speculator, result, tokens = self._sequence, self._speculator, self._result, self._tokens
        sample, take, n_prompt = self._sampler.sample, self._take, len(sequence)
        sequence.decode_seconds = 0.0
        start = perf_counter()
        reason: StopReason | None = None
        try:
            reason = "cancelled" if sequence.abort.is_set() else take(sample(row), "")
            while reason is None and speculator is None:
                reason = take(sample(sequence.step(tokens[-1])), "")
            while reason is None and speculator is not None:
                reason = self._next_pass(speculator)
        except Aborted:
            reason = "cancelled"
            sequence.truncate(n_prompt + len(tokens))  # an aborted pass may have left a part of its draft
        finally:
            result.stop_reason = reason or "cancelled"
            result.overhead_seconds = perf_counter() - start - sequence.decode_seconds
            if speculator is not None:
                speculator.end_answer()
                result.overhead_seconds -= speculator.seconds
            self._finish(perf_counter(), stopped=reason == "stop_string")
        return result

    def _next_pass(self, speculator: Speculator) -> StopReason | None:
        sequence, tokens = self._sequence, self._tokens
        proposal = speculator.propose(tokens, self._limit - len(tokens) - 1, is_shared=sequence.has_company)
        if (start := perf_counter()) >= self._next_update:
            self._on_update(len(tokens), speculator.figures())
            start = perf_counter()
            self._next_update = start + UPDATE_SECONDS
        if proposal is not None:
            return self._verify_pass(speculator, proposal, start)
        reason = self._take(self._sampler.sample(sequence.step(tokens[-1])), "")
        if reason != "end":  # that pass has written nothing, and comes after the time of the last token
            record = speculator.record_shared if sequence.is_shared else speculator.record_plain
            record(perf_counter() - start)
        return reason

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

    def _verify_pass(self, speculator: Speculator, proposal: Proposal, start: float) -> StopReason | None:
        sequence, sampler, tokens = self._sequence, self._sampler, self._tokens
        drafted = proposal.tokens
        n_held, n_written = len(sequence), len(tokens)
        sequence.checkpoint()
        n = sequence.verify([tokens[-1], *drafted], speculator.chances(proposal))
        proposal = proposal.cut(n)
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
        if len(tokens) > n_written and sequence.is_shared:
            speculator.record_shared(verified - start, proposal, accepted, compared)
        elif len(tokens) > n_written:
            rolled_back = perf_counter() - verified
            if reason is not None:  # the rollback comes after the time of the last token
                again, rolled_back = 0, 0.0
            speculator.record_verify(proposal, accepted, compared, verified - start, rolled_back, again)
        return reason
