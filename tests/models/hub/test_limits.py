"""Tests a hub that answers too much, too slowly, compressed, without an end, or from elsewhere."""

from __future__ import annotations

import gzip
import json

import httpx
import pytest

from cpuchat.base.errors import HubError, HubOffline, TooSlow
from cpuchat.models.hub import http
from cpuchat.models.hub.client import Hub
from cpuchat.models.hub.http import ResponseLimits
from tests.support.hub_listening import Connection
from tests.support.hub_server import TOKEN, Fault, Gate, HubServer

REPO = "some/Tiny-GGUF"
MIB = 1 << 20


def flood(head: bytes, piece: bytes) -> Fault:
    """Write an answer that never ends."""

    def write(connection: Connection) -> None:
        connection.send_body(head)
        while True:  # until the client leaves
            connection.send_body(piece)

    return Fault(where="api", raw=write)


def test_a_compressed_answer_was_not_asked_for(hub_server: HubServer) -> None:
    page = gzip.compress(b"[" + b" " * 32 * MIB + b"]")
    hub_server.fault("", "", Fault(where="api", page=page, headers={"Content-Encoding": "gzip"}))
    with pytest.raises(HubError, match="sent a compressed response"):
        Hub().search("tiny")


@pytest.mark.parametrize(("status", "words"), [(b"200 OK", "more than 8 MiB"), (b"503 No", "status 503")])
def test_an_answer_without_end_is_given_up_and_a_refusal_is_still_one(
    hub_server: HubServer, status: bytes, words: str
) -> None:
    hub_server.fault("", "", flood(b"HTTP/1.1 %s\r\n\r\n[" % status, b" " * MIB))
    with pytest.raises(HubError, match=words):
        Hub().search("tiny")


def test_a_hub_that_says_nothing_is_not_waited_for(hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "DEFAULT", ResponseLimits(idle_timeout=0.2))
    hub_server.fault("", "", Fault(where="api", gate=Gate()))
    with pytest.raises(HubOffline, match="did not answer in time"):
        Hub().search("tiny")


def test_an_answer_that_drips_is_given_up(hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every piece counts as one that came too late and brought too little."""
    hub_server.add(REPO, {"a.gguf": b"1"})
    monkeypatch.setattr(http, "GRACE", -1.0)
    monkeypatch.setattr(http, "MIN_RATE", 1 << 60)
    with pytest.raises(TooSlow, match="did not answer in time"):
        Hub().repository(REPO)


def test_there_are_no_further_pages_and_no_token_for_who_would_serve_them(
    hub_server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub_server.add(REPO, {"a.gguf": b"1"})
    link = f'<{hub_server.content_host}/some/Tiny-GGUF/next>; rel="next"'
    hits = json.dumps([{"id": REPO}]).encode()
    hub_server.fault("", "", Fault(where="api", page=hits, headers={"Link": link}))
    assert [found.id for found in Hub().search("tiny")] == [REPO]
    assert [request.host for request in hub_server.requests] == ["hub"]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("file:///etc/passwd", "redirects to file://, which is not https"),
        ("http://[::1", "redirects to an invalid address"),
        ("/api/models?again", "redirects in a loop"),
    ],
)
def test_a_redirect_to_where_we_do_not_go_is_named(hub_server: HubServer, target: str, words: str) -> None:
    hub_server.fault("", "", Fault(where="api", status=302, headers={"Location": target}, times=-1))
    with pytest.raises(HubError) as caught:
        Hub().search("tiny")
    assert words in caught.value.message
    assert "Try another network" in caught.value.hint


def test_a_redirect_to_a_host_that_is_not_there_names_it(hub_server: HubServer) -> None:
    with HubServer() as gone:
        address = gone.endpoint
    hub_server.fault("", "", Fault(where="api", status=307, headers={"Location": f"{address}/x?signature=secret"}))
    with pytest.raises(HubOffline) as caught:
        Hub().search("tiny")
    assert f"{address.partition('://')[2]}, where" in caught.value.message
    assert "secret" not in str(caught.value)


def test_a_hub_of_https_does_not_send_us_to_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    answer = httpx.Response(302, headers={"location": "http://cdn.example/file?signature=secret"})
    answer.request = httpx.Request("GET", "https://hub.example/file")
    with pytest.raises(HubError, match=r"hub\.example redirects to http://cdn\.example, which is not https") as caught:
        for check in http.client().event_hooks["response"]:
            check(answer)
    assert "secret" not in str(caught.value)
