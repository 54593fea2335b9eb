"""The HTTP connection to one server: proxies, TLS, timeouts, retries, and errors as messages.

Imports httpx, which takes its time: import this only when a server is used.
"""

from __future__ import annotations

import contextlib
import json
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec

from cpuchat import __version__
from cpuchat.backend.remote.stream import Attempt, decoded, error_words
from cpuchat.base.errors import ContextFull, CpuchatError, ServerBusy, ServerError, ServerRefused, ServerUnreachable
from cpuchat.base.text import clean_line
from cpuchat.config.servers import host, is_local
from cpuchat.models.hub.network import certificates, proxy_for

BACK_OFF = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each new attempt to reach a server."""
_CONNECT, _WRITE, _SMALL = 5.0, 60.0, 10.0
SILENCE = 600.0
"""Seconds without a byte after which a server counts as hung: prefill of a long prompt on a CPU takes minutes."""
_MOST_BODY = 8 << 20
_LONGEST_REASON = 300
_GATEWAY = frozenset({502, 504, 520, 521, 522, 523, 524})
_LOADING = 503
LOADING_SECONDS = 1.0
_MOST_LOOKS = 1_800  # at a server that loads its model


class Status(Exception):
    """Raised for an unsuccessful response. `error` is its `error` object, or what a server sends in place of one."""

    def __init__(self, code: int, error: dict[str, Any], retry_after: float | None) -> None:
        super().__init__(code)
        self.code, self.error, self.retry_after = code, error, retry_after

    @property
    def message(self) -> str:
        """Return the server's own words on one line."""
        return clean_line(str(self.error.get("message") or ""))[:_LONGEST_REASON]


