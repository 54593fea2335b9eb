"""Tests stops: the connection closes, the partial answer is kept, and whether the server still computes is known."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from cpuchat.backend.remote.backend import RemoteBackend
from cpuchat.backend.remote.connection import Connection
from cpuchat.backend.remote.servers import identify
from cpuchat.config.servers import ServerModel
from cpuchat.protocol.messages import Failed, LoadOptions, Sampling, TextDelta
from tests.support.chatting import Answer, chat, collect
from tests.support.remote_server import Reply, connected, remote_server


async def test_stopping_closes_the_connection_and_keeps_the_text() -> None:
    async def answer(reply: Reply) -> None:
        await reply.head()
        await reply.text("partial")
        await reply.until_left()
        server.left.set()

    async with connected(answer) as (server, backend):
        events = []
        async for event in backend.generate(chat("Hello")):
            events.append(event)
            if isinstance(event, TextDelta):
                await backend.cancel()
        got = Answer(events)
        assert got.text == "partial"
        assert got.finished.stop_reason == "cancelled"
        await asyncio.wait_for(server.left.wait(), 180)


async def test_leaving_early_closes_the_connection() -> None:
    async def answer(reply: Reply) -> None:
        await reply.head()
        await reply.text("partial")
        await reply.until_left()
        server.left.set()

    async with connected(answer) as (server, backend):
        async with contextlib.aclosing(backend.generate(chat("Hello"))) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    break
        await asyncio.wait_for(server.left.wait(), 180)


async def test_a_killed_backend_ends_its_stream() -> None:
    async def answer(reply: Reply) -> None:
        await reply.head()
        await reply.text("partial")
        await reply.until_left()

    async with connected(answer) as (_, backend):
        events = []
        async for event in backend.generate(chat("Hello")):
            events.append(event)
            if isinstance(event, TextDelta):
                backend.kill()
        assert isinstance(events[-1], Failed) and events[-1].code == "interrupted"


async def test_a_load_that_does_not_end_can_be_cancelled() -> None:
    async def silence(reply: Reply) -> None:
        await reply.head(200, "application/json")
        await reply.until_left()

    async with remote_server(pages={"/v1/models": silence}) as server:
        backend = RemoteBackend()
        events = []
        async for event in backend.load(ServerModel(server.url), LoadOptions()):
            events.append(type(event).__name__)
            await backend.cancel()
        assert events == ["LoadProgress", "LoadCancelled"]
        await backend.close()


@pytest.mark.parametrize(
    ("offset", "pinned", "note"),
    [(None, None, ""), (1, None, ""), (0, None, "server still generating"), (0, 5, "")],
)
async def test_a_stop_is_said_to_have_failed_only_with_a_proof(
    offset: int | None, pinned: int | None, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slot with the seed of the request proves it; but one from the settings may be that of others, too."""
    monkeypatch.setattr("cpuchat.backend.remote.backend.STOP_SECONDS", 2.0)

    async def answer(reply: Reply) -> None:
        await reply.head()
        await reply.text("partial")
        await reply.until_left()

    async def slots(reply: Reply) -> None:
        chats = server.chats()
        params = {} if offset is None or not chats else {"params": {"seed": chats[-1].body["seed"] + offset}}
        await reply.json([{"is_processing": True, **params}])

    pages = {"/props": {"default_generation_settings": {"n_ctx": 2048}}, "/slots": slots}
    async with remote_server(answer=answer, owner="llamacpp", pages=pages) as server:
        backend = RemoteBackend()
        await collect(backend.load(ServerModel(server.url), LoadOptions()))
        events = []
        async for event in backend.generate(chat("Hello", sampling=Sampling(seed=pinned))):
            events.append(event)
            if isinstance(event, TextDelta):
                await backend.cancel()
        await backend.close()
    assert Answer(events).finished.note == note


async def test_a_slot_without_a_seed_proves_nothing() -> None:
    slots: list[dict[str, Any]] = [{"is_processing": True}]
    props = {"default_generation_settings": {"n_ctx": 2048}}
    async with remote_server(owner="llamacpp", pages={"/props": props, "/slots": slots}) as server:
        connection = Connection(server.url)
        adapter = await identify(connection)
        adapter.begin(chat("Hello"))
        assert await adapter.is_idle(5) is None
        slots[0]["params"] = {"seed": 6}
        assert await adapter.is_idle(5) is True
        slots[0]["params"] = {"seed": 5}
        assert await adapter.is_idle(5) is False
        adapter.begin(chat("Hello", sampling=Sampling(seed=5)))
        assert await adapter.is_idle(5) is None
        await connection.close()


async def test_a_request_of_somebody_else_is_not_taken_for_the_stopped_one() -> None:
    pages: dict[str, Any] = {"/metrics": "vllm:num_requests_running 1\n"}
    async with remote_server(owner="vllm", pages=pages) as server:
        connection = Connection(server.url)
        adapter = await identify(connection)
        adapter.begin(chat("Hello"))
        assert await adapter.is_idle(5) is None  # whose is it?
        await adapter.load(1)
        assert await adapter.is_idle(5) is False
        pages["/metrics"] = "vllm:num_requests_running 2\n"
        assert await adapter.is_idle(5) is None
        pages["/metrics"] = "vllm:num_requests_running 0\n"
        assert await adapter.is_idle(5) is True
        await connection.close()
