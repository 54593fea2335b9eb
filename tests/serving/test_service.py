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
from cpuchat.protocol.messages import Failed, Generate, GenerationFinished, ModelLoaded, PrefillProgress
from cpuchat.protocol.timings import Timings
from cpuchat.serving.errors import Refusal
from cpuchat.serving.fair_queue import FairQueue, QueueTurn
from cpuchat.serving.replies import ReplyProgress
from cpuchat.serving.requests import ParsedRequest
from cpuchat.serving.service import InferenceService, RequestRecord
from cpuchat.session.conversation import Conversation
from cpuchat.telemetry.meter import ChatFigures, Meter
from tests.support.scripted_backend import MODEL, WITH_DRAFT, ScriptedBackend, timings
from tests.support.stores import ollama

FINISHED = GenerationFinished(request_id=1, stop_reason="end", timings=Timings(predicted_n=1))
DIED = Failed(code="worker_died", message="The worker died.", request_id=1)
Step = Any
"""An event, or a function that is called in its place."""


class Engine:
    """A conversation whose backend plays steps for each request, and others to load its model again."""

    def __init__(self, *steps: Step, parallel: int = 1) -> None:
        self.steps, self.loading = steps, steps
        self.model: object = WITH_DRAFT
        self.asked: list[str | None] = []
        self.gate = asyncio.Event()
        self.meter = Meter()
        self.backend = self
        self.n_loads = self.n_stopped = 0

    async def remember_speed(self, timings: Timings) -> None:
        pass

    def figures(self) -> ChatFigures:
        return self.meter.figures()

    async def stop(self) -> None:
        pass

    async def unload(self) -> None:
        self.model = None

    async def reload(self) -> AsyncGenerator[Any, None]:
        self.n_loads += 1
        await self.gate.wait()
        for event in self.loading:
            if isinstance(event, ModelLoaded):
                self.model = event.model
            yield event

    async def generate(self, request: Generate) -> AsyncGenerator[Any, None]:
        self.asked.append(request.prompt)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.n_stopped += 1
            raise
        for step in self.steps:
            if callable(step):
                step()
            else:
                yield step


def served(engine: Engine, n_slots: int = 1, **options: Any) -> InferenceService:
    conversation: Any = engine
    service = InferenceService(conversation, **options)
    service.loaded(msgspec.structs.replace(WITH_DRAFT, parallel=n_slots))
    return service


def parsed(prompt: str = "Hello", *, stream: bool = True) -> ParsedRequest:
    return ParsedRequest(request=Generate(prompt=prompt), stream=stream)


async def ask(service: InferenceService, prompt: str = "Hello", party: str = "") -> None:
    with service.place("chat", party) as place:
        async for _ in service.answer(parsed(prompt), place, ReplyProgress()):
            pass


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def test_a_model_of_ollama_goes_by_its_name_with_and_without_the_usual_tag(
    tiny_model: Path, tmp_path: Path
) -> None:
    service = served(Engine(FINISHED))
    service.loaded(msgspec.structs.replace(MODEL, path=str(ollama(tmp_path, "tiny:latest", tiny_model))))
    assert service.names[:2] == ("tiny:latest", "tiny") and not any("sha256" in name for name in service.names)


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
    assert service.waiting == service._queue.n_running == 0


@pytest.mark.parametrize(
    ("n_slots", "arrived", "begun"),
    [
        (1, "a1 a2 a3 a4 b1 b2 c1", "a1 b1 c1 a2 b2 a3 a4"),
        (2, "a1 a2 a3 a4 b1 c1", "a1 a2 b1 c1 a3 a4"),
        (4, "a1 b1 a2", "a1 b1 a2"),
    ],
)
async def test_clients_take_turns(n_slots: int, arrived: str, begun: str) -> None:
    engine = Engine(FINISHED)
    service = served(engine, n_slots)
    tasks = [asyncio.create_task(ask(service, name, name[0])) for name in arrived.split()]
    await until(lambda: len(engine.asked) == min(n_slots, len(tasks)) == service._queue.n_running)
    engine.gate.set()
    await asyncio.gather(*tasks)
    assert engine.asked == begun.split()


async def test_each_of_several_has_its_own_end_when_the_server_closes() -> None:
    engine = Engine(FINISHED)
    service = served(engine, 2)
    tasks = [asyncio.create_task(ask(service, name)) for name in "abc"]
    await until(lambda: len(engine.asked) == 2 and service.waiting == 1)
    await service.close()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [end.code for end in ends if isinstance(end, Refusal)] == ["shutting_down"] * 3
    assert engine.asked == ["a", "b"] and engine.n_stopped == 2


async def test_a_cancelled_request_ends_no_other() -> None:
    engine = Engine(FINISHED)
    service = served(engine, 2)
    tasks = [asyncio.create_task(ask(service, name)) for name in "ab"]
    await until(lambda: len(engine.asked) == 2)
    tasks[0].cancel()
    await until(lambda: service._queue.n_running == 1)
    engine.gate.set()
    await tasks[1]
    assert engine.n_stopped == 1