class Connection:
    """Sends requests to one server. Use from one event loop; make it in a thread, because certificates take long to
    read.

    `round_trip` is the shortest time in seconds that a small request took; None before the first.
    """

    def __init__(self, server: str, key: str = "") -> None:
        self.server = server
        self.has_key = bool(key)
        self.round_trip: float | None = None
        self.root = f"{server}/v1"
        """The address of the OpenAI routes."""
        # llama-server hangs up after a stream: a connection kept is a dead one. A new one costs nothing here.
        self.is_kept = not is_local(server)
        """Whether a connection is used again after an answer that was read to its end."""
        headers = {"User-Agent": f"cpuchat/{__version__}", "Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            trusted = certificates() if server.startswith("https:") or self.is_kept else None
            proxy = proxy_for(server) if self.is_kept else None
            self._client = httpx.AsyncClient(
                headers=headers,
                timeout=httpx.Timeout(_SMALL, connect=_CONNECT, write=_WRITE),
                # A proxy of the environment reaches other machines, not this one; its authorities hold for both.
                trust_env=False,
                proxy=proxy.open(trusted) if trusted and proxy is not None else None,
                verify=trusted or False,
                follow_redirects=False,  # a redirect would take the key elsewhere
                event_hooks={"response": [_require_identity]},
                limits=httpx.Limits(max_keepalive_connections=4 if self.is_kept else 0, keepalive_expiry=30.0),
            )
        except CpuchatError as error:
            raise ServerError(error.message, error.hint) from None

    @property
    def is_open(self) -> bool:
        """Return whether others on the way can read what is sent."""
        return self.server.startswith("http:") and not is_local(self.server)

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at `path` of the server. Raises Status, httpx.HTTPError, ServerError."""
        return decoded(await self.get_bytes(path))

    async def get_bytes(self, path: str) -> bytes:
        """Return the content at `path`, or at an address. Raises as `get`."""
        url = path if path.startswith("http") else self.server + path
        sent = _Sent()
        async with self._client.stream("GET", url, extensions={"trace": sent}) as response:
            taken = time.monotonic() - sent.at
            body = await _body(response)
        if response.status_code != 200:
            raise _status(response, body)
        self.round_trip = taken if self.round_trip is None else min(taken, self.round_trip)
        return body

    async def post(self, path: str, content: dict[str, Any], seconds: float = _SMALL) -> dict[str, Any]:
        """Send a small request and return its answer, which begins within `seconds`. Raises as `get`."""
        timeout = httpx.Timeout(seconds, connect=_CONNECT, write=_WRITE)
        async with self._client.stream("POST", self._address(path), json=content, timeout=timeout) as response:
            body = await _body(response)
        if response.status_code != 200:
            raise _status(response, body)
        return decoded(body)

    @contextlib.asynccontextmanager
    async def stream(self, path: str, content: dict[str, Any]) -> AsyncIterator[tuple[httpx.Response, Attempt]]:
        """Send a request and yield the response while it streams. Leaving early closes the connection, by which the
        server knows that nobody reads any more. Raises Status, httpx.HTTPError: it was refused or not reached;
        ServerError: what comes is not a stream.
        """
        data = msgspec.json.encode(content)
        timeout = httpx.Timeout(SILENCE, connect=_CONNECT, write=_WRITE)
        headers = {"Content-Type": "application/json"}
        url, started, sent = self._address(path), time.monotonic(), _Sent()
        async with self._client.stream(
            "POST", url, content=data, headers=headers, timeout=timeout, extensions={"trace": sent}
        ) as response:
            if response.status_code != 200:
                raise _status(response, await _body(response))
            yield response, Attempt(started, sent.at - started)

    def _address(self, path: str) -> str:
        return self.root + path.removeprefix("/v1") if path.startswith("/v1/") else self.server + path

    def translate(self, error: Exception) -> CpuchatError:
        """Return the typed error for what a request raised; no key and no address with a path gets into it."""
        name = host(self.server)
        match error:
            case CpuchatError():
                return error
            case Status():
                return _refusal(error, name, self.has_key)
            case TimeoutError() | httpx.TimeoutException() if not isinstance(error, httpx.ConnectTimeout):
                return ServerUnreachable(f"{name} timed out.", "Check the server's load and its log.")
            case httpx.ProxyError():
                return ServerUnreachable(f"The proxy does not reach {name}.", "Check HTTPS_PROXY and NO_PROXY.")
            case httpx.ConnectError() if _is_certificate(error):
                return ServerUnreachable(
                    f"The certificate of {name} cannot be verified.",
                    "Set SSL_CERT_FILE to the certificate of your own authority.",
                )
            case httpx.ConnectError() | httpx.ConnectTimeout():
                return ServerUnreachable(f"{name} cannot be reached.", "Is the server running? Check its address.")
            case httpx.TransportError():
                return ServerUnreachable(f"The connection to {name} was lost.", "Try again.")
            case httpx.InvalidURL() | UnicodeError():
                return ServerError(f"{name} is not a valid address.", "Write it as http://127.0.0.1:8080.")
        return ServerError(f"{name}: unexpected {type(error).__name__}.", "Try again.")


class _Sent:
    """Notes when a request was sent (monotonic seconds): after connecting, which a proxy and TLS make long."""

    def __init__(self) -> None:
        self.at = time.monotonic()

    async def __call__(self, event: str, _: dict[str, Any]) -> None:
        """Take in an event of httpcore's `trace` extension."""
        if event.endswith("send_request_headers.started"):  # also that of CONNECT; the last one counts
            self.at = time.monotonic()


class Retries:
    """Counts the attempts at one request, and the looks at a server that is loading its model."""

    def __init__(self) -> None:
        self._attempt = self._looks = 0

    def next(self, error: Exception) -> tuple[int, float]:
        """Return the number of the next attempt, 0 while the server is loading, and the seconds to wait before it:
        longer each time, and as long as the server wants. Raises `error` when another one is of no use.
        """
        if _is_loading(error) and self._looks < _MOST_LOOKS:
            self._looks += 1
            return 0, LOADING_SECONDS
        if self._attempt >= len(BACK_OFF) or not _may_pass(error):
            raise error
        self._attempt += 1
        wanted = error.retry_after if isinstance(error, Status) else None
        return self._attempt, max(BACK_OFF[self._attempt - 1], wanted or 0.0)


def _may_pass(error: Exception) -> bool:
    """Return whether another attempt may succeed within the back-off."""
    if isinstance(error, Status):
        is_transient = error.code in (429, _LOADING) or error.code in _GATEWAY
        return is_transient and (error.retry_after or 0.0) <= BACK_OFF[-1]
    if isinstance(error, httpx.ConnectError) and _is_certificate(error):
        return False
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.RemoteProtocolError | httpx.ReadError)


