"""The bytes of one file, from the hub into the part beside its place in the cache, on from any byte.

Not by `hf_hub_download`: that one (huggingface_hub 1.x) starts anew when a transfer broke off, and compares lengths
only. Its headers and errors are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from cpuchat.models.downloads.layout import size_of
from cpuchat.models.downloads.retrying import BrokenAnswer, WrongAnswer
from cpuchat.models.hub.connection import headers, raise_for_status
from cpuchat.models.hub.environment import endpoint, host
from cpuchat.models.hub.repository import HubFile
from cpuchat.text import clean_line

if TYPE_CHECKING:
    import httpx

_REFUSED = frozenset({400, 401, 403, 404, 410, 416})
"""By a server of signed links: the next try gets a new link."""


def transfer(
    repo: str, revision: str, file: HubFile, part: Path, *, silence: float, grown: Callable[[int], None]
) -> None:
    """Append to `part` what is missing of `file`, in one request.

    Every piece is handed to the system as it arrives: whoever kills this process loses what was still in the network.
    `grown(size)` is called after each.

    Raises:
        BrokenAnswer, TooSlow, httpx.HTTPError: it did not come to the end; the part has what came.
        HubError: a redirect to where we don't go, or an answer that is compressed.
        OSError: the part could not be written.
    """
    part.parent.mkdir(parents=True, exist_ok=True)
    size = size_of(part)
    if size > file.size:  # none of ours
        part.unlink()
        size = 0
    with part.open("ab", buffering=0) as stream:
        grown(size)
        for piece in _pieces(repo, revision, file, size, silence):
            rest = memoryview(piece)
            while rest:  # a disk that gets full takes a piece of it
                written = stream.write(rest)
                rest = rest[written:]
                size += written
                grown(size)
    if size < file.size:
        raise BrokenAnswer(f"{host()} ended the answer before the end of the file.")


def _pieces(repo: str, revision: str, file: HubFile, offset: int, silence: float) -> Iterator[bytes]:
    """The content from `offset` on, never more than there is to be."""
    missing = file.size - offset
    if missing == 0:
        return
    with _asked(repo, revision, file, offset, silence) as answer:
        # A server that doesn't know ranges sends the file from its beginning.
        skip = offset - _beginning(answer, file, offset)
        for piece in answer.iter_raw():
            wanted = piece[skip : skip + missing]
            skip = max(skip - len(piece), 0)
            missing -= len(wanted)
            if wanted:
                yield wanted
            if not missing:  # what comes behind it is none of the file, and may have no end
                return


@contextmanager
def _asked(repo: str, revision: str, file: HubFile, offset: int, silence: float) -> Iterator[httpx.Response]:
    """The answer of the last server in the chain of redirects. Each try begins at the hub: signed links run out.

    httpx passes the Authorization header on only within the host and port that it was meant for.
    """
    from cpuchat.models.hub.limits import Bounds

    url = f"{endpoint()}/{quote(repo)}/resolve/{quote(revision, safe='')}/{quote(file.path)}"
    sent = {**headers(), "accept-encoding": "identity", "range": f"bytes={offset}-"}
    bounds = Bounds(most=None, silence=silence, seconds=inf)
    with _client().stream("GET", url, headers=sent, extensions=bounds.asked()) as answer:
        elsewhere = bool(answer.history) and answer.url.netloc != answer.history[0].url.netloc
        if elsewhere and answer.status_code in _REFUSED:
            raise WrongAnswer(f"The server that {host()} points to refused with {answer.status_code}.")
        raise_for_status(answer)
        yield answer


@cache
def _client() -> httpx.Client:
    """Apart from that of huggingface_hub, whose answers are counted in other ways."""
    from cpuchat.models.hub.limits import client

    return client()


def _beginning(answer: httpx.Response, file: HubFile, offset: int) -> int:
    """At which byte of the file the body begins: `offset` or 0.

    Raises:
        BrokenAnswer: a web page.
        WrongAnswer: not this file, or not the piece that was asked for.
    """
    if answer.status_code not in (200, 206):
        raise WrongAnswer(f"{host()} sent no file, and no reason (status {answer.status_code}).")
    if answer.headers.get("content-type", "").startswith("text/html"):
        raise BrokenAnswer(f"A web page came in the place of the file: {host()}, or a login page of this network.")
    for hop in (*answer.history, answer):
        etag = hop.headers.get("x-linked-etag", "").removeprefix("W/").strip('"')
        if etag and etag != file.etag:
            raise WrongAnswer(f"{host()} offers another file than it listed.")
    start, size = 0, answer.headers.get("content-length")
    if answer.status_code == 206:
        span, _, size = answer.headers.get("content-range", "").removeprefix("bytes ").partition("/")
        start = offset
        if span.partition("-")[0] != str(offset):
            raise WrongAnswer(f"{host()} sent another piece of the file than was asked for.")
    if size is not None and size != str(file.size):
        raise WrongAnswer(f"{host()} has {clean_line(size)[:20]} bytes where it listed {file.size}.")
    return start
