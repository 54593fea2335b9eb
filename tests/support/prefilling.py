"""Prompts of tokens, evaluated as an answer does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cpuchat.engine.decoding.decode import PrefillChunking, prefill
from cpuchat.engine.llama.model import Model
from cpuchat.engine.states.files import WriteBudget
from cpuchat.engine.states.prompt import RenderedPrompt
from cpuchat.engine.states.store import StateStore
from cpuchat.protocol.messages import StateKey


def store_of(model: Model) -> StateStore:
    """Return an empty store."""
    return StateStore(model.sequence, model.vocab.raw_piece, 1 << 28, None, WriteBudget())


class Prefilled(NamedTuple):
    """The logits after a prompt, and how many of its tokens were cached, and evaluated."""

    row: np.ndarray
    cache_n: int
    prompt_n: int


def prefilled(
    model: Model,
    tokens: list[int],
    store: StateStore | None = None,
    on_progress: Callable[[int, int], None] = lambda done, cache_n: None,
) -> Prefilled:
    """Evaluate `tokens`, from what the memory and the `store` hold; `on_progress` as (processed, reused)."""
    store = store or store_of(model)
    prompt = RenderedPrompt(b"".join(map(model.vocab.raw_piece, tokens)), tokens)
    start = store.begin(prompt, StateKey())
    row = prefill(store, prompt, start, PrefillChunking.of(model), lambda done: on_progress(done, start.n))
    return Prefilled(row, start.n, len(tokens) - start.n)