def _is_loading(error: Exception) -> bool:
    """Return whether the server refuses because it is still loading its model."""
    return isinstance(error, Status) and error.code == _LOADING and "loading" in error.message.lower()


def _refusal(status: Status, name: str, has_key: bool) -> CpuchatError:
    reason = f": {status.message}" if status.message else ""
    code = status.code
    if code in (401, 403):
        hint = "The API key is wrong or expired: `cpuchat servers key URL` sets another one."
        if not has_key:
            hint = "It needs an API key: run `cpuchat servers key URL`, or set CPUCHAT_API_KEY and give --server URL."
        return ServerRefused(f"{name} refused the request ({code}){reason}.", hint)
    if code == 404:
        return ServerError(f"{name} has no such model or route (404){reason}.", "See `cpuchat servers`.")
    after = "later" if status.retry_after is None else f"in {status.retry_after:.0f} s"
    if code == 429:
        return ServerBusy(f"{name} limits the rate of requests (429){reason}.", f"Try again {after}.")
    if code == _LOADING:
        says_why = status.retry_after is not None or isinstance(status.error.get("code"), str)
        hint = f"Try again {after}." if says_why else "It may be loading its model: try again in a moment."
        return ServerBusy(f"{name} is not ready (503){reason}.", hint)
    if 300 <= code < 400:
        return ServerError(f"{name} redirects to another address ({code}).", "Give the address that it redirects to.")
    if status.error.get("type") == "exceed_context_size_error":
        return ContextFull(f"The messages do not fit the server's context{reason}.", "Shorten them.")
    if code >= 500:
        return ServerError(f"{name} failed ({code}){reason}.", "Check the server's log.")
    return ServerError(f"{name} rejected the request ({code}){reason}.", "Check the model's name and the settings.")


def _status(response: httpx.Response, body: bytes) -> Status:
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError):  # text, or the page of a proxy
        found = "" if body.lstrip().startswith(b"<") else body.decode(errors="replace")
    error = found.get("error", found) if isinstance(found, dict) else None
    error = {**(error if isinstance(error, dict) else {}), "message": error_words(found)}
    after: float | None = None
    with contextlib.suppress(ValueError):
        after = max(0.0, float(response.headers.get("Retry-After", "")))
    return Status(response.status_code, error, after if after is not None and after < 1e6 else None)


async def _require_identity(response: httpx.Response) -> None:
    """Refuse a compressed response, before its body is read: none was asked for, and a few kB can become gigabytes."""
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise ServerError(
            f"{host(str(response.url))} compressed its response unasked ({clean_line(encoding)[:20]}).",
            "Turn compression off in the server, or in the proxy in front of it.",
        )


async def read_body(chunks: AsyncIterator[bytes], most: int, too_long: ServerError) -> bytes:
    """Read a whole response of at most `most` bytes. Raises `too_long`."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > most:
            raise too_long
    return bytes(body)


async def _body(response: httpx.Response) -> bytes:
    """Read a small response. Raises ServerError for a large one."""
    too_long = ServerError(f"The server sent more than {_MOST_BODY >> 20} MiB.", "Is this really an inference server?")
    return await read_body(response.aiter_bytes(), _MOST_BODY, too_long)


def _is_certificate(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
