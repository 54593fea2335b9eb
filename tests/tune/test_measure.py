"""Tests measuring decode speed: with the real worker, and with answers that end badly."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from cpuchat.backend.local import LocalBackend
from cpuchat.base.errors import MeasureFailed
from cpuchat.protocol.messages import (
    AnyEvent,
    Failed,
    Generate,
    GenerationFinished,
    LoadOptions,
    ModelLoaded,
    TextDelta,
)
from cpuchat.protocol.timings import Timings
from cpuchat.telemetry.answer import PROMPTS, measure_decode

pytestmark = pytest.mark.slow


class Answers:
    """Answers each prompt with as many tokens as asked for, at most `lengths` of them, at `rates` in turn."""

    def __init__(self, *rates: float, lengths: dict[str, int] | None = None) -> None:
        self.rates = rates
        self.lengths = lengths or {}
        self.requests: list[Generate] = []
        self.counted = 0

    async def __call__(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        self.requests.append(request)
        assert request.prompt is not None
        n = min(request.max_tokens, self.lengths.get(request.prompt, 10_000))
        rate = 5.0  # of the round that does not count
        if request.max_tokens >= 16:
            rate = self.rates[self.counted % len(self.rates)]
            self.counted += 1
        yield TextDelta(request_id=1, text="x")
        timings = Timings(predicted_n=n, predicted_ms=1e3 * max(n - 1, 0) / rate)
        yield GenerationFinished(request_id=1, stop_reason="max_tokens", timings=timings)


async def test_the_median_and_the_spread_of_the_rounds() -> None:
    answers = Answers(40.0, 43.0, 41.0)
    measured = await measure_decode(answers)
    assert measured.rounds == pytest.approx((40.0, 43.0, 41.0))
    assert measured.tok_s == pytest.approx(41.0)
    assert measured.spread == pytest.approx(3.0)


async def test_every_answer_is_plain_greedy_and_kept_apart_from_chats() -> None:
    answers = Answers(40.0)
    await measure_decode(answers, n_tokens=32, rounds=2)
    assert [request.max_tokens for request in answers.requests] == [8, 32, 32]
    for request in answers.requests:
        assert request.sampling.temperature == 0
        assert request.speculation.drafters == ()
        assert (request.state.chat, request.messages) == ("", ())


async def test_a_model_that_ends_early_is_measured_by_what_it_wrote() -> None:
    answers = Answers(40.0, lengths=dict.fromkeys(PROMPTS, 20))
    assert (await measure_decode(answers)).tok_s == pytest.approx(40.0)
    assert {request.prompt for request in answers.requests} == {PROMPTS[0]}


async def test_another_text_is_tried_where_one_ends_at_once() -> None:
    answers = Answers(40.0, lengths={PROMPTS[0]: 3})
    measured = await measure_decode(answers)
    assert len(measured.rounds) == 3
    assert answers.requests[-1].prompt == PROMPTS[1]


async def test_a_model_that_always_ends_at_once_cannot_be_measured() -> None:
    with pytest.raises(MeasureFailed, match="after 15 tokens"):
        await measure_decode(Answers(40.0, lengths=dict.fromkeys(PROMPTS, 15)))


async def test_a_model_that_says_nothing_cannot_be_measured() -> None:
    with pytest.raises(MeasureFailed, match="after 0 tokens"):
        await measure_decode(Answers(40.0, lengths=dict.fromkeys(PROMPTS, 0)))


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Failed(code="worker_died", message="The worker is gone.", hint="Try again."), "worker is gone. Try again"),
        (GenerationFinished(request_id=1, stop_reason="cancelled", timings=Timings(predicted_n=64)), "was cancelled"),
        (TextDelta(request_id=1, text="x"), "returned no figures"),
    ],
)
async def test_a_bad_end_is_a_typed_error(event: AnyEvent, words: str) -> None:
    async def answer(_: Generate) -> AsyncGenerator[AnyEvent, None]:
        yield event

    with pytest.raises(MeasureFailed, match=words):
        await measure_decode(answer)


async def test_a_real_model_is_measured(tiny_model: Path) -> None:
    backend = LocalBackend()
    try:
        async with contextlib.aclosing(backend.load(tiny_model, LoadOptions(n_ctx=256))) as events:
            assert isinstance([event async for event in events][-1], ModelLoaded)
        measured = await measure_decode(backend.generate, n_tokens=24, rounds=2)
    finally:
        await backend.close()
    assert len(measured.rounds) == 2
    assert min(measured.rounds) > 0
