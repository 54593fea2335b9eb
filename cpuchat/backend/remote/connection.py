"""The HTTP connection to one server: proxies, TLS, timeouts, retries, errors as messages. Slow to import (httpx)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec

from cpuchat import __version__
from cpuchat.backend.remote.stream import error_words
from cpuchat.base.errors import ContextFull, CpuchatError, ServerBusy, ServerError, ServerRefused, ServerUnreachable
from cpuchat.base.text import clean_line
from cpuchat.config.servers import host, is_local
from cpuchat.models.hub.errors import is_certificate
from cpuchat.models.hub.http import certificates, proxy_for

BACK_OFF = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each new attempt to reach a server."""
_CONNECT, _WRITE, _SMALL = 5.0, 60.0, 10.0
SILENCE = 600.0
"""Seconds without a byte after which a server counts as hung: prefill of a long prompt on a CPU takes minutes."""
_MAX_BODY = 8 << 20
_LONGEST_REASON = 300
_LOADING = 503
_TRANSIENT = frozenset({429, _LOADING, 502, 504, 520, 521, 522, 523, 524})
LOADING_SECONDS = 1.0
_MAX_LOOKS = 1_800  # at a server that loads its model


class Status(Exception):
    """Raised for an unsuccessful response. `error` is its error object, or what it has as one, `message` its words."""

    def __init__(self, code: int, error: dict[str, Any], retry_after: float | None) -> None:
        super().__init__(code)
        self.code, self.error, self.retry_after = code, error, retry_after
        self.message = clean_line(str(error.get("message") or ""))[:_LONGEST_REASON]


