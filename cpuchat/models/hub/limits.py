"""The HTTP client for everything that is asked of the hub, with limits: httpx and huggingface_hub wait for ever.

Imports httpx, which takes its time: to be imported only by who asks the hub.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from cpuchat.errors import HubError
from cpuchat.models.hub.environment import endpoint, host
from cpuchat.models.hub.errors import bad_redirect, too_slow

_CONNECT = 10.0
_GRACE = 10.0
_LEAST_RATE = 1 << 10
"""Bytes per second below which an answer counts as stuck, after `_GRACE` seconds."""
_PIECE = 1 << 16
_MAX_REFUSAL = 1 << 20
"""Bytes of an answer that is no content: of a redirect, of an error."""
_EXTENSION = "cpuchat.bounds"


@dataclass(frozen=True)
class Bounds:
    """What an answer may take. `most` counts bytes of its content, uncompressed; None where the reader counts them.

    `silence`: seconds without a byte; the head of the answer, redirects included, may take half as much again.
    `seconds`: for all of it. The default is for the API, whose answers become Python objects of 20 times the size.
    """

    most: int | None = 8 << 20
    silence: float = 8.0
    seconds: float = 120.0

    def asked(self) -> dict[str, Any]:
        """The extensions of a request that is made with these bounds."""
        return {_EXTENSION: self}


DEFAULT = Bounds()


def client() -> httpx.Client:
    """For `huggingface_hub.set_client_factory` too. Follows redirects to https, and to http only where the hub itself
    is asked by http; the token goes to no other host than the hub.

    Raises, besides what httpx does, while an answer is awaited or read:
        TooSlow: it takes too long.
        HubError: it is too large, or redirects to where we don't go.
    """
    hooks = {"request": [_limit_silence, _keep_token], "response": [_check_redirect, _limit_content]}
    return _Client(event_hooks=hooks, follow_redirects=True, headers={"accept-encoding": "gzip"})


class _Client(httpx.Client):
    def send(self, request: httpx.Request, *, stream: bool = False, **options: Any) -> httpx.Response:
        """As of httpx, but what comes before the content has a limit in time, too: looking up the name, and a head that
        drips or never ends."""
        sending = _Sending(lambda: super(_Client, self).send(request, stream=True, **options))
        request.extensions["trace"] = sending.trace
        sending.start()
        answer = sending.answer(1.5 * _bounds(request).silence)
        if not stream:
            try:
                answer.read()
            finally:
                answer.close()
        return answer


class _Sending(threading.Thread):
    """Waits for the head of an answer in a thread of its own, which can be left behind."""

    def __init__(self, send: Callable[[], httpx.Response]) -> None:
        super().__init__(name="hub", daemon=True)
        self._send = send
        self._ended = threading.Condition()
        self._left = False
        self._answer: httpx.Response | None = None
        self._error: BaseException | None = None
        self._sockets: list[socket.socket] = []

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Called by httpcore (https://www.encode.io/httpcore/extensions/#trace). Keeps connections that are made."""
        if event in ("connection.connect_tcp.complete", "http11.connect.start_tls.complete"):
            self._sockets.append(info["return_value"].get_extra_info("socket"))

    def run(self) -> None:
        answer, error = None, None
        try:
            answer = self._send()
        except BaseException as raised:
            error = raised
        with self._ended:
            self._answer, self._error = answer, error
            self._ended.notify_all()
            if self._left and answer is not None:
                answer.close()

    def answer(self, seconds: float) -> httpx.Response:
        """The answer, its content unread. Raises what sending raised, or TooSlow."""
        with self._ended:
            try:
                self._ended.wait_for(lambda: self._answer is not None or self._error is not None, seconds)
            finally:
                self._left = self._answer is None
        if self._error is not None:
            raise self._error
        if self._answer is None:
            for connection in self._sockets:  # a server that never ends its head would be listened to for ever
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            raise too_slow()
        return self._answer


