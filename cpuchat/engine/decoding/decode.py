"""Evaluates a prompt and decodes an answer token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from cpuchat.engine.decoding.prefill_chunking import PrefillChunking
from cpuchat.engine.decoding.sampling import Sampler
from cpuchat.engine.llama.sequence import Aborted, Sequence
from cpuchat.engine.states.prompt import Prompt
from cpuchat.engine.states.store import Start, StateStore
from cpuchat.engine.text.output_thread import ThreadedStream
from cpuchat.engine.text.text_stream import TextStream
from cpuchat.protocol import StopReason


@dataclass
class Prefill:
    """An evaluated prompt: `row` are the logits after it; `cache_n` of its tokens were cached, `prompt_n` evaluated."""

    row: np.ndarray
    cache_n: int
    prompt_n: int
    seconds: float


@dataclass
class DecodeResult:
    """A decoded answer.

    Attributes:
        tokens: without the one that ended it.
        first, last: `perf_counter()` of the first and the last token.
        overhead_seconds: time outside of llama_decode and of the draft model.
    """

    tokens: list[int] = field(default_factory=list)
    stop_reason: StopReason = "end"
    first: float = 0.0
    last: float = 0.0
    overhead_seconds: float = 0.0


def prefill(
    store: StateStore, prompt: Prompt, start: Start, chunking: PrefillChunking, on_progress: Callable[[int], None]
) -> Prefill:
    """Evaluate `prompt` from where the store has begun, and keep checkpoints for later prompts.

    Args:
        on_progress: called with the tokens processed before the first batch and after each.

    Raises:
        Aborted: stopped; the sequence holds the finished part, which a next call reuses.
        GenerationFailed: llama.cpp rejected a batch.
    """
    sequence, tokens, row, at = store.sequence, prompt.tokens, start.row, start.n
    before = now = perf_counter()
    on_progress(at)
    places = iter(prompt.checkpoints(at, store.piece) if sequence.partial_bytes and at < len(tokens) else ())
    place = next(places, len(tokens))
    while at < len(tokens):
        if sequence.abort.is_set():
            raise Aborted
        # Batches of one graph each: as fast as larger ones, finer progress, no finished work lost to a stop.
        batch = tokens[at : at + chunking.size(at, place - at, sequence.n_ubatch)]
        at += len(batch)
        is_last = at == len(tokens)
        sequence.extend(batch, n_outputs=int(is_last), whole=store.is_quick(len(batch)))
        if is_last:
            row = sequence.logits(len(batch) - 1)
        then, now = now, perf_counter()
        store.evaluated(len(batch), now - then)
        if at == place:
            store.checkpoint(row)
            place = next(places, len(tokens))
        on_progress(at)
    assert row is not None
    return Prefill(row=row, cache_n=start.n, prompt_n=len(tokens) - start.n, seconds=perf_counter() - before)


def token_limit(sequence: Sequence, max_tokens: int) -> tuple[int, StopReason]:
    """Return how many tokens an answer may have, and why it stops there."""
    room = sequence.n_ctx - len(sequence) + 1  # one more: the last token needs no cell of the KV cache
    return (max_tokens, "max_tokens") if 0 < max_tokens <= room else (room, "context")


def decode(
    sequence: Sequence,
    row: np.ndarray,
    sampler: Sampler,
    stream: TextStream | ThreadedStream,
    is_eog: Callable[[int], bool],
    max_tokens: int,
) -> DecodeResult:
    """Decode until the model ends the answer, a stop string, `max_tokens` (0 = no limit), a full context or a cancel.

    All text has been emitted when this returns. The last token is part of the answer but not of the sequence.

    Args:
        row: logits after the prompt, float32 of shape (n_vocab,).

    Raises:
        GenerationFailed: llama.cpp rejected a batch, or the logits are NaN or infinite; the text so far was emitted.
    """
    result = DecodeResult()
    append, sample, accept = result.tokens.append, sampler.sample, sampler.accept
    step, feed = sequence.step, stream.feed
    limit, reason = token_limit(sequence, max_tokens)
    sequence.decode_seconds = 0.0
    start = now = perf_counter()
    try:
        if sequence.abort.is_set():
            reason, limit = "cancelled", 0
        for n in range(limit):
            token = sample(row)
            if is_eog(token):
                reason = "end"
                break
            accept(token)
            append(token)
            now = perf_counter()
            if n == 0:
                result.first = now
            if feed(token, now):
                reason = "stop_string"
                break
            if n + 1 < limit:
                row = step(token)
    except Aborted:
        reason = "cancelled"
    finally:
        result.last = now
        result.stop_reason = reason
        result.overhead_seconds = perf_counter() - start - sequence.decode_seconds
        stream.finish(perf_counter(), stopped=reason == "stop_string")
    return result