class ServerConnection:
    """Sends requests to one server. Use from one event loop; make it in a thread: certificates take long to read.
    `root`: address of the OpenAI routes; `leaks_key`: others on the way can read the key. Raises ServerError: its proxy
    or certificates cannot be used."""

    def __init__(self, server: str, key: str = "") -> None:
        self.server, self.root, self._has_key = server, f"{server}/v1", bool(key)
        is_remote = not is_local(server)
        self.leaks_key = self._has_key and server.startswith("http:") and is_remote
        headers = {"User-Agent": f"cpuchat/{__version__}", "Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            trusted = certificates() if server.startswith("https:") or is_remote else None
            proxy = proxy_for(server) if is_remote else None
            self._client = httpx.AsyncClient(
                headers=headers,
                # A proxy of the environment reaches other machines, not this one; its authorities hold for both.
                trust_env=False,
                proxy=proxy.open(trusted) if trusted and proxy is not None else None,
                verify=trusted or False,
                follow_redirects=False,  # a redirect would take the key elsewhere
                limits=httpx.Limits(max_keepalive_connections=0),  # llama-server hangs up after a stream
            )
        except CpuchatError as error:
            raise ServerError(error.message, error.hint) from None

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> bytes:
        """Return the content at `path` of the server. Raises as `request`."""
        async with self.request(path) as response:
            return await read_body(response)

    @contextlib.asynccontextmanager
    async def request(self, path: str, content: dict[str, Any] | None = None) -> AsyncIterator[httpx.Response]:
        """Send a request, a small one without content, and yield the response while it streams. Leaving early closes
        the connection, which stops the server. Raises Status, httpx.HTTPError, ServerError."""
        is_small = content is None
        async with self._client.stream(
            "GET" if is_small else "POST",
            self.root + path.removeprefix("/v1") if path.startswith("/v1/") else self.server + path,
            content=None if is_small else msgspec.json.encode(content),
            headers={} if is_small else {"Content-Type": "application/json"},
            timeout=httpx.Timeout(_SMALL if is_small else SILENCE, connect=_CONNECT, write=_WRITE),
        ) as response:
            if response.status_code != 200:
                raise _status(response, await read_body(response))
            yield response

    def translate(self, error: Exception) -> CpuchatError:
        """Return the typed error for what a request raised; no key and no address with a path gets into it."""
        name = host(self.server)
        match error:
            case CpuchatError():
                return error
            case Status():
                return _refusal(error, name, self._has_key)
            case TimeoutError() | httpx.TimeoutException() if not isinstance(error, httpx.ConnectTimeout):
                return ServerUnreachable(f"{name} timed out.", "Check the server's load and its log.")
            case httpx.ProxyError():
                return ServerUnreachable(f"The proxy does not reach {name}.", "Check HTTPS_PROXY and NO_PROXY.")
            case httpx.ConnectError() if is_certificate(error):
                hint = "Set SSL_CERT_FILE to the certificate of your own authority."
                return ServerUnreachable(f"The certificate of {name} cannot be verified.", hint)
            case httpx.ConnectError() | httpx.ConnectTimeout():
                return ServerUnreachable(f"{name} cannot be reached.", "Is the server running? Check its address.")
            case httpx.TransportError():
                return ServerUnreachable(f"The connection to {name} was lost.", "Try again.")
            case httpx.InvalidURL() | UnicodeError():
                return ServerError(f"{name} is not a valid address.", "Write it as http://127.0.0.1:8080.")
        return ServerError(f"{name}: unexpected {type(error).__name__}.", "Try again.")


class Retries:
    """Counts the attempts at one request, `limit` at most, and the looks at a server that is loading its model."""

    def __init__(self) -> None:
        self.limit, self._attempt, self._looks = len(BACK_OFF), 0, 0

    def next(self, error: Exception) -> tuple[int, float]:
        """Return the number of the next attempt, 0 while the server is loading, and the seconds to wait before it:
        longer each time, and as long as the server wants. Raises `error` when another one is of no use."""
        wanted = 0.0
        if isinstance(error, Status):
            if error.code == _LOADING and "loading" in error.message.lower() and self._looks < _MAX_LOOKS:
                self._looks += 1
                return 0, LOADING_SECONDS
            wanted = error.retry_after or 0.0
            may_pass = error.code in _TRANSIENT and wanted <= BACK_OFF[-1]
        else:
            lost = httpx.ConnectError | httpx.ConnectTimeout | httpx.RemoteProtocolError | httpx.ReadError
            may_pass = isinstance(error, lost) and not is_certificate(error)
        if self._attempt >= self.limit or not may_pass:
            raise error
        self._attempt += 1
        return self._attempt, max(BACK_OFF[self._attempt - 1], wanted)


def _refusal(status: Status, name: str, has_key: bool) -> CpuchatError:
    code, reason = status.code, f": {status.message}" if status.message else ""
    after = "later" if status.retry_after is None else f"in {status.retry_after:.0f} s"
    match code:
        case 401 | 403:
            hint = "The API key is wrong or expired: keys.toml or CPUCHAT_API_KEY has it (`cpuchat docs servers`)."
            if not has_key:
                hint = "It needs an API key: set CPUCHAT_API_KEY and give --server URL, or see `cpuchat docs servers`."
            return ServerRefused(f"{name} refused the request ({code}){reason}.", hint)
        case 404:
            return ServerError(f"{name} has no such model or route (404){reason}.", "Ctrl+O lists its models.")
        case 429:
            return ServerBusy(f"{name} limits the rate of requests (429){reason}.", f"Try again {after}.")
        case 503:
            return ServerBusy(f"{name} is not ready (503){reason}.", f"It is loading or busy: try again {after}.")
        case _ if 300 <= code < 400:
            return ServerError(f"{name} redirects to another address ({code}).", "Give that address.")
        case _ if code >= 500:
            return ServerError(f"{name} failed ({code}){reason}.", "Check the server's log.")
        case _ if status.error.get("type") == "exceed_context_size_error":
            return ContextFull(f"The messages do not fit the server's context{reason}.", "Shorten them.")
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


async def read_body(response: httpx.Response) -> bytes:
    """Read a small response. Raises ServerError for a large one."""
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > _MAX_BODY:
            hint = "Is this really an inference server?"
            raise ServerError(f"The server sent more than {_MAX_BODY >> 20} MiB.", hint)
    return bytes(body)


def require_stream(response: httpx.Response, name: str) -> None:
    """Raise ServerError if a response that has ended without an event was none of an inference server."""
    kind, encoding = (response.headers.get(f"content-{header}", "").strip() for header in ("type", "encoding"))
    is_packed = encoding.lower() not in ("", "identity")  # none was asked for
    if is_packed or not kind.lower().startswith("text/event-stream"):
        what = clean_line(", ".join(filter(None, (kind, encoding))) or "no content type")[:60]
        problem = f"{name} did not stream as an inference server does: it sent {what}."
        raise ServerError(problem, "Is it a login page, or a proxy in between?")
