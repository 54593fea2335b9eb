"""Tests of who is next in the passes of several answers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from cpuchat.engine.llama.model import Model
from tests.support.engine_chat import OPTIONS

SHARED = msgspec.structs.replace(OPTIONS, parallel=3)
TEXT = [40 + i * 37 % 100 for i in range(400)]


def test_a_long_prompt_is_read_beside_short_ones_that_keep_coming(load: Callable[..., Model], tiny_model: Path) -> None:
    """An answer that has rows of the last pass halts the others: there is always a short prompt, and in no neighbor of
    the long one's lane, from which both would be read together."""
    model = load(tiny_model, SHARED)
    passes = model.passes
    assert passes is not None
    long, _, short = model.lanes
    n_short, read_after = [0], list[int]()

    def read_long() -> None:
        for at in range(0, len(TEXT), 64):
            long.extend(TEXT[at : at + 64])
        read_after.append(n_short[0])

    def read_short_ones() -> None:
        for _ in range(500):
            short.extend(TEXT[:5], n_outputs=1)
            n_short[0] += 1
            short.clear()
        short.release()

    def end(_: Future[None]) -> None:
        passes.end_beside()

    passes.begin_beside()
    passes.begin_beside()
    with ThreadPoolExecutor(2) as threads:
        tasks = [threads.submit(one) for one in (read_short_ones, read_long)]
        for task in tasks:
            task.add_done_callback(end)
        passes.run_beside()
    for task in tasks:
        task.result()
    assert 0 < read_after[0] < 300
