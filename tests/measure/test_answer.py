"""Tests greedy answers that are measured, with backends that end badly."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from cpuchat.base.errors import MeasureFailed
from cpuchat.measure.answer import answer_greedily
from cpuchat.protocol.messages import AnyEvent, Failed, Generate, GenerationFinished, Sampling, StopReason, TextDelta
from cpuchat.protocol.timings import Timings

TEXT = TextDelta(request_id=1, text="x")


def ends(reason: StopReason) -> GenerationFinished:
    return GenerationFinished(request_id=1, stop_reason=reason, timings=Timings(predicted_n=64))


async def test_figures_and_pieces_of_a_greedy_answer() -> None:
    asked: list[Generate] = []
    told: list[TextDelta] = []

    async def answer(request: Generate) -> AsyncGenerator[AnyEvent, None]:
        asked.append(request)
        yield TEXT
        yield ends("max_tokens")

    found = await answer_greedily(answer, Generate(prompt="so", sampling=Sampling(temperature=0.8)), told.append)
    assert found.predicted_n == 64 and told == [TEXT]
    assert asked[0].sampling.temperature == 0


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Failed(code="worker_died", message="The worker is gone.", hint="Try again."), "worker is gone. Try again"),
        (ends("cancelled"), "was cancelled"),
        (TEXT, "returned no figures"),
    ],
)
async def test_a_bad_end_is_a_typed_error(event: AnyEvent, words: str) -> None:
    async def answer(_: Generate) -> AsyncGenerator[AnyEvent, None]:
        yield event

    with pytest.raises(MeasureFailed, match=words):
        await answer_greedily(answer, Generate(prompt="so"))
