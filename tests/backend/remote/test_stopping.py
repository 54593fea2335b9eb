"""Tests stops: the connection closes, the partial answer is kept, and whether the server still computes is known."""

from __future__ import annotations

import asyncio

from cpuchat.backend.remote.backend import RemoteBackend
from cpuchat.config.servers import ServerModel
from cpuchat.protocol.messages import LoadOptions, TextDelta
from tests.support.chatting import Answer, chat
from tests.support.remote_server import Reply, connected, remote_server


async def test_stopping_closes_the_connection_and_keeps_the_text_and_a_kill_ends_it() -> None:
    async def answer(reply: Reply) -> None:
        await reply.head()
        await reply.text("partial")
        await reply.until_left()
        server.left.set()

    async with connected(answer) as (server, backend):
        for is_kill in (False, True):
            events = []
            async for event in backend.generate(chat("Hello")):
                events.append(event)
                if isinstance(event, TextDelta) and is_kill:
                    backend.kill()
                elif isinstance(event, TextDelta):
                    await backend.cancel()
            got = Answer(events)
            assert got.text == "partial"
            end = got.failed.code if is_kill else got.finished.stop_reason
            assert end == ("interrupted" if is_kill else "cancelled")
            await asyncio.wait_for(server.left.wait(), 180)
            server.left.clear()


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


async def test_text_does_not_wait_for_the_next_part_of_the_answer() -> None:
    shown = asyncio.Event()

    async def answer(reply: Reply) -> None:
        await reply.head()
        for word in ("Hello", " there"):
            await reply.text(word)
        await shown.wait()
        await reply.finish()

    async with connected(answer) as (_, backend):
        events = []
        async for event in backend.generate(chat("Hello")):
            events.append(event)
            if Answer(events).text == "Hello there":
                shown.set()
        assert Answer(events).finished.stop_reason == "end"
