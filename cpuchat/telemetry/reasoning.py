"""Measures how long a model reasons before it answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

import msgspec

from cpuchat.protocol import AnyEvent, GenerationFinished, TextDelta


async def with_reasoning_time(events: AsyncGenerator[AnyEvent, None]) -> AsyncGenerator[AnyEvent, None]:
    """Pass the events of one answer on; the timings at its end have the time and the tokens of its reasoning, from its
    first text to that of the answer.
    """
    begun: float | None = None
    ended, n_tokens, has_answer = 0.0, 0, False
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, TextDelta):
                is_reasoning = event.channel == "reasoning"
                if is_reasoning:
                    begun = event.at_ms if begun is None else begun
                    n_tokens += event.n_tokens
                if not has_answer:
                    ended, has_answer = event.at_ms, not is_reasoning
            elif isinstance(event, GenerationFinished) and begun is not None:
                timings = msgspec.structs.replace(event.timings, reasoning_n=n_tokens, reasoning_ms=ended - begun)
                event = msgspec.structs.replace(event, timings=timings)
            yield event
