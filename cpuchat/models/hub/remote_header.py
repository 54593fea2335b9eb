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
from cpuchat.models.hub.errors import invalid_response
from cpuchat.models.hub.header_cache import HeaderCache
from cpuchat.models.hub.repository import HubFile

if TYPE_CHECKING:
    import httpx

_MORE = 1 << 20
"""Bytes that a server without range support may send beyond those requested; the reader stops by itself."""
_RANGE = re.compile(r"bytes (?P<first>\d+)-\d+/(?P<total>\d+)$")


def read_remote_header(repo: str, revision: str, file: HubFile, cache: HeaderCache) -> GGUFHeader:
    """Read the header of one file from the cache, else from the hub.

    Raises:
        HubError and its kinds: it could not be read.
        ModelDamaged: not a GGUF file, or a contradictory header.
    """
    label = Path(file.path)
    content = cache.get(file.etag)
    if content is not None:
        try:
            return header_from(_Cached(file, content), label)
        except ModelDamaged:
            cache.remove(file.etag)
    source = _Remote(repo, revision, file)
    header = header_from(source, label)
    cache.put(file.etag, bytes(source.content[: header.data_offset]))
    return header


class _Cached:
    """The first bytes of a file, as a source of headers."""

    def __init__(self, file: HubFile, content: bytes) -> None:
        self.name = PurePosixPath(file.path).name
        self.size = file.size
        self._content = content

    def read(self, offset: int, count: int) -> bytes:
        return self._content[offset : offset + count]


class _Remote:
    """A file on the hub, as a source of headers. `content`: what has been read so far, from the first byte on."""

    def __init__(self, repo: str, revision: str, file: HubFile) -> None:
        self.name = PurePosixPath(file.path).name
        self.size = file.size
        self.content = bytearray()
        self._repo = repo
        self._url = f"{endpoint()}/{repo}/resolve/{quote(revision, safe='')}/{quote(file.path)}"

    def read(self, offset: int, count: int) -> bytes:
        count = min(count, self.size - offset)
        try:
            piece = self._request(offset, count)
        except HubOffline as error:  # a lost connection, or one that was closed while idle
            if isinstance(error, TooSlow):
                raise
            piece = self._request(offset, count)
        if len(piece) < count:
            raise HubError(f"{host()} sent fewer bytes of {self.name} than announced.", "Try again.")
        self.content += piece
        return piece

    def _request(self, offset: int, count: int) -> bytes:
        wanted = {"range": f"bytes={offset}-{offset + count - 1}", "accept-encoding": "identity"}
        with connection.get(self._url, self._repo, wanted, max_bytes=offset + count + _MORE) as response:
            if "html" in response.headers.get("content-type", ""):
                raise invalid_response()
            if response.status_code == 200:  # no range support: it sends the file from its beginning
                return _body(response, count, skip=offset)
            sent = _RANGE.match(response.headers.get("content-range", ""))
            if sent is None or int(sent["first"]) != offset or int(sent["total"]) != self.size:
                raise HubError(f"{host()} sent a different range of {self.name} than requested.", "Try again.")
            return _body(response, count)


def _body(response: httpx.Response, count: int, skip: int = 0) -> bytes:
    """Return up to `count` bytes of the body after the first `skip`; the rest is not fetched."""
    content = bytearray()
    for piece in response.iter_bytes():
        content += piece
        if len(content) >= skip + count:
            break
    return bytes(content[skip : skip + count])