def _bounds(request: httpx.Request) -> Bounds:
    return request.extensions.get(_EXTENSION, DEFAULT)


def _limit_silence(request: httpx.Request) -> None:
    # Not as the client's default: huggingface_hub asks for no timeout in so many words.
    silence = _bounds(request).silence
    request.extensions["timeout"] = httpx.Timeout(silence, connect=min(silence, _CONNECT)).as_dict()


def _keep_token(request: httpx.Request) -> None:
    """httpx takes it out of redirects; huggingface_hub puts it into whatever address the hub tells as the next page."""
    hub = httpx.URL(endpoint())
    if (request.url.host, request.url.port) != (hub.host, hub.port):
        request.headers.pop("authorization", None)


def _check_redirect(response: httpx.Response) -> None:
    response.headers.pop("link", None)  # no further pages: one holds what we ask for, and they may have no end
    if not response.has_redirect_location:
        return
    try:
        target = response.url.join(response.headers["location"])
    except (httpx.InvalidURL, ValueError):
        raise bad_redirect(response.url, "an address that is none") from None
    allowed = ("https", "http") if endpoint().lower().startswith("http://") else ("https",)
    if target.scheme in allowed and not target.host:
        raise bad_redirect(response.url, "an address that is none")
    if target.scheme not in allowed:
        raise bad_redirect(response.url, f"{target.scheme}://{target.host}, which is not https")


def _limit_content(response: httpx.Response) -> None:
    encoding = response.headers.pop("content-encoding", "identity").strip().lower()
    wanted = response.request.headers.get("accept-encoding", "")
    if response.status_code in (200, 206) and wanted == "identity" and encoding not in ("", "identity"):
        raise HubError(
            f"{host()} sent the file compressed, which was not asked for.",
            "A proxy may do that: try another network, or choose another repository.",
        )
    assert isinstance(response.stream, httpx.SyncByteStream)
    response.stream = _Limited(response, response.stream, encoding)


class _Limited(httpx.SyncByteStream):
    """The content of an answer, uncompressed piece by piece: a few MB of gzip can become gigabytes."""

    def __init__(self, response: httpx.Response, content: httpx.SyncByteStream, encoding: str) -> None:
        bounds = _bounds(response.request)
        self._is_content = response.status_code in (200, 206)
        self._most = bounds.most
        self._silence = bounds.silence
        self._content = content
        self._encoding = encoding
        self._began = time.monotonic()
        self._until = self._began + bounds.seconds

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for piece in self._uncompressed():
            size += len(piece)
            if not self._is_content and size > _MAX_REFUSAL:
                return  # what it refused is known already
            if self._most is not None and size > self._most:
                raise HubError(f"{host()} answered with more than {self._most >> 20} MiB.", "Ask for less.")
            yield piece

    def close(self) -> None:
        self._content.close()

    def _uncompressed(self) -> Iterator[bytes]:
        if self._encoding in ("", "identity"):
            yield from self._received()
            return
        if self._encoding not in ("gzip", "x-gzip", "deflate"):
            raise httpx.DecodingError(self._encoding)
        unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)
        is_empty = True
        try:
            for piece in self._received():
                is_empty = False
                while piece and not unpacker.eof:
                    yield unpacker.decompress(piece, _PIECE)
                    piece = unpacker.unconsumed_tail
            yield unpacker.flush()
        except zlib.error as error:
            raise httpx.DecodingError(str(error)) from None
        if not (unpacker.eof or is_empty):
            raise httpx.DecodingError("cut short")

    def _received(self) -> Iterator[bytes]:
        """As it comes from the network. The rate is that of each span of `_GRACE` seconds, or of the silence."""
        began, size = self._began, 0
        for piece in self._content:
            now = time.monotonic()
            size += len(piece)
            if now > self._until:
                raise too_slow()
            if now - began > min(_GRACE, self._silence):
                if size < _LEAST_RATE * (now - began):
                    raise too_slow()
                began, size = now, 0
            yield piece
