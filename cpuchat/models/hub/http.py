"""The HTTP client for all requests to the hub, with limits on time and size (httpx and huggingface_hub have none), and
with proxies and certificates by the environment variables that say so, which errors name.

httpx reads these variables, too, but fails on ranges and brackets in NO_PROXY, on a proxy that no request would use,
and without naming the variable.

Imports httpx, which takes its time: import this only where the hub is contacted.
"""

from __future__ import annotations

import ipaddress
import os
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx

from cpuchat.base.errors import HubError, UsageError
from cpuchat.base.text import without_password
from cpuchat.models.hub.errors import PROXY, bad_redirect, endpoint, host, too_slow

_CONNECT = 10.0
GRACE = 10.0
MIN_RATE = 1 << 10
"""Bytes per second below which a response counts as stuck, after `GRACE` seconds."""
_MAX_ERROR_BODY = 1 << 20  # bytes of the body of a redirect or an error
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

    Raises UsageError: certificates cannot be read. A request raises, besides what httpx does, UsageError: the proxy's
    address is not valid; TooSlow: it takes too long; HubError: it is too large, or a forbidden redirect."""
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
        proxy = request.extensions[PROXY] = proxy_for(str(request.url))
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


_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PORTS = {"http": 80, "https": 443}


class ProxySetting(NamedTuple):
    """The proxy that a variable names. `address` may hold a password."""

    variable: str
    address: str

    def open(self, context: ssl.SSLContext) -> httpx.Proxy:
        """Return it for httpx. Raises UsageError: it is not the address of a proxy; HubError: the package for SOCKS
        proxies is missing."""
        address = self.address.strip().replace("socks://", "socks5://", 1)  # as desktops write it
        address = address if "://" in address else f"http://{address}"
        if address.startswith("socks5") and find_spec("socksio") is None:
            raise HubError(
                f"{self.variable} names a SOCKS proxy, but the package for it is not installed.",
                "Install httpx[socks], or unset it.",
            )
        with suppress(ValueError, httpx.InvalidURL):
            proxy = httpx.Proxy(address, ssl_context=context if address.startswith("https:") else None)
            if proxy.url.host and (proxy.url.port is None or 0 < proxy.url.port < 1 << 16):
                return proxy
        raise UsageError(
            f"{self.variable} is not the address of a proxy: {without_password(self.address)!r}.",
            "Set it to one such as http://HOST:PORT, or unset it.",
        )


def proxy_for(address: str) -> ProxySetting | None:
    """Return the proxy for an http or https address; None for a direct connection. Raises ValueError: its port is no
    number."""
    settings, url = getproxies(), urlsplit(address)  # of the system, too, on macOS and Windows
    scheme = next((one for one in (url.scheme, "all") if settings.get(one)), "")
    if not scheme or _is_exempt(url.hostname or "", url.port or _PORTS.get(url.scheme, 0), settings.get("no", "")):
        return None
    names = (f"{scheme}_proxy", f"{scheme}_PROXY".upper())
    return ProxySetting(next((one for one in names if os.environ.get(one)), "The system's proxy"), settings[scheme])


def _is_exempt(host: str, its_port: int, rules: str) -> bool:
    """Return whether NO_PROXY names `host`: `*`, a name and what ends with it, an address, a range of them, each with a
    port or not, with or without brackets."""
    for rule in rules.replace(",", " ").split():
        name, _, port = rule.rpartition(":") if rule.count(":") == 1 or "]:" in rule else (rule, "", "")
        name = name.strip("[]").replace("]", "")
        if rule == "*":
            return True
        if port and port != str(its_port):
            continue
        try:
            found = ipaddress.ip_address(host) in ipaddress.ip_network(name, strict=False)
        except ValueError:
            ending = name.lstrip("*").lstrip(".").lower()
            found = bool(ending) and f".{host}".endswith(f".{ending}")
        if found:
            return True
    return False


def certificates() -> ssl.SSLContext:
    """Return the authorities to trust: those of `_CERTIFICATES` that is set, else those of certifi. Raises UsageError:
    there are none at what the variable names."""
    variable = next((one for one in _CERTIFICATES if os.environ.get(one)), "")
    if not variable:
        return httpx.create_ssl_context(trust_env=False)
    path = Path(os.environ[variable])
    try:
        if not path.is_dir():
            return ssl.create_default_context(cafile=path)
        if any(path.iterdir()):
            return ssl.create_default_context(capath=path)
        why = "is empty"
    except FileNotFoundError:
        why = "does not exist"
    except ssl.SSLError:
        why = "has no certificates in PEM format"
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    raise UsageError(f"{variable} names {path}, which {why}.", "Set it to the certificates to trust, or unset it.")
