"""Tests from where a prompt is evaluated soonest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from cpuchat.engine.states.plan import plan_reuse
from cpuchat.engine.states.prompt import State, StateKind, token_bytes
from cpuchat.protocol.messages import StateKey

PROMPT = list(range(1000))
SECONDS = 1e-3


@dataclass
class Memory:
    """Can be cut at `cuts` tokens only; everywhere if None."""

    tokens: list[int]
    cuts: tuple[int, ...] | None = None
    n_ctx: int = 4096

    def can_cut(self, n: int) -> bool:
        return self.cuts is None or n in self.cuts

    def can_cut_from(self, first: int, n: int) -> bool:
        return self.can_cut(n)


def state(n: int, *, whole: bool = True, size: int = 8) -> State:
    kind = StateKind.WHOLE if whole else StateKind.PARTIAL
    return State(StateKey(), token_bytes(PROMPT[:n]), kind, np.zeros(size, np.uint8))


def planned(memory: Memory, *states: State) -> tuple[State | None, State | None, int]:
    plan = plan_reuse(token_bytes(PROMPT), len(PROMPT) - 1, cast(Any, memory), states, SECONDS)
    return plan.base, plan.partial, plan.n


def test_the_memory_is_cut_where_it_can_be() -> None:
    assert planned(Memory([*PROMPT[:600], 7, 8])) == (None, None, 600)
    assert planned(Memory(PROMPT)) == (None, None, 999)  # the last token is evaluated, for its logits


def test_a_whole_state_replaces_the_memory_only_if_it_spares_more_than_it_costs() -> None:
    longer, little, costly = state(900), state(620), state(900, size=2_000_000_000)
    assert planned(Memory(PROMPT[:600]), longer) == (longer, None, 900)
    assert planned(Memory(PROMPT[:600]), little) == (None, None, 600)
    assert planned(Memory(PROMPT[:600]), costly) == (None, None, 600)
    assert planned(Memory(PROMPT[:600], n_ctx=800), longer) == (None, None, 600)


def test_what_cannot_be_cut_goes_back_by_the_nearest_checkpoint() -> None:
    near, far, later = state(500, whole=False), state(100, whole=False), state(800, whole=False)
    memory = Memory([*PROMPT[:600], 7], cuts=())
    assert planned(memory, far, near, later) == (None, near, 500)
    assert planned(memory) == (None, None, 0)
