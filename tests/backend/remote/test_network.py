"""Tests what lies between the client and a server: certificates, proxies, silence, waits, connections used again."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from cpuchat.backend.remote import connection
from cpuchat.backend.remote.backend import RemoteBackend
from cpuchat.backend.remote.connection import Retries, Status
from cpuchat.config.servers import ServerModel
from cpuchat.protocol.messages import LoadOptions, ModelLoaded
from tests.support.chatting import Answer, chat, collect
from tests.support.remote_server import CERTIFICATE, Reply, connected, remote_server

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


async def test_a_server_that_falls_silent_is_given_up_and_its_text_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENCE", 0.5)
    given_up = asyncio.Event()

    async def answer(reply: Reply) -> None:
        await reply.head()
        await reply.text("partial")
        await given_up.wait()

    async with connected(answer) as (_, backend):
        got = await collect(backend.generate(chat("Hello")))
        given_up.set()
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
