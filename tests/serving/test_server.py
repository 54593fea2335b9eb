"""Tests connections on which nothing comes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cpuchat.serving import server


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(server, "CONNECTIONS", 4)


@pytest.mark.usefixtures("impatient")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("beginning", [b"", b"GET / HTTP/1.1\r\nHost: "])
async def test_silent_connections_are_closed_and_others_are_answered(beginning: bytes) -> None:
    listener = server.listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    async with server.serving(hello, listener):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        for reader, writer in silent:
            writer.write(beginning)
            assert await reader.read() == b""
            writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await reader.readuntil(b"hi")
        writer.write(b"GET / HT")  # a second request that never gets complete
        assert await reader.read() == b""
        writer.close()
