"""Tests the app in browser tabs with real servers, apps and WebSockets; what is drawn is read with pyte."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import psutil
import pyte
import pytest

from tests.cli.program import HANG_GUARD
from tests.support.serving import Server, chat, server

pytest.importorskip("textual_serve", reason="needs the extra `web`")
pytest.importorskip("websockets", reason="needs the extra `web`")

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

WIDTH, HEIGHT = 100, 30
QUESTION = "What is the sea?"


class Browser:
    """A page's terminal: its connection, and what it shows."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._screen = pyte.Screen(WIDTH, HEIGHT)
        self._stream = pyte.ByteStream(self._screen)
        self.n_bytes = 0

    @property
    def text(self) -> str:
        return "\n".join(self._screen.display)

    async def send(self, kind: str, *values: object) -> None:
        await self._socket.send(json.dumps([kind, *values]))

    async def until(self, *parts: str) -> None:
        """Read until the screen shows all of it."""
        try:
            async with asyncio.timeout(HANG_GUARD):
                while not all(part in self.text for part in parts):
                    data = await self._socket.recv()
                    if isinstance(data, bytes):
                        self.n_bytes += len(data)
                        self._stream.feed(data)
        except (TimeoutError, ConnectionClosed) as error:
            raise AssertionError(f"{parts} not on the screen:\n{self.text}") from error

    async def until_closed(self) -> None:
        async with asyncio.timeout(HANG_GUARD):
            with contextlib.suppress(ConnectionClosed):
                while True:
                    await self._socket.recv()


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory, bandwidth_file: bytes) -> Iterator[Server]:
    """Yield a server of the demo model with room for two sessions, whose files are below its folder."""
    folder = tmp_path_factory.mktemp("web")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        options = ("--web", "--sessions", "2", "--max-tokens", "30")
        with server(Path("demo"), folder, *options, bandwidth=bandwidth_file) as running:
            yield running


@contextlib.asynccontextmanager
async def browsing(web: Server, path: str, **headers: str) -> AsyncIterator[Browser]:
    address = f"{web.url.replace('http', 'ws')}{path}/ws?width={WIDTH}&height={HEIGHT}"
    async with connect(address, origin=headers.get("origin", web.url), proxy=None) as socket:  # type: ignore[arg-type]
        yield Browser(socket)


def opened(web: Server) -> str:
    """Return the path of a page that begins a session."""
    answer = web.http.get("/")
    assert answer.status_code == 303
    return answer.headers["location"]


async def until(is_true: Callable[[], object]) -> None:
    async with asyncio.timeout(HANG_GUARD):
        while not is_true():
            await asyncio.sleep(0.05)


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_tab_waits_chats_is_loaded_again_watched_and_ended(web: Server) -> None:
    greedy = web.post(chat(QUESTION, max_tokens=30)).json()["choices"][0]["message"]["content"]
    path = opened(web)
    page = web.http.get(path)
    assert path in page.text and "default-src 'none'" in page.headers["content-security-policy"]
    assert web.http.get("/static/js/textual.js").status_code == 200
    async with browsing(web, path) as tab:
        await tab.until("Enter sends", "demo")
        body = chat("Hello", max_tokens=-1, ignore_eos=True, stream=True)
        with web.http.stream("POST", "/v1/chat/completions", json=body) as other:
            lines = other.iter_lines()
            next(lines)
            await tab.send("stdin", f"{QUESTION}\r")
            await tab.until("queued · 1 request ahead")
        await tab.until("token limit reached")
        # Sampling is left to the server, which knows that the demo model is greedy.
        assert " ".join(greedy.replace("**", "").split()[:4]) in tab.text
        assert "^O models" not in tab.text and "^R regenerate" in tab.text
    async with browsing(web, path) as tab:  # the page is loaded again
        await tab.until(QUESTION, "token limit reached")
        await tab.send("stdin", "/share\r")
        await tab.until("/watch/")
        watched = next(word for word in tab.text.split() if "/watch/" in word).partition("/watch/")[2]
        await tab.send("stdin", "\r")  # closes the dialog
        async with browsing(web, f"/watch/{watched}") as spectator:
            assert web.http.get(f"/watch/{watched}").status_code == 200
            await spectator.until(QUESTION, "token limit reached")
            await spectator.send("stdin", "Not from here")
            await spectator.send("resize", {"width": 40, "height": 10})
            await tab.send("stdin", "From here")
            await spectator.until("From here", "Enter sends")
            assert "Not from" not in spectator.text
            await tab.send("resize", {"width": WIDTH - 1, "height": HEIGHT})
            await spectator.until_closed()  # its page loads again, with the new size
            await tab.send("stdin", "\x11")  # Ctrl+Q
            await tab.until_closed()
    await until(lambda: not list(web.folder.glob("cpuchat-tab-*")))
    assert web.http.get(path).headers["location"] == "/"
    assert web.http.get(f"/watch/{watched}").status_code == 404


async def test_sessions_have_a_limit_and_end_with_a_server_that_is_killed(web: Server) -> None:
    path, other, third = [opened(web) for _ in range(8)][:3]  # pages alone take no session
    async with browsing(web, path), browsing(web, other):
        full = web.http.get("/")
        assert full.status_code == 503 and "All sessions are in use" in full.text and "refresh" in full.text
        assert web.http.get(third).headers["location"] == "/"
    for origin, place in (
        ("http://evil.example", path),
        (web.url, third),
        (web.url, "/chat/none"),
        (web.url, "/watch/none"),
    ):
        with pytest.raises(InvalidStatus) as refused:
            async with browsing(web, place, origin=origin):
                pass
        assert refused.value.response.status_code == 403
    async with browsing(web, path) as tab:
        await tab.until("Enter sends", "demo")
        children = psutil.Process(web.process.pid).children(recursive=True)
        web.process.kill()
        await until(lambda: all(has_ended(one) for one in children))
    assert children and not list(web.folder.glob("cpuchat-tab-*"))
