"""Tests what a stream sends while its request waits, and what an error of our own is counted as."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from cpuchat.protocol import Generate
from cpuchat.serving import app
from cpuchat.serving.app import AnswerEndpoint
from cpuchat.serving.refusal import Refusal
from cpuchat.serving.replies import PING, ChatReply, Progress
from cpuchat.serving.requests import Asked
from cpuchat.serving.service import Done, Service
from cpuchat.telemetry.meter import Meter
from tests.support.scripted_backend import WITH_DRAFT

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": [], "client": ("127.0.0.1", 1)}


class Queue:
    """A service whose only place is taken until `released`; then the request is refused."""

    most_body = 1000

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.reader = self

    def check(self) -> None:
        pass

    async def answer(self, *_: object) -> AsyncGenerator[Any, None]:
        await self.released.wait()
        raise Refusal(500, "The worker died.", "worker_died")
        yield


def asked(*, stream: bool) -> Asked:
    return Asked(request=Generate(), stream=stream, with_usage=False, with_timings=False, with_progress=False)


async def exchange(queue: Queue, *, stream: bool, sent: asyncio.Queue[dict]) -> None:
    service: Any = queue
    endpoint = AnswerEndpoint(service, "chat", lambda _: asked(stream=stream), lambda: ChatReply("m", "f"))
    received = iter([{"type": "http.request", "body": b"{}"}])

    async def put(message: Any) -> None:
        await sent.put(message)

    async def receive() -> Any:
        if (message := next(received, None)) is None:
            await asyncio.Event().wait()
        return message or {}

    await endpoint(SCOPE, receive, put)


@pytest.mark.timeout(60)
async def test_a_stream_begins_while_it_waits_and_tells_a_refusal_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "QUEUED_SECONDS", 0.01)
    queue, sent = Queue(), asyncio.Queue[dict]()
    task = asyncio.create_task(exchange(queue, stream=True, sent=sent))
    assert (await sent.get())["status"] == 200
    assert (await sent.get())["body"] == PING
    queue.released.set()
    await task
    last = await sent.get()
    assert msgspec.json.decode(last["body"].removeprefix(b"data: "))["error"]["code"] == "worker_died"
    assert not last["more_body"]


@pytest.mark.timeout(60)
async def test_a_refusal_before_that_has_its_own_status() -> None:
    queue, sent = Queue(), asyncio.Queue[dict]()
    queue.released.set()
    with pytest.raises(Refusal) as raised:
        await exchange(queue, stream=True, sent=sent)
    assert raised.value.status == 500
    assert sent.empty()


class Broken:
    """A conversation whose engine raises what nobody expects."""

    def __init__(self) -> None:
        self.meter = Meter()

    async def generate_detached(self, request: Generate) -> AsyncGenerator[Any, None]:
        raise RuntimeError("broken")
        yield


async def test_an_internal_error_counts_as_failed() -> None:
    conversation: Any = Broken()
    done: list[Done] = []
    service = Service(conversation, on_done=done.append)
    service.loaded(WITH_DRAFT)
    with pytest.raises(RuntimeError):
        await anext(service.answer(asked(stream=True), Progress(), "chat", ""))
    assert [one.result for one in done] == ["failed"]
    assert service.metrics.requests["chat", "failed"] == 1
