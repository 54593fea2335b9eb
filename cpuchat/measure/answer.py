"""Greedy answers that are measured or judged, not shown."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable

import msgspec

from cpuchat.base.errors import MeasureFailed
from cpuchat.protocol.messages import AnyEvent, Failed, Generate, GenerationFinished, Sampling, TextDelta
from cpuchat.protocol.timings import Timings

Answering = Callable[[Generate], AsyncGenerator[AnyEvent, None]]
"""`Conversation.generate_detached` or `Backend.generate` of a loaded model."""


async def answer_greedily(
    answer: Answering, request: Generate, tell: Callable[[TextDelta], None] = lambda _: None
) -> Timings:
    """Let the model answer `request` greedily; returns the figures, and tells of every piece of text. Raises
    MeasureFailed: the engine failed, or it was stopped."""
    request = msgspec.structs.replace(request, sampling=Sampling(temperature=0.0))
    async with contextlib.aclosing(answer(request)) as events:
        async for event in events:
            match event:
                case TextDelta():
                    tell(event)
                case Failed():
                    raise MeasureFailed(event.message, event.hint)
                case GenerationFinished(stop_reason="cancelled"):
                    raise MeasureFailed("The measurement was cancelled.", "Measure again when nothing else is running.")
                case GenerationFinished():
                    return event.timings
    raise MeasureFailed("The measurement returned no figures.", "Measure again.")
