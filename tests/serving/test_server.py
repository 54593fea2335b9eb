"""Tests connections on which nothing comes, and the addresses that are listened on."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from typing import Any

import httpx
import psutil
import pytest

from cpuchat.cli.serve import MAX_LINES, LineLimit
from cpuchat.serving import server
from tests.cli.program import HANG_GUARD
from tests.support.serving import Server, chat


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(server, "CONNECTIONS", 4)


@pytest.mark.usefixtures("impatient")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("beginning", [b"", b"GET / HTTP/1.1\r\nHost: "])
async def test_silent_connections_are_closed_and_others_are_answered(
    beginning: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    listeners = server.listen("127.0.0.1", 0)
    port = listeners[0].getsockname()[1]
    async with server.serving(hello, listeners):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        for _, writer in silent:
            writer.write(beginning)
        for reader, writer in silent:
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


async def test_every_address_of_a_name_is_listened_on_and_one_that_is_missing_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("127.0.0.1", "127.0.0.2", "203.0.113.1")  # the last is nobody's
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (name, 0)) for name in names]
    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        listeners = server.listen("here", 0)
    first, second = (one.getsockname() for one in listeners)
    assert (first[0], second[0], second[1]) == ("127.0.0.1", "127.0.0.2", first[1])
    async with server.serving(hello, listeners):
        for host, port in (first, second):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()


@pytest.mark.timeout(180)
def test_a_flood_of_connections_shuts_out_nobody_and_fills_no_log(tiny: Server) -> None:
    """A request is answered while silent connections, unfinished bodies and broken requests take all descriptors."""
    resource.prlimit(tiny.process.pid, resource.RLIMIT_NOFILE, (320, 320))
    address = httpx.URL(tiny.url)
    post = b"POST /v1/chat/completions/control HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
    with contextlib.ExitStack() as flood:
        for number in range(340):
            one = flood.enter_context(socket.create_connection((address.host, address.port or 80), HANG_GUARD))
            with contextlib.suppress(ConnectionError):  # it had to give way already
                one.sendall((b"", post, b"GET / HTTP/1.1\r\nHost", b"nonsense\r\n\r\n")[number % 4])
        assert tiny.post(chat("Hello", max_tokens=4)).status_code == 200
        assert tiny.metric("requests_total", endpoint="chat", result="ok") == 1
        assert psutil.Process(tiny.process.pid).num_fds() < 320
    log = (tiny.folder / "stderr.txt").read_text()
    assert "Traceback" not in log and len(log.splitlines()) < 20


def test_lines_of_refused_requests_are_limited() -> None:
    lines = LineLimit()
    assert [lines.take(1.0) for _ in range(MAX_LINES + 7)].count((True, 0)) == MAX_LINES
    assert [lines.take(2.5), lines.take(2.6)] == [(True, 7), (True, 0)]
