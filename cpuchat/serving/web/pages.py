"""The pages of the app in a browser: a session for each tab, and its screen for spectators.

The terminal in the page is xterm.js with the client of textual-serve, whose messages are JSON lists: ["stdin", TEXT],
["resize", {"width": W, "height": H}], ["focus"], ["blur"], ["ping", TIME].
"""

from __future__ import annotations

import contextlib
import secrets
from html import escape
from importlib.resources import files
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.websockets import WebSocket, WebSocketDisconnect

from cpuchat.serving.web.sessions import Session, Sessions, WebAccess

_RETRY_SECONDS = 5
_HEADERS = {"cache-control": "no-store", "referrer-policy": "no-referrer", "x-content-type-options": "nosniff"}
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
{head}
<style nonce="{nonce}">
html, body {{ margin: 0; height: 100%; overflow: hidden; background: #0d1117; color: #e6edf3;
  font: 16px/1.5 system-ui, sans-serif; }}
.textual-terminal {{ position: absolute; inset: 0; }}
main {{ display: flex; height: 100%; align-items: center; justify-content: center; text-align: center; }}
.closed {{ display: none; position: absolute; inset: 0; z-index: 10; background: #0d1117cc; }}
.-closed .closed {{ display: flex; }}
a {{ color: #58a6ff; }}
</style>
</head>
<body>{body}</body>
</html>
"""
_TERMINAL = """<main class="closed"><p>{closed}</p></main>
<div id="terminal" class="textual-terminal" data-session-websocket-url="{socket}" data-font-size="16"></div>"""
_CLIENT = '<link rel="stylesheet" href="/static/css/xterm.css"><script src="/static/js/textual.js"></script>'
_FOCUS_SCRIPT = """<script nonce="{nonce}">
document.addEventListener("DOMContentLoaded", () => {{
  new MutationObserver(() => document.querySelector(".xterm-helper-textarea")?.focus())
    .observe(document.body, {{attributes: true}});
}});
</script>"""
# The owner's cells must fit into the window: a glyph is 0.6 em wide, a line 1.32 em high. When the owner resizes the
# terminal, the connection is closed, and the page loads again.
_WATCH_SCRIPT = """<script nonce="{nonce}">
document.addEventListener("DOMContentLoaded", () => {{
  const size = Math.min(innerWidth / ({width} * 0.61), innerHeight / ({height} * 1.33));
  document.getElementById("terminal").dataset.fontSize = Math.max(4, Math.floor(size));
  new MutationObserver(() => {{
    if (document.body.classList.contains("-closed")) setTimeout(() => location.reload(), 1000);
  }}).observe(document.body, {{attributes: true}});
}});
</script>"""


class WebPages:
    """Starlette's endpoints; `routes` are what the server adds to its own."""

    def __init__(self, sessions: Sessions, access: WebAccess) -> None:
        self._sessions = sessions
        self._access = access

    @property
    def routes(self) -> list[BaseRoute]:
        static = StaticFiles(directory=static_folder())
        return [
            Route("/", self.index),
            Route("/chat/{id}", self.chat),
            WebSocketRoute("/chat/{id}/ws", self.chat_socket),
            Route("/watch/{id}", self.watch),
            WebSocketRoute("/watch/{id}/ws", self.watch_socket),
            Mount("/static", static),
        ]

    async def index(self, request: Request) -> Response:
        if not self._access.is_known(request.headers):
            return self._log_in(request)
        if request.method == "HEAD":  # asks whether the server is up
            return _page("cpuchat", "")
        if not _is_tab(request):
            return _not_a_tab()
        if offered := self._sessions.offer():
            return RedirectResponse(f"/chat/{offered}", 303, _HEADERS)
        body = f"<main><p>All sessions are in use. Retrying every {_RETRY_SECONDS} s.</p></main>"
        retry = f'<meta http-equiv="refresh" content="{_RETRY_SECONDS}">'
        return _page("cpuchat", body, retry, status=503, more={"retry-after": str(_RETRY_SECONDS)})

    def _log_in(self, request: Request) -> Response:
        to_app = RedirectResponse("/", 303, _HEADERS)
        given = request.query_params.get("token", "")
        if self._access.log_in(given, to_app, secure=request.url.scheme == "https"):
            return to_app
        body = "<main><p>Open this page once with the token of the server: /?token=TOKEN</p></main>"
        return _page("cpuchat", body, status=401)

    async def chat(self, request: Request) -> Response:
        id = request.path_params["id"]
        if not _is_tab(request):
            return _not_a_tab()
        if not self._sessions.can_open(id):
            return RedirectResponse("/", 303, _HEADERS)
        closed = 'Disconnected. <a href="">Reload</a> to continue, or <a href="/">start another session</a>.'
        body = _TERMINAL.format(closed=closed, socket=f"/chat/{escape(id)}/ws")
        return _page("cpuchat", body, _CLIENT, script=_FOCUS_SCRIPT)

    async def watch(self, request: Request) -> Response:
        session = self._sessions.watched(request.path_params["id"])
        if session is None:
            return _page("cpuchat", "<main><p>This session has ended.</p></main>", status=404)
        body = _TERMINAL.format(closed="Reconnecting…", socket=f"/watch/{escape(session.watch_id)}/ws")
        width, height = session.size
        return _page("cpuchat (watching)", body, _CLIENT, script=_WATCH_SCRIPT, width=width, height=height)

    async def chat_socket(self, socket: WebSocket) -> None:
        session = self._sessions.open(socket.path_params["id"])
        if session is None:
            await socket.close(4404)
            return
        size = _number(socket, "width", 80), _number(socket, "height", 24)
        await self._show(session, socket, size)

    async def watch_socket(self, socket: WebSocket) -> None:
        session = self._sessions.watched(socket.path_params["id"])
        if session is None:
            await socket.close(4404)
            return
        await self._show(session, socket, None)

    async def _show(self, session: Session, socket: WebSocket, size: tuple[int, int] | None) -> None:
        await socket.accept()
        scheme = "https" if socket.url.scheme == "wss" else "http"
        async with session.shown(_Browser(socket), size, f"{scheme}://{socket.headers.get('host', '')}"):
            with contextlib.suppress(WebSocketDisconnect, ValueError, KeyError, RuntimeError):
                while True:
                    message = await socket.receive_text()
                    if size is not None:  # a spectator's is ignored
                        await session.take(message)


class _Browser:
    """See `sessions.Screen`."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket

    async def send(self, data: bytes | str) -> None:
        if isinstance(data, bytes):
            await self._socket.send_bytes(data)
        else:
            await self._socket.send_text(data)

    async def close(self) -> None:
        await self._socket.close()


def _is_tab(request: Request) -> bool:
    """Return whether a user looks at the page: another site's image does not, nor what a browser loads beforehand."""
    headers = request.headers
    ahead = headers.get("sec-purpose", headers.get("purpose", ""))
    return headers.get("sec-fetch-dest", "document") == "document" and "prefetch" not in ahead


def _not_a_tab() -> Response:
    return _page("cpuchat", "<main><p>Open this page in a tab.</p></main>", status=403)


def static_folder() -> Path:
    """Return the folder of the terminal's scripts. Raises ModuleNotFoundError without the extra `web`."""
    return Path(str(files("textual_serve") / "static"))


def _number(socket: WebSocket, name: str, default: int) -> int:
    with contextlib.suppress(ValueError):
        return int(socket.query_params.get(name, default))
    return default


def _page(
    title: str,
    body: str,
    head: str = "",
    *,
    script: str = "",
    status: int = 200,
    more: dict[str, str] | None = None,
    **values: int,
) -> Response:
    """Return a page that may load nothing from elsewhere."""
    nonce = secrets.token_urlsafe(16)
    head += script.format(nonce=nonce, **values)
    policy = (
        f"default-src 'none'; script-src 'self' 'nonce-{nonce}'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    content = _PAGE.format(title=title, head=head, body=body, nonce=nonce)
    return HTMLResponse(content, status, {**_HEADERS, "content-security-policy": policy, **(more or {})})
