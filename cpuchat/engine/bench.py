"""Times random tokens as llama-bench does (tools/llama-bench/llama-bench.cpp: `test_prompt`, `test_gen`).

Nothing is sampled: every token is random, so only llama.cpp's work is timed.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from cpuchat.engine.llama.model import Model
from cpuchat.engine.llama.sequence import Aborted, Sequence
from cpuchat.engine.llama.threads import cpu_wait_seconds, cpu_wait_share
from cpuchat.engine.loaded import LoadedModel
from cpuchat.engine.states.store import Live
from cpuchat.errors import Interrupted, UsageError
from cpuchat.prefix import common_prefix
from cpuchat.protocol import Measure


def measure(loaded: LoadedModel, command: Measure) -> tuple[float, float | None]:
    """Return the seconds of one run, and the share of them for which the threads waited for a core (None: not known).

    Saves and leaves the chat in memory. The `depth` tokens are the same each time, so that they are evaluated once for
    all runs that follow each other.

    Raises:
        Interrupted: cancelled.
        UsageError: the tokens do not fit the context.
        GenerationFailed: llama.cpp rejected a batch.
    """
    model, sequence = loaded.model, loaded.model.sequence
    needed = command.depth + command.n_prompt + command.n_gen
    if needed > sequence.n_ctx:
        raise UsageError(
            f"{needed:,} tokens do not fit the context of {sequence.n_ctx:,}.", "Load the model with a larger context."
        )
    loaded.states.leave()
    loaded.states.live = Live()
    try:
        _fill(sequence, _random_tokens(model, command.depth, seed=0))
        prompt = _random_tokens(model, command.n_prompt, seed=1)
        tokens = _random_tokens(model, command.n_gen, seed=2)
        waited, start = cpu_wait_seconds(), perf_counter()
        for at in range(0, len(prompt), sequence.n_batch):
            sequence.extend(prompt[at : at + sequence.n_batch], n_outputs=1)
        for token in tokens:
            sequence.step(token)
        seconds = perf_counter() - start
        return seconds, cpu_wait_share(waited, seconds, model.info.n_threads)
    except Aborted:
        raise Interrupted("The measurement was cancelled.") from None


def _fill(sequence: Sequence, tokens: list[int]) -> None:
    """Make the sequence hold exactly these tokens."""
    sequence.truncate(common_prefix(sequence.tokens, tokens))
    for at in range(len(sequence), len(tokens), sequence.n_batch):
        sequence.extend(tokens[at : at + sequence.n_batch])


def _random_tokens(model: Model, count: int, *, seed: int) -> list[int]:
    """Return random tokens; the first is the model's begin token if it has one, as in llama-bench."""
    tokens: list[int] = np.random.default_rng(seed).integers(model.vocab.n_tokens, size=count).tolist()
    if tokens and model.vocab.bos >= 0:
        tokens[0] = model.vocab.bos
    return tokens
