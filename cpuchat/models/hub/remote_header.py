"""Reads the header of a model file on the hub by byte ranges: some MB instead of the whole file."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import quote

from cpuchat.errors import HubError, HubOffline, ModelDamaged, TooSlow
from cpuchat.models.gguf.header import GGUFHeader, header_from
from cpuchat.models.hub import connection
from cpuchat.models.hub.environment import endpoint, host
from cpuchat.models.hub.errors import garbage
from cpuchat.models.hub.header_cache import HeaderCache
from cpuchat.models.hub.repository import HubFile

if TYPE_CHECKING:
    import httpx

_MORE = 1 << 20
"""Bytes that may come behind those that were asked for, from a server without ranges: we stop there ourselves."""
_RANGE = re.compile(r"bytes (?P<first>\d+)-\d+/(?P<total>\d+)$")


def read_remote_header(repo: str, revision: str, file: HubFile, kept: HeaderCache) -> GGUFHeader:
    """The header of one file, out of `kept` if it is there; else it is asked for, and kept.

    Raises:
        HubError and its kinds: it could not be read.
        ModelDamaged: it is no GGUF file, or its header contradicts itself.
    """
    label = Path(file.path)
    content = kept.get(file.etag)
    if content is not None:
        try:
            return header_from(_Kept(file, content), label)
        except ModelDamaged:
            kept.forget(file.etag)
    source = _Remote(repo, revision, file)
    header = header_from(source, label)
    kept.put(file.etag, bytes(source.content[: header.data_offset]))
    return header


class _Kept:
    """The first bytes of a file, as a source of headers."""

    def __init__(self, file: HubFile, content: bytes) -> None:
        self.name = PurePosixPath(file.path).name
        self.size = file.size
        self._content = content

    def read(self, offset: int, count: int) -> bytes:
        return self._content[offset : offset + count]


class _Remote:
    """A file on the hub, as a source of headers. `content`: what has been read so far, from the beginning."""

    def __init__(self, repo: str, revision: str, file: HubFile) -> None:
        self.name = PurePosixPath(file.path).name
        self.size = file.size
        self.content = bytearray()
        self._repo = repo
        self._url = f"{endpoint()}/{repo}/resolve/{quote(revision, safe='')}/{quote(file.path)}"

    def read(self, offset: int, count: int) -> bytes:
        count = min(count, self.size - offset)
        try:
            piece = self._ask(offset, count)
        except HubOffline as error:  # a connection that broke, or was closed while it waited for its next use
            if isinstance(error, TooSlow):
                raise
            piece = self._ask(offset, count)
        if len(piece) < count:
            raise HubError(f"{host()} sent less of {self.name} than it announced.", "Try again.")
        self.content += piece
        return piece

    def _ask(self, offset: int, count: int) -> bytes:
        wanted = {"range": f"bytes={offset}-{offset + count - 1}", "accept-encoding": "identity"}
        with connection.get(self._url, self._repo, wanted, most=offset + count + _MORE) as answer:
            if "html" in answer.headers.get("content-type", ""):
                raise garbage()
            if answer.status_code == 200:  # no ranges there, so it comes from its beginning
                return _body(answer, count, skip=offset)
            told = _RANGE.match(answer.headers.get("content-range", ""))
            if told is None or int(told["first"]) != offset or int(told["total"]) != self.size:
                raise HubError(f"{host()} sent another part of {self.name} than was asked for.", "Try again.")
            return _body(answer, count)


def _body(answer: httpx.Response, count: int, skip: int = 0) -> bytes:
    """Up to `count` bytes of it, after the first `skip`; what comes behind them is not fetched."""
    content = bytearray()
    for piece in answer.iter_bytes():
        content += piece
        if len(content) >= skip + count:
            break
    return bytes(content[skip : skip + count])
