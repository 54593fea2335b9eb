"""Tests the HTTP server: tokens, addresses and web pages that may use it, and connections: silent or too many."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from cpuchat.base.errors import UsageError
from cpuchat.config.servers import RunningServer, recorded
from cpuchat.serving import server as http
from cpuchat.serving.server import TOKEN_VARIABLE, PortInUse, listen, read_token, serving
from tests.cli.program import run
from tests.support.serving import chat, server

TOKEN = "a-token-for-the-tests-0123456789"


def test_a_token_is_needed_and_compared(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)  # the worker must not inherit it
    arguments = ("--host", "0.0.0.0", "--cors-origin", "https://page.example")
    with server(tiny_model, tmp_path, *arguments, token=TOKEN) as running:
        assert running.post(chat("Hello")).json()["choices"]
        assert running.http.get("/metrics").status_code == 200
        for key in ("wrong", TOKEN + "x", TOKEN[:-1], "é"):
            refused = running.http.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()})
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
        assert running.http.get("/metrics", headers={"authorization": ""}).status_code == 401
        assert running.http.get("/health", headers={"authorization": ""}).status_code == 200
        allowed = running.http.get("/v1/models", headers={"origin": "https://page.example"})
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"
        assert running.http.get("/v1/models", headers={"origin": "https://evil.example"}).status_code == 403
        preflight = {"origin": "https://page.example", "access-control-request-method": "POST", "authorization": ""}
        asked = running.http.options("/v1/chat/completions", headers=preflight)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (200, "https://page.example")
        own = psutil.Process(running.process.pid).cmdline()
        assert TOKEN not in " ".join([*own, *running.worker.cmdline(), *running.worker.environ().values()])


@pytest.mark.parametrize(
    ("option", "told"), [(("--host", "0.0.0.0"), TOKEN_VARIABLE), (("--parallel", "99"), "--parallel")]
)
def test_what_cannot_be_served_is_refused(tiny_model: Path, option: tuple[str, str], told: str) -> None:
    done = run("serve", str(tiny_model), *option)
    assert done.returncode == 2 and told in done.stderr


def test_a_port_in_use_is_told(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match="in use"):
            listen("127.0.0.1", port)
        with recorded(RunningServer(f"http://127.0.0.1:{port}", "another", os.getpid())):
            done = run("serve", str(tiny_model), "--port", str(port))
    assert done.returncode == 2
    assert "another is already served" in done.stderr


def test_unusable_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert read_token() == ""
    for text in ("", "short", "with spaces in between it", "ünïcödé-ünïcödé-ünïcödé"):
        monkeypatch.setenv(TOKEN_VARIABLE, text)
        with pytest.raises(UsageError, match=TOKEN_VARIABLE):
            read_token()
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert read_token() == TOKEN


async def hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


@pytest.mark.parametrize("beginning", [b"", b"GET / HTTP/1.1\r\nHost: "])
async def test_silent_connections_are_closed_and_others_are_answered(
    beginning: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.2)
    listeners = listen("127.0.0.1", 0)
    port = listeners[0].getsockname()[1]
    async with serving(hello, listeners):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(beginning)
        with contextlib.suppress(ConnectionResetError):  # it was closed before it had written
            assert await reader.read() == b""
        writer.close()
        with monkeypatch.context() as patient:
            patient.setattr(http, "HEAD_SECONDS", 60.0)  # however long the machine takes
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
    monkeypatch.setattr(http, "CONNECTIONS", 1)
    listeners = listen("127.0.0.1", 0)
    port = listeners[0].getsockname()[1]
    request = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode()
    async with serving(hello, listeners):
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
