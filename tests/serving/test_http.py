"""Tests what clients of all kinds do with HTTP: offers of other protocols, connections that are half closed, bodies
that are no plain JSON, headers of proxies that nobody has named.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import socket
import sys
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from cpuchat.serving.app import make_app
from cpuchat.serving.server import local_user
from cpuchat.serving.service import InferenceService
from tests.serving.test_refusals import error
from tests.support.serving import HANG_GUARD, Server, chat

CHAT = "/v1/chat/completions"
BODY = json.dumps(chat("Hello", max_tokens=2)).encode()


def connect(running: Server) -> socket.socket:
    url = httpx.URL(running.url)
    return socket.create_connection((url.host, url.port or 80), HANG_GUARD)


def request(*headers: str, body: bytes = BODY, method: str = f"POST {CHAT}", close: bool = True) -> bytes:
    """Return a request as it is written; `close`: the server closes the connection after its answer."""
    lines = [f"{method} HTTP/1.1", "Host: localhost", *headers, *(["Connection: close"] if close else [])]
    if body and not any(one.startswith("Transfer-Encoding") for one in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def answered(running: Server, sent: bytes) -> tuple[int, bytes]:
    """Return the status of the last answer to what is sent, and all that came."""
    with connect(running) as connection:
        connection.sendall(sent)
        came = read_all(connection)
    return int(came.rpartition(b"HTTP/1.1 ")[2][:3]), came


@pytest.mark.parametrize("chunked", [False, True])
def test_an_offer_of_http_2_is_answered_as_if_it_were_not_there(tiny: Server, chunked: bool) -> None:
    """As every JDK's client sends it."""
    offer = ["Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA"]
    more, body = [], BODY
    if chunked:
        more, body = ["Transfer-Encoding: chunked"], f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n"
    with connect(tiny) as connection:
        connection.sendall(request(*offer, *more, body=body, close=False))
        came = b""
        while b'"usage"' not in came:
            came += connection.recv(1 << 16)
    assert came.startswith(b"HTTP/1.1 200")


def test_a_client_that_waits_for_100_continue_gets_it_before_it_sends_the_body(tiny: Server) -> None:
    with connect(tiny) as connection:
        connection.sendall(request("Expect: 100-continue")[: -len(BODY)])
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100")
        connection.sendall(BODY)
        assert read_all(connection).startswith(b"HTTP/1.1 200")
    large = request("Expect: 100-continue", "Content-Length: 99999999", body=b"")
    assert answered(tiny, large)[0] == 413


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        (gzip.compress(BODY), {"content-encoding": "gzip"}, (415, "unsupported")),
        (BODY, {"content-encoding": "identity"}, (200, "")),
        (codecs.BOM_UTF8 + BODY, {}, (200, "")),
        (BODY.decode().encode("utf-16"), {}, (400, "invalid_json")),
        ('{"messages": [{"role": "user", "content": "你好"}]}'.encode("gbk"), {}, (400, "invalid_json")),
        (BODY.replace(b"{", b"{:", 1), {}, (400, "invalid_json")),
        (BODY.replace(b'"temperature": 0', b'"temperature": NaN'), {}, (400, "invalid_json")),
        (BODY.replace(b'"temperature": 0', b'"temperature": 1e999'), {}, (400, "invalid_request")),
        (BODY + b"\n", {"content-type": "text/plain"}, (200, "")),
        (BODY + BODY, {}, (400, "invalid_json")),
    ],
    ids=["gzip", "plain", "mark", "utf-16", "gbk", "colon", "nan", "huge", "text", "two"],
)  # fmt: skip
def test_a_body_that_is_no_plain_json_is_refused_with_the_reason(
    tiny: Server, body: bytes, headers: dict[str, str], code: tuple[int, str]
) -> None:
    response = tiny.http.post(CHAT, content=body, headers=headers)
    assert (response.status_code, response.json().get("error", {}).get("code", "")) == code, response.text
    if code[0] == 415:
        assert "compressed (gzip). Send it as plain JSON" in error(response, 415)["message"]


@pytest.mark.parametrize(("method", "status"), [("HEAD /health", 200), ("HEAD /v1/models", 200), ("HEAD /none", 404)])
def test_a_probe_gets_a_status_without_a_body(tiny: Server, method: str, status: int) -> None:
    found, came = answered(tiny, request(body=b"", method=method))
    assert found == status and came.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("name", ["authorization", "x-stainless-helper-method", "openai-beta", "anthropic-version"])
async def test_a_page_may_send_the_headers_of_the_vendors_clients(name: str) -> None:
    conversation: Any = SimpleNamespace()
    served = httpx.ASGITransport(make_app(InferenceService(conversation), origins=("https://page.example",)))
    asks = {"origin": "https://page.example", "access-control-request-method": "POST"}
    async with httpx.AsyncClient(transport=served, base_url="http://localhost") as page:
        preflight = await page.options(CHAT, headers={**asks, "access-control-request-headers": name})
    assert preflight.status_code == 200
    assert name in preflight.headers["access-control-allow-headers"].lower()


FORGED = {
    "x-forwarded-for": "198.51.100.9", "forwarded": "for=198.51.100.9;proto=https", "x-real-ip": "198.51.100.9",
    "x-forwarded-proto": "https",
}  # fmt: skip


def test_a_client_cannot_ask_in_another_s_name(tiny: Server) -> None:
    """Nothing tells what another asked: what it names as its address counts neither for reuse nor in the log."""
    body = chat("A secret. " * 30, max_tokens=1)
    assert tiny.post(body).json()["timings"]["cache_n"] < 50
    assert tiny.http.post(CHAT, json=body, headers=FORGED).json()["timings"]["cache_n"] > 100
    log = (tiny.folder / "stderr.txt").read_text()
    assert "198.51.100.9" not in log and log.count("127.0.0.1  chat") >= 2


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's tables")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["IPv4", "IPv6"])
def test_the_user_at_the_other_end_is_told_by_both_ends_of_the_connection(family: socket.AddressFamily) -> None:
    """A socket with the same port on another address may be another user's."""
    host, mapped = ("127.0.0.1", "127.0.0.1") if family == socket.AF_INET else ("::", "::ffff:127.0.0.1")
    with socket.create_server((host, 0), family=family, dualstack_ipv6=family == socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            own = client.getsockname()[1]
            scope: dict[str, Any] = {"client": (mapped, own), "server": (mapped, port)}
            assert local_user(scope) == str(os.getuid())
            for other in ("127.0.0.2", "198.51.100.9", "unknown", ""):
                assert local_user({**scope, "client": (other, own)}) == ""
                assert local_user({**scope, "server": (other, port)}) == ""
    assert local_user({"client": None, "server": None}) == ""
