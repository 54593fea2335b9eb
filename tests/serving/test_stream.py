"""Tests what a stream sends while its request waits, and clients that neither send nor read."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec
import pytest

from cpuchat.protocol.messages import TextDelta
from cpuchat.serving import app
from cpuchat.serving.app import AnswerEndpoint
from cpuchat.serving.errors import Refusal
from cpuchat.serving.openai_chat import ChatReply
from cpuchat.serving.requests import ParsedRequest
from cpuchat.serving.service import RequestRecord
from tests.serving.test_service import parsed

SCOPE = {"type": "http", "method": "POST", "path": "/", "headers": [], "client": ("127.0.0.1", 1)}
pytestmark = pytest.mark.timeout(180)


class Queue:
    """A service whose only place is taken until `released`; then the request is refused."""

    max_body = capacity = 1000

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.reader = self
        self.refusals: list[int] = []

    @contextlib.contextmanager
    def place(self, endpoint: str, client: str) -> Iterator[RequestRecord]:
        try:
            yield RequestRecord(endpoint, client)
        except Refusal as refusal:
            self.refusals.append(refusal.status)
            raise

    async def answer(self, *_: object) -> AsyncGenerator[Any, None]:
        await self.released.wait()
        raise Refusal(500, "The worker died.", "worker_died")
        yield


class Endless(Queue):
    """A service that writes until it is closed."""

    async def answer(self, *_: object) -> AsyncGenerator[Any, None]:
        try:
            while True:
                yield TextDelta(request_id=1, text="c")
                await asyncio.sleep(0)
        finally:
            self.released.set()


def endpoint_of(service: Any, request: ParsedRequest) -> AnswerEndpoint:
    return AnswerEndpoint(service, "chat", lambda _: request, lambda parsed: ChatReply("m", "f", parsed))


async def exchange(
    queue: Queue, *, stream: bool, sent: Any, body: bytes | None = b"{}",
    left: asyncio.Event | None = None, endpoint: AnswerEndpoint | None = None,
) -> None:  # fmt: skip
    """Send a request, of which `body` None never arrives; `sent` gets what the endpoint sends until it has `left`."""
    endpoint = endpoint or endpoint_of(queue, parsed(stream=stream))
    received = iter([] if body is None else [{"type": "http.request", "body": body}])

    async def put(message: Any) -> None:
        await sent.put(message)

    async def receive() -> Any:
        if (message := next(received, None)) is None:
            await (left or asyncio.Event()).wait()
        return message or {"type": "http.disconnect"}

    await endpoint(SCOPE, receive, put)


async def test_a_stream_begins_while_it_waits_and_tells_a_refusal_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "QUEUED_SECONDS", 0.01)
    queue, sent = Queue(), asyncio.Queue[dict]()
    task = asyncio.create_task(exchange(queue, stream=True, sent=sent))
    assert (await sent.get())["status"] == 200
    assert (await sent.get())["body"] == ChatReply.ping
    queue.released.set()
    await task
    last = await sent.get()
    assert msgspec.json.decode(last["body"].removeprefix(b"data: "))["error"]["code"] == "worker_died"
    assert not last["more_body"]


async def test_a_refusal_before_that_has_its_own_status() -> None:
    queue, sent = Queue(), asyncio.Queue[dict]()
    queue.released.set()
    with pytest.raises(Refusal) as raised:
        await exchange(queue, stream=True, sent=sent)
    assert raised.value.status == 500
    assert sent.empty()


async def test_a_client_that_reads_nothing_is_gone_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "STALLED_SECONDS", 0.01)
    queue = Endless()
    await exchange(queue, stream=True, sent=asyncio.Queue[dict](maxsize=3))
    assert queue.released.is_set()


async def test_a_body_that_does_not_arrive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.01)
    queue = Queue()
    with pytest.raises(Refusal) as raised:
        await exchange(queue, stream=True, sent=asyncio.Queue[dict](), body=None)
    assert raised.value.status == 408
    assert queue.refusals == [408]


async def test_no_cut_stream_leaves_a_task() -> None:
    """Each client hangs up at another step of the event loop, often the one in which a part comes."""
    for number in range(100):
        left, sent = asyncio.Event(), asyncio.Queue[dict]()
        task = asyncio.create_task(exchange(Endless(), stream=True, sent=sent, left=left))
        await sent.get()
        for _ in range(number % 7):
            await asyncio.sleep(0)
        left.set()
        for _ in range(50):
            await asyncio.sleep(0)
        assert task.done(), number
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Reading:
    """Reads requests until `released`."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.n_begun = self.n_ended = 0

    def __call__(self, body: bytes) -> ParsedRequest:
        self.n_begun += 1
        self.released.wait()
        self.n_ended += 1
        raise Refusal(400, "It was read.", "invalid_request")

    async def ends(self, number: int) -> None:
        while self.n_ended < number:
            await asyncio.sleep(0.001)

    async def begins(self, number: int) -> None:
        while self.n_begun < number:
            await asyncio.sleep(0.001)


async def test_clients_that_leave_end_no_reading_and_begin_no_more_than_so_many() -> None:
    reading, queue, left = Reading(), Queue(), asyncio.Event()
    endpoint = AnswerEndpoint(queue, "chat", reading, None)  # type: ignore[arg-type]
    sent = asyncio.Queue[dict]()
    tasks = [exchange(queue, stream=True, sent=sent, left=left, endpoint=endpoint) for _ in range(app.MAX_PARSED)]
    waiting = asyncio.gather(*tasks)
    await reading.begins(len(tasks))
    left.set()
    await waiting
    another = asyncio.create_task(exchange(queue, stream=True, sent=sent, endpoint=endpoint))
    for _ in range(50):
        await asyncio.sleep(0)
    assert (reading.n_begun, reading.n_ended) == (len(tasks), 0)
    reading.released.set()
    with pytest.raises(Refusal, match="It was read"):
        await another
    await reading.ends(len(tasks) + 1)
    assert sent.empty()


async def test_a_request_that_takes_too_long_to_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "PARSE_SECONDS", -1.0)
    reading, queue = Reading(), Queue()
    endpoint = AnswerEndpoint(queue, "chat", reading, None)  # type: ignore[arg-type]
    with pytest.raises(Refusal, match="Send smaller schemas"):
        await exchange(queue, stream=True, sent=asyncio.Queue[dict](), endpoint=endpoint)
    assert queue.refusals == [400]
    reading.released.set()
