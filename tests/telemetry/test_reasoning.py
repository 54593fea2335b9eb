"""Tests how long the reasoning of an answer takes."""

from __future__ import annotations

from cpuchat.protocol.messages import GenerationFinished
from cpuchat.telemetry.meter import ReasoningTime
from tests.support.scripted_backend import Gate, answer


def times(*answers: tuple[str, str]) -> list[tuple[int, float | None]]:
    """Return the tokens and the time of the reasoning in answers with (reasoning, text), 25 ms a word."""
    clock, found = ReasoningTime(), list[tuple[int, float | None]]()
    for reasoning, text in answers:
        for step in answer(text, reasoning=reasoning):
            event = None if isinstance(step, Gate) else clock.of(step)
            if isinstance(event, GenerationFinished):
                found.append((event.timings.reasoning_n, event.timings.reasoning_ms))
    return found


def test_the_time_ends_with_the_first_text_of_the_answer_and_each_answer_has_its_own() -> None:
    assert times(("a b c d", "Yes no"), ("a b", "Yes")) == [(4, 100.0), (2, 50.0)]


def test_an_answer_without_reasoning_has_none() -> None:
    assert times(("", "Yes no"), ("a b", "")) == [(0, 0.0), (2, 50.0)]