def test_a_request_whose_body_is_still_being_read_has_a_place() -> None:
    service = served(Engine(), limit=1)
    with service.place("chat", ""), service.place("chat", ""):  # one for the idle engine, one that waits
        with pytest.raises(Refusal, match="full"), service.place("chat", ""):
            pass
        assert service.waiting == 2
    assert service.waiting == 0


async def test_the_health_tells_a_model_that_cannot_be_reloaded() -> None:
    engine = Engine(DIED)
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
    engine.loading, engine.steps = (ModelLoaded(model=WITH_DRAFT),), (FINISHED,)
    await ask(service)
    service.check_health()


async def test_those_that_wait_begin_when_a_reload_has_room_for_them() -> None:
    engine = Engine(FINISHED)
    service = served(engine)
    tasks = [asyncio.create_task(ask(service, name)) for name in "abc"]
    await until(lambda: service.waiting == 2)
    service.loaded(msgspec.structs.replace(WITH_DRAFT, parallel=3))
    await until(lambda: service._queue.n_running == 3)
    engine.gate.set()
    await asyncio.gather(*tasks)


async def test_a_model_is_loaded_once_for_all_that_wait_also_if_one_leaves() -> None:
    engine = Engine(FINISHED)
    engine.loading, engine.model = (ModelLoaded(model=WITH_DRAFT),), None
    service = served(engine, 3)
    tasks = [asyncio.create_task(ask(service, name)) for name in "abc"]
    await until(lambda: engine.n_loads == 1 and service._queue.n_running == 3)
    tasks[0].cancel()
    await until(lambda: service._queue.n_running == 2)
    engine.gate.set()
    await asyncio.gather(*tasks[1:])
    assert engine.n_loads == 1 and engine.asked == ["b", "c"]


async def test_an_idle_model_is_unloaded_and_the_next_request_waits_for_it() -> None:
    notes: list[str] = []
    engine = Engine(FINISHED)
    engine.loading = (ModelLoaded(model=WITH_DRAFT),)
    engine.gate.set()
    service = served(engine, idle_minutes=1e-4, on_note=notes.append)
    with service.place("chat", ""):  # a request that is still read keeps it
        await asyncio.sleep(0.02)
        assert service.is_loaded
    await until(lambda: not service.is_loaded)
    service.check_health()
    page = service.metrics.page()
    assert b"cpuchat_model_loaded 0" in page and not service.is_loaded and engine.n_loads == 0
    await ask(service)
    assert engine.n_loads == 1 and b"cpuchat_model_loads_total 2" in service.metrics.page()
    await until(lambda: not service.is_loaded)  # again
    assert [note.split()[0] for note in notes] == ["unloaded", "loaded", "unloaded"]


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


async def test_the_answer_that_ended_last_is_told_whichever_slot_it_had() -> None:
    first, second = asyncio.Event(), asyncio.Event()
    answers = iter([(first, 200), (second, 400)])

    async def generate(request: Generate) -> AsyncGenerator[Any, None]:
        gate, n = next(answers)
        yield PrefillProgress(request_id=1, processed=8, total=8, cache_n=0)
        await gate.wait()
        yield GenerationFinished(request_id=1, stop_reason="end", timings=timings(n))

    engine = Engine()
    engine.generate = generate  # type: ignore[method-assign]
    service = served(engine, 2)
    asked = [asyncio.create_task(ask(service, party=name)) for name in "ab"]
    await until(lambda: len(service.figures()) == 2)
    for slot, gate, n in ((0, first, 200), (1, second, 400)):
        gate.set()
        await asked[slot]
        if slot:
            ((told, figures),) = service.figures().items()
            assert (told, figures.phase, figures.predicted_n) == (slot, "done", n)


def test_a_stop_that_nobody_asked_for_is_an_end() -> None:
    progress = ReplyProgress()
    progress.finished = msgspec.structs.replace(FINISHED, stop_reason="stop_string", stop_string="\n")
    for stops, reason in (((), "end"), (("\n",), "stop_string")):
        assert RequestRecord("infill", "", progress=progress, stops=stops).stop_reason == reason


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


async def taken(queue: FairQueue, order: list[str], client: str, n: int = 1) -> None:
    """Take `n` turns one after the other; the client has left between them."""
    for _ in range(n):
        async with queue.slot(QueueTurn(client)):
            order.append(client)
            await asyncio.sleep(0)


async def test_clients_that_come_back_pass_nobody_who_waits() -> None:
    """Also where one has had a turn since it came."""
    queue, order = FairQueue(), list[str]()
    again = [taken(queue, order, client, 50) for client in ("b", "c")]
    await asyncio.gather(*again, taken(queue, order, "a"), taken(queue, order, "a"))
    assert [at for at, client in enumerate(order) if client == "a"] == [2, 5]


async def test_one_that_comes_waits_for_one_turn_of_another_with_many() -> None:
    queue, order = FairQueue(), list[str]()
    many = asyncio.gather(*(taken(queue, order, "a") for _ in range(5)))
    while not order:
        await asyncio.sleep(0)
    await taken(queue, order, "b")
    await many
    assert order == ["a", "b", "a", "a", "a", "a"]
