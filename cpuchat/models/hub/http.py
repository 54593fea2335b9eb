"""The HTTP client for all requests to the hub, with limits on time and size: httpx and huggingface_hub have none.

Imports httpx, which takes its time: import this only where the hub is contacted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from cpuchat.base.errors import HubError
from cpuchat.models.hub.errors import bad_redirect, endpoint, host, too_slow
from cpuchat.models.hub.network import ProxySetting, certificates, proxy_for

_CONNECT = 10.0
GRACE = 10.0
MIN_RATE = 1 << 10
"""Bytes per second below which a response counts as stuck, after `GRACE` seconds."""
_MAX_ERROR_BODY = 1 << 20
"""Bytes of the body of a redirect or an error."""
LIMITS = "cpuchat.limits"
"""The extension of a request that has its `ResponseLimits`."""


@dataclass(frozen=True)
class ResponseLimits:
    """Limits of a response. `max_bytes` of the content; None where the reader counts.

    `idle_timeout`: seconds without a byte. `seconds`: for all of the content. The default is for the API, whose
    responses become Python objects of 20 times the size."""

    max_bytes: int | None = 8 << 20
    idle_timeout: float = 8.0
    seconds: float = 120.0


DEFAULT = ResponseLimits()


def client() -> httpx.Client:
    """Return a client, also for `huggingface_hub.set_client_factory`. It follows redirects to https, and to http only
    if the hub itself is reached by http; the token goes to no other host than the hub.

    Raises UsageError for certificates that cannot be read and, besides what httpx does, while a response is awaited or
    read:
        UsageError: the proxy's address is not valid.
        TooSlow: it takes too long.
        HubError: it is too large, or a forbidden redirect."""
    hooks = {"request": [_prepare], "response": [_check_redirect, _limit_content]}
    # Uncompressed: a few MB of gzip can become gigabytes.
    sent = {"accept-encoding": "identity"}
    return httpx.Client(transport=_Routes(), event_hooks=hooks, follow_redirects=True, headers=sent)


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


def _bounds(request: httpx.Request) -> ResponseLimits:
    return request.extensions.get(LIMITS, DEFAULT)


def _prepare(request: httpx.Request) -> None:
    # Not as the client's default: huggingface_hub sets timeout=None explicitly.
    timeout = _bounds(request).idle_timeout
    request.extensions["timeout"] = httpx.Timeout(timeout, connect=min(timeout, _CONNECT)).as_dict()
    # huggingface_hub sends the token to any URL that the hub names as the next page. (httpx removes it from redirects.)
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
    if response.status_code in (200, 206) and encoding not in ("", "identity"):
        raise HubError(
            f"{host()} sent a compressed response although that was not requested.",
            "A proxy may cause this: try another network or repository.",
        )
    assert isinstance(response.stream, httpx.SyncByteStream)
    response.stream = _Limited(response, response.stream)


class _Limited(httpx.SyncByteStream):
    """The content of a response, read no longer than its limits allow."""

    def __init__(self, response: httpx.Response, content: httpx.SyncByteStream) -> None:
        self._bounds = _bounds(response.request)
        self._is_content = response.status_code in (200, 206)
        self._content = content
        self._began = time.monotonic()

    def __iter__(self) -> Iterator[bytes]:
        """Yield what comes from the network; checks the rate over each `GRACE` seconds, or over the idle timeout."""
        bounds, began, size, recent = self._bounds, self._began, 0, 0
        for piece in self._content:
            now = time.monotonic()
            size, recent = size + len(piece), recent + len(piece)
            if now > self._began + bounds.seconds:
                raise too_slow()
            if now - began > min(GRACE, bounds.idle_timeout):
                if recent < MIN_RATE * (now - began):
                    raise too_slow()
                began, recent = now, 0
            if not self._is_content and size > _MAX_ERROR_BODY:
                return  # the status is known already
            if bounds.max_bytes is not None and size > bounds.max_bytes:
                raise HubError(f"{host()} sent more than {bounds.max_bytes >> 20} MiB.", "Check HF_ENDPOINT.")
            yield piece

    def close(self) -> None:
        self._content.close()
