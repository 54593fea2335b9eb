"""Tests connections of the HTTP server: silent ones are closed, too many refused, and others answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from cpuchat.serving import server


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


@pytest.mark.parametrize("beginning", [b"", b"GET / HTTP/1.1\r\nHost: "])
async def test_silent_connections_are_closed_and_others_are_answered(
    beginning: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.2)
    listeners = server.listen("127.0.0.1", 0)
    port = listeners[0].getsockname()[1]
    async with server.serving(hello, listeners):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(beginning)
        with contextlib.suppress(ConnectionResetError):  # it was closed before it had written
            assert await reader.read() == b""
        writer.close()
        with monkeypatch.context() as patient:
            patient.setattr(server, "HEAD_SECONDS", 60.0)  # however long the machine takes
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            await reader.readuntil(b"hi")
        writer.write(b"GET / HT")  # a second request that never gets complete
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(("path", "kind"), [("/v1/chat/completions", "unavailable_error"), ("/v1/messages", "error")])
async def test_too_many_connections_are_told_in_the_form_of_the_dialect(
    path: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CONNECTIONS", 1)
    listeners = server.listen("127.0.0.1", 0)
    port = listeners[0].getsockname()[1]
    request = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode()
    async with server.serving(hello, listeners):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request)
        await reader.readuntil(b"hi")
        others, another = await asyncio.open_connection("127.0.0.1", port)
        another.write(request)
        head, _, body = (await others.read()).partition(b"\r\n\r\n")  # it closes the connection
        assert head.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in head
        found = json.loads(body)
        assert "Too many connections" in found["error"]["message"]
        assert kind == (found["type"] if path == "/v1/messages" else found["error"]["type"])
        writer.close()
        another.close()
