"""Runs the HTTP interface in the event loop of its caller, who handles signals, and decides who may use it: on the
loopback interface anyone who is logged in; elsewhere, who has the bearer token. Web pages may not: a browser sends
their requests to 127.0.0.1 too, under the name of a host that an attacker chose, which `Host` and `Origin` tell.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import socket
import struct
import sys
from collections.abc import AsyncIterator, Collection, Iterator
from pathlib import Path

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from cpuchat.base.errors import UsageError
from cpuchat.config.servers import is_loopback
from cpuchat.serving.errors import Refusal

HEAD_SECONDS = 10.0
"""A request's head must arrive within, from the connection or its own first byte on."""
CONNECTIONS = 128
"""Beyond these, requests get 503: a process may have 256 open files on some systems."""
_CLOSING_SECONDS = 3
_BACKLOG = 32  # asyncio accepts as many before it looks at the first: with more, descriptors run out


class _Limit:
    """Refuses requests over more connections than `CONNECTIONS`, in the form of the client's dialect."""

    def __init__(self, app: ASGIApp, connections: Collection[object]) -> None:
        self._app, self._connections = app, connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self._connections) <= CONNECTIONS:
            return await self._app(scope, receive, send)
        refusal = Refusal(503, "Too many connections. Close some, or retry later.", "overloaded", retry_after=1)
        await refusal.response({"connection": "close"}, scope["path"])(scope, receive, send)


class PortInUse(UsageError):
    """Another program listens there."""


class _Server(uvicorn.Server):
    """Leaves signals to its caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """Closes silent connections, which would fill the limit: uvicorn's own timer starts after the first answer."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._time_head(True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head(self.cycle is None or self.cycle.response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        self._time_head(False)
        super().connection_lost(exc)

    def _time_head(self, is_awaited: bool) -> None:
        """Close the connection unless the whole head of a request comes in time."""
        if is_awaited and self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)
        elif not is_awaited and self._timer is not None:
            self._timer.cancel()
            self._timer = None


def listen(host: str, port: int) -> list[socket.socket]:
    """Return a listening socket for `host`, on its IPv4 address if it has one; `port` 0 takes a free one. `::` alone
    takes IPv4 too. Raises PortInUse, UsageError: it cannot listen there."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"Cannot resolve {host}: {error}.", "Give an address of this machine.") from None
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
    try:
        return [socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)]
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(f"Port {port} is in use.", "Choose another one with --port; 0 takes a free one.") from None
        problem = f"Cannot listen on {host}, port {port}: {os.strerror(error.errno or 0)}."
        raise UsageError(problem, "Choose another one.") from None


def url(listener: socket.socket) -> str:
    """Return the address for programs on this machine, or the one that was bound."""
    address, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, str(address))
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@contextlib.asynccontextmanager
async def serving(app: ASGIApp, listeners: list[socket.socket]) -> AsyncIterator[None]:
    """Serve `app` inside the block; at its end, connections get a few seconds to end."""
    config = uvicorn.Config(
        app,
        http=_Protocol,
        backlog=_BACKLOG,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # any local program could ask in another's name
        server_header=False,
        headers=[("server", "cpuchat")],
        timeout_keep_alive=30,
        timeout_graceful_shutdown=_CLOSING_SECONDS,
    )
    # Else each invalid request is a line, and each part for a client that has left.
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).setLevel(logging.ERROR)
    server = _Server(config)
    config.app = _Limit(app, server.server_state.connections)
    task = asyncio.create_task(server.serve(sockets=listeners))
    try:
        yield
    finally:
        server.should_exit = True
        await task


TOKEN_VARIABLE = "CPUCHAT_SERVE_TOKEN"
SHORTEST_TOKEN = 16
OPEN_PATH = "/v1/health"
_MAPPED = 16 * "0" + ("FFFF0000" if sys.byteorder == "little" else "0000FFFF")  # before an IPv4 address in IPv6
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{0,5})?")  # RFC 3986, 3.2.2


class Guard:
    """Lets requests through to `app` that may use it; refuses others. `token`: "" = none needed. `local`: bound to the
    loopback interface, so that no other host's name can be meant. `origins`: of web pages that may; `*` = all."""

    def __init__(self, app: ASGIApp, *, token: str = "", local: bool = True, origins: Collection[str] = ()) -> None:
        self._app, self._local, self._origins = app, local, frozenset(origins)
        self._digest = hashlib.sha256(token.encode()).digest() if token else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await refusal.response(path=scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        path, headers = scope["path"], Headers(scope=scope)
        origin = headers.get("origin")
        if origin is not None and origin not in self._origins and "*" not in self._origins:
            message = "Origin not allowed. Start the server with --cors-origin to allow it."
            return Refusal(403, message, "origin_not_allowed")
        found = _HOST.fullmatch(headers.get("host", ""))
        host = (found[1] or found[2]) if found else ""
        if self._local and not self._digest and not is_loopback(host):
            return Refusal(403, "Use localhost or 127.0.0.1 as the server's name.", "host_not_allowed")
        if not self._digest or path == OPEN_PATH:
            return None
        given = headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}"  # the latter of Anthropic's
        scheme, _, token = given.partition(" ")
        # In constant time; digests, so that not even the length shows.
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        if hmac.compare_digest(digest, self._digest) and scheme.lower() == "bearer":
            return None
        return Refusal(401, "Missing or invalid bearer token. Send `Authorization: Bearer …`.", "invalid_api_key")


def local_user(scope: Scope) -> str:
    """Return the number of the user of this machine who has the other end of the connection; "" for other machines."""
    ends = [_kernel_name(*end) for end in map(scope.get, ("client", "server")) if end]
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):  # proc(5): local address, remote address, ..., uid
        with contextlib.suppress(OSError), Path(table).open() as lines:
            for fields in map(str.split, lines):
                if [one.removeprefix(_MAPPED) for one in fields[1:3]] == ends:
                    return fields[7]
    return ""


def _kernel_name(host: str, port: int) -> str:
    """Return an end of a connection as proc(5) writes it, an IPv4 address in IPv6 as IPv4; "" for no address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return ""
    packed = (getattr(address, "ipv4_mapped", None) or address).packed
    return "".join(f"{word:08X}" for (word,) in struct.iter_unpack("=I", packed)) + f":{port:04X}"


def read_token() -> str:
    """Return the token of the environment, else "". Raises UsageError: it is too short, or has wrong characters."""
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    usable = len(token) >= SHORTEST_TOKEN and token.isascii() and token.isprintable() and " " not in token
    if TOKEN_VARIABLE in os.environ and not usable:
        raise UsageError(
            f"{TOKEN_VARIABLE} is not usable: it needs {SHORTEST_TOKEN} characters or more, ASCII, no spaces.",
            "Make one with `openssl rand -hex 32`.",
        )
    return token
