"""From where a prompt is evaluated soonest: from what the memory holds, or from a state that was kept."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from cpuchat.engine.llama.sequence import Sequence
from cpuchat.engine.states.prompt import State, shared_tokens, token_bytes

MIN_TOKENS: Final = 32
"""Tokens that keeping or restoring a whole state must spare."""
_MEMORY_SPEED, _DISK_SPEED = 4e9, 8e8
"""Bytes per second of restoring; the order of magnitude decides."""


@dataclass(frozen=True)
class Plan:
    """A way to the first `n` tokens of a prompt: from `base` (None: what the memory holds), going back by `partial`.
    `shared` tokens are common to both; `cost` is in seconds, with the evaluation of the rest."""

    base: State | None
    partial: State | None
    n: int
    shared: int
    cost: float


def plan_reuse(prompt: bytes, most: int, memory: Sequence, states: Collection[State], token_seconds: float) -> Plan:
    """Return the cheapest way to the first `most` tokens of `prompt`, or fewer, where one takes `token_seconds`."""
    partials = [one for one in states if not one.is_whole and len(one) <= most and prompt.startswith(one.tokens)]
    plans: list[Plan] = []
    for base in [None, *(one for one in states if one.is_whole and len(one) <= memory.n_ctx)]:
        shared = shared_tokens(token_bytes(memory.tokens) if base is None else base.tokens, prompt)
        n, partial = min(shared, most), None
        if not (memory.can_cut(n) if base is None else n == len(base) or memory.can_cut_from(base.first, n)):
            partial = max((one for one in partials if len(one) <= n), key=len, default=None)
            n = len(partial) if partial is not None else 0
        cost = (most - n + (MIN_TOKENS if base is not None else 0)) * token_seconds
        for one in (base, partial):
            if one is not None:
                is_here = one.data is not None or one.lane is not None
                cost += one.restored_bytes / (_MEMORY_SPEED if is_here else _DISK_SPEED)
        plans.append(Plan(base, partial, n, shared, cost))
    return min(plans, key=lambda plan: plan.cost)
