"""The HTTP client for all requests to the hub, with limits on time and size: httpx and huggingface_hub have none.

Imports httpx, which takes its time: import this only where the hub is contacted.
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

from cpuchat.base.errors import HubError
from cpuchat.models.hub.errors import bad_redirect, endpoint, host, too_slow
from cpuchat.models.hub.network import ProxySetting, certificates, proxy_for

_CONNECT = 10.0
GRACE = 10.0
MIN_RATE = 1 << 10
"""Bytes per second below which a response counts as stuck, after `GRACE` seconds."""
_PIECE = 1 << 16
_MAX_ERROR_BODY = 1 << 20
"""Bytes of the body of a redirect or an error."""
_EXTENSION = "cpuchat.bounds"


@dataclass(frozen=True)
class ResponseLimits:
    """Limits of a response. `max_bytes` counts uncompressed content; None where the reader counts.

    `idle_timeout`: seconds without a byte; the head of the response, redirects included, may take half as much again.
    `seconds`: for all of it. The default is for the API, whose responses become Python objects of 20 times the size.
    """

    max_bytes: int | None = 8 << 20
    idle_timeout: float = 8.0
    seconds: float = 120.0

    def extensions(self) -> dict[str, Any]:
        """Return the extensions of a request with these limits."""
        return {_EXTENSION: self}


DEFAULT = ResponseLimits()


def client() -> httpx.Client:
    """Return a client, also for `huggingface_hub.set_client_factory`. It follows redirects to https, and to http only
    if the hub itself is reached by http; the token goes to no other host than the hub.

    Raises UsageError for certificates that cannot be read and, besides what httpx does, while a response is awaited or
    read:
        UsageError: the proxy's address is not valid.
        TooSlow: it takes too long.
        HubError: it is too large, or a forbidden redirect.
    """
    hooks = {"request": [_set_timeout, _keep_token], "response": [_check_redirect, _limit_content]}
    return _Client(transport=_Routes(), event_hooks=hooks, follow_redirects=True, headers={"accept-encoding": "gzip"})


class _Routes(httpx.BaseTransport):
    """Sends each request by the proxy that the environment names for it, or directly."""

    def __init__(self) -> None:
        self._certificates = certificates()
        self._open: dict[ProxySetting | None, httpx.HTTPTransport] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        proxy = proxy_for(str(request.url))
        if proxy not in self._open:
            opened = proxy.open(self._certificates) if proxy is not None else None
            self._open[proxy] = httpx.HTTPTransport(verify=self._certificates, proxy=opened)
        return self._open[proxy].handle_request(request)

    def close(self) -> None:
        for transport in self._open.values():
            transport.close()


class _Client(httpx.Client):
    def send(self, request: httpx.Request, *, stream: bool = False, **options: Any) -> httpx.Response:
        """Send as httpx does, with a time limit also on what comes before the content: the name lookup, and a head that
        drips or never ends."""
        sending = _Sending(lambda: super(_Client, self).send(request, stream=True, **options))
        request.extensions["trace"] = sending.trace
        sending.start()
        response = sending.response(1.5 * _bounds(request).idle_timeout)
        if not stream:
            try:
                response.read()
            finally:
                response.close()
        return response


class _Sending(threading.Thread):
    """Waits for the head of a response in its own thread, which can be abandoned."""

    def __init__(self, send: Callable[[], httpx.Response]) -> None:
        super().__init__(name="hub", daemon=True)
        self._send = send
        self._ended = threading.Condition()
        self._abandoned = False
        self._response: httpx.Response | None = None
        self._error: BaseException | None = None
        self._sockets: list[socket.socket] = []

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Record sockets; called by httpcore (https://www.encode.io/httpcore/extensions/#trace)."""
        if event in ("connection.connect_tcp.complete", "http11.connect.start_tls.complete"):
            self._sockets.append(info["return_value"].get_extra_info("socket"))

    def run(self) -> None:
        response, error = None, None
        try:
            response = self._send()
        except BaseException as raised:
            error = raised
        with self._ended:
            self._response, self._error = response, error
            self._ended.notify_all()
            if self._abandoned and response is not None:
                response.close()

    def response(self, seconds: float) -> httpx.Response:
        """Return the response, its content unread. Raises what sending raised, or TooSlow."""
        with self._ended:
            try:
                self._ended.wait_for(lambda: self._response is not None or self._error is not None, seconds)
            finally:
                self._abandoned = self._response is None
        if self._error is not None:
            raise self._error
        if self._response is None:
            for connection in self._sockets:  # the thread would read a head without end forever
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            raise too_slow()
        return self._response


