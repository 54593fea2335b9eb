"""Writing an answer with drafts: the target checks several tokens in one pass.

Exact-match verification (speculative decoding without rejection sampling): the target's own sampler picks a token from
each row in turn, and drafted tokens count as long as they are the ones it picks. Whatever the sampling settings are,
the text is the one that plain decoding gives with the same seed, up to floating-point differences between a pass over
one token and one over several.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Final

import numpy as np

from cpuchat.engine.decoding.decode import Written
from cpuchat.engine.decoding.sampling import Sampler
from cpuchat.engine.drafting.speculator import Speculator
from cpuchat.engine.llama.sequence import Aborted, Sequence
from cpuchat.engine.text.output_thread import ThreadedStream
from cpuchat.engine.text.text_stream import TextStream
from cpuchat.protocol import StopReason
from cpuchat.timings import SpeculationFigures

UPDATE_SECONDS: Final = 0.25
"""Between two reports of how speculation goes."""
LOOKING_AHEAD: Final = 0.1
"""Of the time to look for drafts, what may be saved up, in steps."""


def write_drafted(
    sequence: Sequence,
    row: np.ndarray,
    sampler: Sampler,
    stream: TextStream | ThreadedStream,
    is_eog: Callable[[int], bool],
    max_tokens: int,
    speculator: Speculator,
    on_update: Callable[[int, SpeculationFigures], None],
) -> Written:
    """`decode.write` with drafts. A stop inside a draft ends the answer there; the rest of the draft is dropped.

    Args:
        speculator: has begun with the text that `row` are the logits of.
        on_update: (tokens written, figures), a few times a second.

    Raises:
        GenerationFailed: llama.cpp refused a batch, or the logits are not numbers; the text so far was emitted.
    """
    written = Written()
    tokens = written.tokens
    room = sequence.n_ctx - len(sequence)
    limit = room + 1  # one more: the last token needs no place in the cache
    at_limit: StopReason = "context"
    if 0 < max_tokens <= limit:
        limit, at_limit = max_tokens, "max_tokens"
    prompt_n = len(sequence)
    sequence.decode_seconds = 0.0
    next_update = 0.0
    start = perf_counter()

    def take(token: int, drafter: str) -> StopReason | None:
        """The next token of the answer; why it is the last one, if it is."""
        if is_eog(token):
            return "end"
        sampler.accept(token)
        tokens.append(token)
        written.last = perf_counter()
        if len(tokens) == 1:
            written.first = written.last
        if stream.feed(token, written.last, drafter):
            return "stop_string"
        return at_limit if len(tokens) >= limit else None

    reason: StopReason | None = None
    try:
        reason = "cancelled" if sequence.abort.is_set() else take(sampler.pick(row), "")
        told = 0
        owed = 0.0  # seconds spent on looking for drafts in vain, less what may be
        while reason is None:
            proposal = None
            looked = perf_counter()
            if owed <= 0:
                waited = speculator.seconds
                speculator.append(tokens[told:])
                told = len(tokens)
                proposal = speculator.propose(limit - told - 1)
                looked += speculator.seconds - waited  # waiting for the draft model is counted there
            if looked >= next_update:
                next_update = perf_counter() + UPDATE_SECONDS
                on_update(len(tokens), speculator.figures())
            if proposal is None:
                began = perf_counter()
                row = sequence.step(tokens[-1])
                reason = take(sampler.pick(row), "")
                done = perf_counter()
                if reason != "end":  # that pass wrote nothing, and comes after the time of the last token
                    speculator.plain(1e3 * (done - began), is_known=owed <= 0)
                if owed <= 0 and speculator.is_adaptive:
                    owed = max(owed, -LOOKING_AHEAD * (done - began)) + began - looked + perf_counter() - done
                owed -= speculator.looking_share * (done - began)
                continue
            drafted = proposal.tokens
            n = len(drafted)
            before = len(sequence)
            sequence.mark()
            speculator.verifying(proposal)
            sequence.extend([tokens[-1], *drafted], n_outputs=n + 1)
            accepted = compared = 0
            for i in range(n + 1):
                token = sampler.pick(sequence.logits(i))
                right = i < n and token == drafted[i]
                compared += i < n
                accepted += right
                reason = take(token, proposal.drafter if right else "")
                if reason is not None or not right:
                    break
            took = 1e3 * (perf_counter() - looked)
            # The last token of the answer is never part of the sequence.
            kept = before + len(tokens) - told + (reason == "end")
            sequence.take_back(min(kept, before + 1 + n))
            if len(tokens) > told:
                speculator.verified(proposal, accepted, compared, took)
    except Aborted:
        reason = "cancelled"
        sequence.truncate(prompt_n + len(tokens))  # a pass that was stopped may have left a part of its draft
    finally:
        speculator.end()
        written.stop_reason = reason or "cancelled"
        spent = sequence.decode_seconds + speculator.seconds
        written.overhead_seconds = perf_counter() - start - spent
        stream.finish(perf_counter(), stopped=reason == "stop_string")
    return written
