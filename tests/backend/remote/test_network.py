"""Tests what lies between the client and a server: certificates, proxies, silence, waits, connections used again."""

from __future__ import annotations

import asyncio
import contextlib
import json

import httpx
import pytest

from cpuchat.backend.remote import connection
from cpuchat.backend.remote.backend import RemoteBackend
from cpuchat.backend.remote.connection import Retries, Status
from cpuchat.config.servers import ServerModel
from cpuchat.protocol.messages import LoadOptions, ModelLoaded
from tests.support.chatting import Answer, chat, collect
from tests.support.remote_server import CERTIFICATE, Reply, remote_server

OTHER = "http://model.example"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)


async def loaded(url: str, backend: RemoteBackend | None = None) -> Answer:
    return await collect((backend or RemoteBackend()).load(ServerModel(url), LoadOptions()))


async def test_a_certificate_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with remote_server(tls=True) as server:
        refused = (await loaded(server.url)).failed
        assert "certificate" in refused.message and "SSL_CERT_FILE" in refused.hint
        assert not server.asked
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        backend = RemoteBackend()
        assert isinstance((await loaded(server.url, backend)).events[-1], ModelLoaded)
        assert (await collect(backend.generate(chat("Hello")))).text == "Hello there."
        await backend.close()


async def test_certificates_that_cannot_be_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/none")
    assert "SSL_CERT_FILE names /none, which does not exist" in (await loaded("https://127.0.0.1:9")).failed.message


async def test_a_proxy_is_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {f"{OTHER}/v1/models": {"data": [{"id": "m", "owned_by": "openai"}]}}
    async with remote_server(pages=pages) as proxy, remote_server(owner="openai") as here:
        monkeypatch.setenv("http_proxy", proxy.url)
        backend = RemoteBackend()
        await loaded(OTHER, backend)
        assert (await collect(backend.generate(chat("Hello")))).text == "Hello there."
        await backend.close()
        assert [asked.path for asked in proxy.asked] == [f"{OTHER}/v1/models", f"{OTHER}/v1/chat/completions"]
        assert isinstance((await loaded(here.url)).events[-1], ModelLoaded)
        assert len(proxy.asked) == 2 and here.asked


async def test_a_proxy_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async with remote_server() as proxy:
        monkeypatch.setenv("https_proxy", proxy.url)
        failed = (await loaded("https://model.example")).failed
        assert proxy.asked[0].method == "CONNECT"
    assert "proxy" in failed.message and "NO_PROXY" in failed.hint


async def test_a_server_that_falls_silent_is_given_up_and_its_text_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENCE", 0.5)
    given_up = asyncio.Event()

    async def answer(reply: Reply) -> None:
        await reply.head()
        await reply.text("partial")
        await given_up.wait()

    async with remote_server(answer=answer) as server:
        backend = RemoteBackend()
        await loaded(server.url, backend)
        got = await collect(backend.generate(chat("Hello")))
        given_up.set()
        await backend.close()
    assert got.text == "partial" and "timed out" in got.failed.message


def test_each_wait_is_longer_or_what_the_server_wants() -> None:
    lost, retries = httpx.ConnectError(""), Retries()
    assert [retries.next(lost) for _ in range(5)] == [(1, 0.25), (2, 0.5), (3, 1.0), (4, 2.0), (5, 4.0)]
    with pytest.raises(httpx.ConnectError):
        retries.next(lost)
    assert Retries().next(Status(429, {}, 3.0)) == (1, 3.0)
    for of_no_use in (Status(429, {}, 30.0), Status(400, {}, None)):
        with pytest.raises(Status):
            Retries().next(of_no_use)
    loading = Retries()
    assert loading.next(Status(503, {"message": "Loading model"}, None)) == (0, 1.0)
    assert loading.next(lost) == (1, 0.25)


async def test_attempts_before_the_one_that_was_answered_are_not_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BACK_OFF", (0.3,))

    async def answer(reply: Reply) -> None:
        await reply.head()
        await reply.text("Hello", timings={"prompt_n": 3, "prompt_ms": 0.001, "predicted_n": 1, "predicted_ms": 0.0})
        await reply.finish()

    props = {"default_generation_settings": {"n_ctx": 2048}, "endpoint_slots": False}
    async with remote_server(answer=answer, owner="llamacpp", pages={"/props": props}) as server:
        backend = RemoteBackend()
        await loaded(server.url, backend)
        server.refused = 1
        timings = (await collect(backend.generate(chat("Hello")))).timings
        await backend.close()
    assert timings.queue_ms is not None and timings.queue_ms <= timings.ttft_ms - 300


async def test_a_connection_is_used_again_after_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server on another machine, to which a new one takes time; this one only seems to be."""
    monkeypatch.setattr(connection, "is_local", lambda _: False)
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := (await reader.readuntil(b"\r\n\r\n")).lower():
                if head.startswith(b"get"):
                    page = json.dumps({"data": [{"id": "m", "owned_by": "openai"}]}).encode()
                    writer.write(b"HTTP/1.1 200 X\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page))
                    continue
                await reader.readexactly(int(head.partition(b"content-length: ")[2].split()[0]))
                writer.write(b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
                text = b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\ndata: [DONE]\n\n'
                writer.write(b"%x\r\n%s\r\n" % (len(text), text))
                await writer.drain()
                writer.write(b"0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        backend = RemoteBackend()
        await loaded(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", backend)
        for _ in range(2):
            assert (await collect(backend.generate(chat("Hello")))).text == "Hi"
        await backend.close()
    assert connections == 1
