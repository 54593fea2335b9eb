"""Who may use the server.

On the loopback interface of this machine anyone who is logged in may; elsewhere, a bearer token is needed. Web pages
may not: a browser sends their requests to 127.0.0.1 too, under the name of a host that an attacker chose. Its `Host`
and `Origin` headers tell.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Collection
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from cpuchat.errors import UsageError
from cpuchat.paths import read_text
from cpuchat.servers import is_loopback
from cpuchat.serving.refusal import Refusal
from cpuchat.serving.web.access import WebAccess

TOKEN_VARIABLE = "CPUCHAT_SERVE_TOKEN"
SHORTEST_TOKEN = 16
OPEN_PATHS = ("/health", "/v1/health")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{0,5})?")


class Guard:
    """Lets requests through to `app` that may use it; refuses others.

    Args:
        token: "" = none needed.
        local: bound to the loopback interface only, so that no other host's name can be meant.
        origins: of web pages that may use it; `*` = all.
        web: lets in browsers to the app's pages.
        tab_token: accepted beside `token`, of the apps in browser tabs.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str = "",
        local: bool = True,
        origins: Collection[str] = (),
        web: WebAccess | None = None,
        tab_token: str = "",
    ) -> None:
        self._app = app
        self._digests = [hashlib.sha256(one.encode()).digest() for one in (token, tab_token) if one] if token else []
        self._web = web
        self._local = local
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind in ("http", "websocket") and (refusal := self._refusal(scope)) is not None:
            if kind == "http":
                await Response(refusal.body, refusal.status, refusal.headers)(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        path, headers = scope["path"], Headers(scope=scope)
        origin = headers.get("origin")
        # Browsers send the origin of a WebSocket also where it is that of the page itself.
        if scope["type"] == "websocket" and origin is not None and origin.partition("://")[2] == headers.get("host"):
            origin = None
        if origin is not None and origin not in self._origins and "*" not in self._origins:
            message = "Origin not allowed. Start the server with --cors-origin to allow it."
            return Refusal(403, message, "origin_not_allowed")
        if self._local and not self._digests and not is_loopback(_host_name(headers.get("host", ""))):
            return Refusal(403, "Use localhost or 127.0.0.1 as the server's name.", "host_not_allowed")
        if self._web is not None and self._web.lets_in(path, headers):
            return None
        if self._digests and path not in OPEN_PATHS and not self._matches(headers.get("authorization", "")):
            return Refusal(401, "Missing or invalid bearer token. Send `Authorization: Bearer …`.", "invalid_api_key")
        return None

    def _matches(self, authorization: str) -> bool:
        """Compare in constant time; digests, so that not even the length shows."""
        scheme, _, given = authorization.partition(" ")
        digest = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        same = [hmac.compare_digest(digest, one) for one in self._digests]
        return any(same) and scheme.lower() == "bearer"


def local_user(scope: Scope) -> str:
    """Return the number of the user of this machine who has the other end of the connection; "" for other machines."""
    ports = [f":{end[1]:04X}" for end in map(scope.get, ("client", "server")) if end]
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):  # proc(5): local address, remote address, ..., uid
        with contextlib.suppress(OSError), Path(table).open() as lines:
            for fields in map(str.split, lines):
                if len(ports) == 2 and fields[1].endswith(ports[0]) and fields[2].endswith(ports[1]):
                    return fields[7]
    return ""


def _host_name(host: str) -> str:
    """Return the `Host` header without the port; "" for one that is not a name or an address (RFC 3986, 3.2.2)."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]) if found else ""


def read_token(file: Path | None) -> str:
    """Return the token in `file`, else of the environment, "" when there is neither. A missing file is created with a
    random token, readable by its owner only.

    Raises:
        UsageError: the token is too short, or its file cannot be read, cannot be written, or is readable by others.
    """
    if file is None:
        return _checked(os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE) if TOKEN_VARIABLE in os.environ else ""
    try:
        if not file.exists():
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as stream:
                stream.write(secrets.token_urlsafe(32) + "\n")
        if os.name == "posix" and stat.S_IMODE(file.stat().st_mode) & 0o077:
            raise UsageError(f"Others can read the token file {file}.", f"Run `chmod 600 {file}`.")
        return _checked(read_text(file, 4096), str(file))
    except UnicodeDecodeError:
        raise UsageError(f"The token file {file} is not text.", "Put one line into it.") from None
    except OSError as error:
        raise UsageError(f"Cannot read the token file {file}: {error.strerror}.", "Choose another one.") from None


def _checked(text: str, where: str) -> str:
    token = text.strip()
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(
            f"The token in {where} is not usable: it needs {SHORTEST_TOKEN} characters or more, ASCII, no spaces.",
            "Make one with `openssl rand -hex 32`.",
        )
    return token