def _bounds(request: httpx.Request) -> ResponseLimits:
    return request.extensions.get(_EXTENSION, DEFAULT)


def _set_timeout(request: httpx.Request) -> None:
    # Not as the client's default: huggingface_hub sets timeout=None explicitly.
    timeout = _bounds(request).idle_timeout
    request.extensions["timeout"] = httpx.Timeout(timeout, connect=min(timeout, _CONNECT)).as_dict()


def _keep_token(request: httpx.Request) -> None:
    """Remove the token from requests to other hosts: huggingface_hub sends it to any URL that the hub names as the next
    page. (httpx removes it from redirects.)"""
    hub = httpx.URL(endpoint())
    if (request.url.host, request.url.port) != (hub.host, hub.port):
        request.headers.pop("authorization", None)


def _check_redirect(response: httpx.Response) -> None:
    response.headers.pop("link", None)  # no further pages: one is enough, and they may have no end
    if not response.has_redirect_location:
        return
    try:
        target = response.url.join(response.headers["location"])
    except (httpx.InvalidURL, ValueError):
        raise bad_redirect(response.url, "an invalid address") from None
    allowed = ("https", "http") if endpoint().lower().startswith("http://") else ("https",)
    if target.scheme in allowed and not target.host:
        raise bad_redirect(response.url, "an invalid address")
    if target.scheme not in allowed:
        raise bad_redirect(response.url, f"{target.scheme}://{target.host}, which is not https")


def _limit_content(response: httpx.Response) -> None:
    encoding = response.headers.pop("content-encoding", "identity").strip().lower()
    wanted = response.request.headers.get("accept-encoding", "")
    if response.status_code in (200, 206) and wanted == "identity" and encoding not in ("", "identity"):
        raise HubError(
            f"{host()} sent the file compressed although that was not requested.",
            "A proxy may cause this: try another network or repository.",
        )
    assert isinstance(response.stream, httpx.SyncByteStream)
    response.stream = _Limited(response, response.stream, encoding)


class _Limited(httpx.SyncByteStream):
    """The content of a response, uncompressed piece by piece: a few MB of gzip can become gigabytes."""

    def __init__(self, response: httpx.Response, content: httpx.SyncByteStream, encoding: str) -> None:
        bounds = _bounds(response.request)
        self._is_content = response.status_code in (200, 206)
        self._max_bytes = bounds.max_bytes
        self._idle_timeout = bounds.idle_timeout
        self._content = content
        self._encoding = encoding
        self._began = time.monotonic()
        self._until = self._began + bounds.seconds

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for piece in self._uncompressed():
            size += len(piece)
            if not self._is_content and size > _MAX_ERROR_BODY:
                return  # the status is known already
            if self._max_bytes is not None and size > self._max_bytes:
                raise HubError(f"{host()} sent more than {self._max_bytes >> 20} MiB.", "Check HF_ENDPOINT.")
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
            raise httpx.DecodingError("truncated")

    def _received(self) -> Iterator[bytes]:
        """Yield what comes from the network; checks the rate over each `GRACE` seconds, or over the idle timeout."""
        began, size = self._began, 0
        for piece in self._content:
            now = time.monotonic()
            size += len(piece)
            if now > self._until:
                raise too_slow()
            if now - began > min(GRACE, self._idle_timeout):
                if size < MIN_RATE * (now - began):
                    raise too_slow()
                began, size = now, 0
            yield piece
