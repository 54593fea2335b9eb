"""Tests how long the reasoning of an answer takes."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from cpuchat.protocol.messages import AnyEvent, GenerationFinished, TextDelta
from cpuchat.telemetry.meter import with_reasoning_time
from tests.support.scripted_backend import answer


async def events(reasoning: str, text: str) -> AsyncGenerator[AnyEvent, None]:
    for step in answer(text, reasoning=reasoning):
        assert not isinstance(step, TextDelta) or step.at_ms  # 25 ms a word
        yield step  # type: ignore[misc]


async def test_the_time_ends_with_the_first_text_of_the_answer() -> None:
    *_, last = [one async for one in with_reasoning_time(events("a b c d", "Yes no"))]
    assert isinstance(last, GenerationFinished) and (last.timings.reasoning_n, last.timings.reasoning_ms) == (4, 100.0)


async def test_an_answer_without_reasoning_has_none() -> None:
    *_, last = [one async for one in with_reasoning_time(events("", "Yes no"))]
    assert isinstance(last, GenerationFinished) and (last.timings.reasoning_n, last.timings.reasoning_ms) == (0, 0.0)
