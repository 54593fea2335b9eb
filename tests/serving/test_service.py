"""Tests the queue of one engine, and what is counted of its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cpuchat.config.settings import Settings
from cpuchat.measure.peak import ReadBandwidth, keep, known
from cpuchat.protocol.messages import (
    Failed,
    Generate,
    GenerationFinished,
    LoadProgress,
    ModelLoaded,
    PrefillProgress,
)
from cpuchat.protocol.timings import Timings
from cpuchat.serving.errors import Refusal
from cpuchat.serving.replies import ReplyProgress
from cpuchat.serving.requests import ParsedRequest
from cpuchat.serving.service import InferenceService, RequestRecord
from cpuchat.session.conversation import Conversation
from cpuchat.telemetry.meter import Meter
from tests.support.scripted_backend import MODEL, WITH_DRAFT, ScriptedBackend, timings

FINISHED = GenerationFinished(request_id=1, stop_reason="end", timings=Timings(predicted_n=1))
DIED = Failed(code="worker_died", message="The worker died.", request_id=1)
Step = Any
"""An event, or a function that is called in its place."""


class Engine:
    """A conversation whose engine plays steps for each request."""

    def __init__(self, *steps: Step) -> None:
        self.steps = steps
        self.model: object = WITH_DRAFT
        self.asked: list[str | None] = []
        self.gate = asyncio.Event()
        self.meter = Meter()

    async def remember_speed(self, timings: Timings) -> None:
        pass

    async def generate_detached(self, request: Generate) -> AsyncGenerator[Any, None]:
        self.asked.append(request.prompt)
        await self.gate.wait()
        for step in self.steps:
            if callable(step):
                step()
            else:
                yield step


def served(engine: Engine, **options: Any) -> InferenceService:
    conversation: Any = engine
    service = InferenceService(conversation, **options)
    service.loaded(WITH_DRAFT)
    return service


def parsed(prompt: str = "Hello", *, stream: bool = True) -> ParsedRequest:
    return ParsedRequest(request=Generate(prompt=prompt), stream=stream)


async def ask(service: InferenceService, prompt: str = "Hello") -> None:
    with service.place("chat", "") as place:
        async for _ in service.answer(parsed(prompt), place, ReplyProgress()):
            pass


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


@pytest.mark.timeout(180)
async def test_requests_are_answered_in_the_order_of_their_arrival_and_may_leave() -> None:
    engine = Engine(FINISHED)
    service = served(engine)
    tasks = [asyncio.create_task(ask(service, str(number))) for number in range(5)]
    await until(lambda: service.waiting == 4)
    for number in (0, 2):
        tasks[number].cancel()
    engine.gate.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert engine.asked == ["0", "1", "3", "4"]
    assert service.waiting == 0 and not service.busy


def test_a_request_whose_body_is_still_being_read_has_a_place() -> None:
    service = served(Engine(), limit=1)
    with service.place("chat", ""), service.place("chat", ""):  # one for the idle engine, one that waits
        with pytest.raises(Refusal, match="full"), service.place("chat", ""):
            pass
        assert service.waiting == 2
    assert service.waiting == 0


async def test_the_health_tells_a_model_that_cannot_be_reloaded() -> None:
    engine = Engine(LoadProgress(phase="reading", done=0, total=1), DIED)
    engine.gate.set()
    service = served(engine)
    with pytest.raises(Refusal):
        await ask(service)
    service.check_health()  # the next request may reload it
    engine.model = None
    with pytest.raises(Refusal):
        await ask(service)
    with pytest.raises(Refusal, match="could not be reloaded"):
        service.check_health()
    engine.steps = (ModelLoaded(model=WITH_DRAFT), FINISHED)
    await ask(service)
    service.check_health()


async def test_the_gauges_tell_an_answer_and_one_that_beats_the_known_peak_raises_it_for_every_program() -> None:
    cpus = (0, 1)
    model = msgspec.structs.replace(MODEL, cpus=cpus, peak_read=0.0)
    keep(ReadBandwidth(cpus, 40e9, (40e9,), (1.0,)))
    finished = GenerationFinished(request_id=1, stop_reason="end", timings=timings(200))  # 40 tok/s: 66 GB/s
    backend = ScriptedBackend([[PrefillProgress(request_id=1, processed=8, total=8, cache_n=0), finished]], model=model)
    conversation = Conversation(settings=Settings(), backend=backend, store=None)
    async for _ in conversation.load_model(Path(model.path)):
        pass
    service = InferenceService(conversation)
    service.loaded(model)
    await ask(service)
    figures = conversation.figures()
    assert figures.phase == "done" and figures.decode_tok_s.value == pytest.approx(40)
    assert b"cpuchat_decode_tokens_per_second 40" in service.metrics.page()
    raised = known(cpus)
    assert raised is not None and raised.at_least and raised.bytes_per_s == pytest.approx(66e9, rel=0.05)


async def test_an_internal_error_counts_as_failed() -> None:
    def broken() -> None:
        raise RuntimeError("broken")

    engine = Engine(broken)
    engine.gate.set()
    records: list[RequestRecord] = []
    service = served(engine, on_done=records.append)
    with pytest.raises(RuntimeError):
        await ask(service)
    assert [one.result for one in records] == ["failed"]
