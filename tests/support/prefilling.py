"""Prompts of tokens, evaluated as an answer does it."""

from __future__ import annotations

from collections.abc import Callable

from cpuchat.engine.decoding.decode import Prefill, PrefillChunking, prefill
from cpuchat.engine.llama.model import Model
from cpuchat.engine.states.files import WriteBudget
from cpuchat.engine.states.prompt import RenderedPrompt
from cpuchat.engine.states.store import StateStore
from cpuchat.protocol.messages import StateKey


def store_of(model: Model) -> StateStore:
    """Return an empty store."""
    return StateStore(model.sequence, model.vocab.raw_piece, 1 << 28, None, WriteBudget())


def prefilled(
    model: Model,
    tokens: list[int],
    store: StateStore | None = None,
    on_progress: Callable[[int, int], None] = lambda done, cache_n: None,
) -> Prefill:
    """Evaluate `tokens`, from what the memory and the `store` hold; `on_progress` as (processed, reused)."""
    store = store or store_of(model)
    prompt = RenderedPrompt(b"".join(map(model.vocab.raw_piece, tokens)), tokens)
    start = store.begin(prompt, StateKey())
    return prefill(store, prompt, start, PrefillChunking.of(model), lambda done: on_progress(done, start.n))
