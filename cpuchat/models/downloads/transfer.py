"""Appends the bytes of one file from the hub to its partial file, from any offset.

Not by `hf_hub_download`: that (huggingface_hub 1.x) starts over when a transfer breaks off, and checks lengths only.
Its headers and errors are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from cpuchat.models.downloads.hf_cache import size_of
from cpuchat.models.downloads.retrying import BrokenResponse, WrongResponse
from cpuchat.models.hub.connection import headers, raise_for_status
from cpuchat.models.hub.environment import endpoint, host
from cpuchat.models.hub.repository import HubFile
from cpuchat.text import clean_line

if TYPE_CHECKING:
    import httpx

_REFUSED = frozenset({400, 401, 403, 404, 410, 416})
"""Statuses of expired signed links: the next attempt gets a new link."""


def transfer(
    repo: str, revision: str, file: HubFile, part: Path, *, idle_timeout: float, on_written: Callable[[int], None]
) -> None:
    """Append what is missing of `file` to `part`, in one request.

    Every piece is written as it arrives, so killing this process loses only what was still in the network.
    `on_written` gets the size of the partial file after each.

    Raises:
        BrokenResponse, TooSlow, httpx.HTTPError: the transfer did not finish; the partial file has what arrived.
        HubError: a forbidden redirect, or a compressed response.
        OSError: the partial file could not be written.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    size = size_of(part)
    if size > file.size:  # not one of ours
        part.unlink()
        size = 0
    with part.open("ab", buffering=0) as stream:
        on_written(size)
        for piece in _pieces(repo, revision, file, size, idle_timeout):
            rest = memoryview(piece)
            while rest:  # a disk that is getting full takes only some of it
                written = stream.write(rest)
                rest = rest[written:]
                size += written
                on_written(size)
    if size < file.size:
        raise BrokenResponse(f"{host()} closed the connection before the end of the file.")


def _pieces(repo: str, revision: str, file: HubFile, offset: int, idle_timeout: float) -> Iterator[bytes]:
    """Yield the content from `offset` on, never more than the file's size."""
    missing = file.size - offset
    if missing == 0:
        return
    with _request(repo, revision, file, offset, idle_timeout) as response:
        # A server without range support sends the file from its beginning.
        skip = offset - _first_byte(response, file, offset)
        for piece in response.iter_raw():
            wanted = piece[skip : skip + missing]
            skip = max(skip - len(piece), 0)
            missing -= len(wanted)
            if wanted:
                yield wanted
            if not missing:  # what follows is not part of the file, and may never end
                return


@contextmanager
def _request(repo: str, revision: str, file: HubFile, offset: int, idle_timeout: float) -> Iterator[httpx.Response]:
    """Yield the response of the last server in the chain of redirects. Each attempt starts at the hub: signed links
    expire.

    httpx passes the Authorization header on only within the host and port that it was meant for.
    """
    from cpuchat.models.hub.limits import Bounds

    url = f"{endpoint()}/{quote(repo)}/resolve/{quote(revision, safe='')}/{quote(file.path)}"
    sent = {**headers(), "accept-encoding": "identity", "range": f"bytes={offset}-"}
    bounds = Bounds(max_bytes=None, idle_timeout=idle_timeout, seconds=inf)
    with _client().stream("GET", url, headers=sent, extensions=bounds.extensions()) as response:
        elsewhere = bool(response.history) and response.url.netloc != response.history[0].url.netloc
        if elsewhere and response.status_code in _REFUSED:
            raise WrongResponse(f"The download server of {host()} returned status {response.status_code}.")
        raise_for_status(response)
        yield response


@cache
def _client() -> httpx.Client:
    """Return an HTTP client separate from huggingface_hub's, whose responses have other limits."""
    from cpuchat.models.hub.limits import client

    return client()


def _first_byte(response: httpx.Response, file: HubFile, offset: int) -> int:
    """Return at which byte of the file the body starts: `offset` or 0.

    Raises:
        BrokenResponse: a web page.
        WrongResponse: not this file, or not the requested range.
    """
    if response.status_code not in (200, 206):
        raise WrongResponse(f"{host()} sent no file (status {response.status_code}).")
    if response.headers.get("content-type", "").startswith("text/html"):
        raise BrokenResponse(f"Received a web page instead of the file, from {host()} or a login page of this network.")
    for hop in (*response.history, response):
        etag = hop.headers.get("x-linked-etag", "").removeprefix("W/").strip('"')
        if etag and etag != file.etag:
            raise WrongResponse(f"{host()} serves a different file than it listed.")
    start, size = 0, response.headers.get("content-length")
    if response.status_code == 206:
        span, _, size = response.headers.get("content-range", "").removeprefix("bytes ").partition("/")
        start = offset
        if span.partition("-")[0] != str(offset):
            raise WrongResponse(f"{host()} sent a different byte range than requested.")
    if size is not None and size != str(file.size):
        raise WrongResponse(f"{host()} sends {clean_line(size)[:20]} bytes but listed {file.size}.")
    return start
