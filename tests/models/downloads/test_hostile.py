"""Tests servers that send another thing than was listed, more than that, or hardly anything: said soon."""

from __future__ import annotations

import pytest

from cpuchat.base.errors import DownloadFailed
from cpuchat.models.downloads.state import RetryPolicy
from tests.models.downloads.conftest import CONTENT, NAME, REPO, Site
from tests.support.hub_listening import Connection
from tests.support.hub_server import TOKEN, Fault, HubServer

SIZE = len(CONTENT)
LENIENT = RetryPolicy(first_wait=0.0, max_wait=0.0, attempts=1000)
"""Would try for a long time."""


def fetch(site: Site) -> None:
    site.fetch(site.order(retry_policy=LENIENT))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(Fault(content=CONTENT[:-1]), "bytes but listed", id="a shorter file"),
        pytest.param(Fault(headers={"Content-Range": f"bytes 5-9/{SIZE}"}), "byte range", id="another range"),
        pytest.param(
            Fault(where="hub", headers={"X-Linked-Etag": f'"{"a" * 64}"'}), "different file", id="another hash"
        ),
        pytest.param(Fault(status=403), "returned status 403", id="links that are refused"),
        pytest.param(Fault(status=204), "no file", id="no content"),
    ],
)
def test_what_stays_wrong_is_said_after_three_tries(site: Site, fault: Fault, words: str) -> None:
    site.hub.fault(REPO, NAME, *[fault] * 20)
    with pytest.raises(DownloadFailed, match=words) as caught:
        fetch(site)
    assert "refresh it" in caught.value.hint
    assert len([request for request in site.hub.requests if request.host == "hub"]) == 3


def test_a_file_that_never_ends_is_taken_as_far_as_it_was_listed(site: Site) -> None:
    def write(connection: Connection) -> None:
        head = f"HTTP/1.1 206 Part\r\nContent-Range: bytes 0-{SIZE - 1}/{SIZE}\r\n\r\n"
        connection.send_body(head.encode() + CONTENT)
        while True:  # until the client leaves
            connection.send_body(bytes(1 << 16))

    site.hub.fault(REPO, NAME, Fault(raw=write))
    assert site.fetch().read_bytes() == CONTENT


def test_a_server_that_ends_each_response_early_is_given_up(site: Site) -> None:
    """It got an attempt for each 64 KiB of a large file."""
    site.put({NAME: CONTENT * 20})
    site.hub.fault(REPO, NAME, Fault(cut_after=70_000, times=-1))
    with pytest.raises(DownloadFailed, match="Failed after 4 attempts without progress"):
        site.fetch()


def test_a_refusal_in_an_odd_form_is_waited_for_like_others(site: Site) -> None:
    """huggingface_hub looks into it for words, as if it were always an object."""

    def write(connection: Connection) -> None:
        connection.send_head(503, {"Content-Length": "9", "Content-Type": "application/json"})
        connection.send_body(b'["busy"]\n')

    site.hub.fault(REPO, NAME, Fault(where="hub", raw=write))
    assert site.fetch().read_bytes() == CONTENT


def test_the_token_follows_no_redirect(site: Site, hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    elsewhere = f"{hub_server.content_host}/{REPO}/{site.commit}/{NAME}"
    back = f"{hub_server.endpoint}/{REPO}/resolve/{site.commit}/{NAME}"
    site.hub.fault(REPO, NAME, Fault(where="hub", headers={"Location": elsewhere}))
    site.hub.fault(REPO, NAME, Fault(status=302, headers={"Location": back}))
    assert site.fetch().read_bytes() == CONTENT
    assert [(request.host, request.authorized) for request in site.hub.requests] == [
        ("hub", True),
        ("content", False),
        ("hub", False),
        ("content", False),
    ]
