"""Sessions of the app in browser tabs: who may open one, their processes, viewers and limits.

Where programs need a token, a browser gives it once, in the address, and a cookie remembers that. The cookie opens
nothing but the pages of the app: other pages could make a browser send it elsewhere.

A tab's process exchanges packets: a type (1 byte), a length (4 bytes, big-endian) and so many bytes. Type D is what a
terminal sends or gets, M is JSON about it. Source: textual/drivers/web_driver.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import shutil
import site
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Annotated, Any, Protocol
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response

from cpuchat.backend.remote.keys import KeyRing
from cpuchat.base.decoding import prepared
from cpuchat.base.files import file_lock, is_locked
from cpuchat.base.processes import child_environment, exit_reason, kill_group, last_output, python_command
from cpuchat.base.text import clean_line
from cpuchat.hardware.memory import available_bytes

_COOKIE = "cpuchat_web"
COOKIE_SECONDS = 24 * 3600
"""For which a browser is known; then it needs the token once more."""
_OPEN = ("/watch/", "/static/")
"""A spectator's link has an id that nobody guesses."""


class WebAccess:
    """`token` "" = none needed."""

    def __init__(self, token: str) -> None:
        self._token = token

    def lets_in(self, path: str, headers: Headers) -> bool:
        """Return whether a page may be opened without a bearer token; `/` itself checks `is_known`."""
        return path == "/" or path.startswith(_OPEN) or (path.startswith("/chat/") and self.is_known(headers))

    def is_known(self, headers: Headers) -> bool:
        """Return whether no token is needed, or the cookie is there."""
        if not self._token:
            return True
        cookies: SimpleCookie = SimpleCookie()
        try:
            cookies.load(headers.get("cookie", ""))
        except CookieError:
            return False
        found = cookies.get(_COOKIE)
        until = found.value.partition(".")[0] if found is not None else ""
        if found is None or not hmac.compare_digest(found.value.encode(), self._cookie(until).encode()):
            return False
        return time.time() < int(until)

    def _cookie(self, until: str) -> str:
        """Return the cookie that is valid until then (seconds since 1970): a browser may keep one for longer."""
        return f"{until}.{hmac.new(self._token.encode(), f'cpuchat web {until}'.encode(), 'sha256').hexdigest()}"

    def log_in(self, given: str, response: Response, *, secure: bool) -> bool:
        """Give the browser the cookie if `given` is the token; returns whether it is."""
        digests = (hashlib.sha256(one.encode("utf-8", "replace")).digest() for one in (given, self._token))
        if not hmac.compare_digest(*digests):
            return False
        # Not `strict`: the browser would not send it after a click on a link with the token in a mail or a chat.
        value = self._cookie(str(int(time.time()) + COOKIE_SECONDS))
        response.set_cookie(_COOKIE, value, COOKIE_SECONDS, httponly=True, samesite="lax", secure=secure)
        return True


_MOST_PACKET = 4 << 20
_ERRORS = "errors.txt"
_PATIENCE_SECONDS = 5.0
"""For an app to save and leave, before it is killed."""


class TabProcess:
    """Runs the app of one tab in a process group of its own, with `folder` for everything that it writes."""

    def __init__(self, folder: Path, server: str) -> None:
        self._folder = folder
        self._server = server
        self._process: Process | None = None

    async def start(self, size: tuple[int, int], watch_url: str) -> None:
        """Start the app with a terminal of so many columns and rows; it shares `watch_url`. Raises OSError."""
        folder = str(self._folder)
        environment = child_environment(
            HOME=folder,
            PYTHONUSERBASE=site.getuserbase(),  # where `pip install --user` puts packages: below the real HOME
            CPUCHAT_CONFIG_DIR=f"{folder}/config",
            CPUCHAT_DATA_DIR=f"{folder}/data",
            CPUCHAT_CACHE_DIR=f"{folder}/cache",
            CPUCHAT_WATCH_URL=watch_url,
            CPUCHAT_CACHE_SALT=secrets.token_hex(16),  # visitors learn nothing of each other's prompts
            COLUMNS=str(size[0]),
            ROWS=str(size[1]),
            TEXTUAL_COLOR_SYSTEM="truecolor",
            TERM="xterm-256color",
        )
        command = python_command("-m", "cpuchat.tui.tab", self._server, folder)
        with (self._folder / _ERRORS).open("wb") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=errors, env=environment, cwd=folder, start_new_session=True
            )

    async def read(self) -> tuple[bytes, bytes] | None:
        """Return the next packet of the app, None at its end."""
        assert self._process is not None and self._process.stdout is not None
        stdout = self._process.stdout
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, ValueError):
            head = await stdout.readexactly(1)
            if head == b"_":  # __GANGLION__: the driver has begun
                await stdout.readline()
                head = await stdout.readexactly(1)
            size = int.from_bytes(await stdout.readexactly(4), "big")
            return (head, await stdout.readexactly(size)) if size <= _MOST_PACKET else None
        return None

    async def send(self, kind: bytes, payload: bytes) -> None:
        """Send a packet to the app; what has ended gets nothing."""
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._process.stdin.write(kind + len(payload).to_bytes(4, "big") + payload)
            await self._process.stdin.drain()

    async def send_meta(self, **fields: Any) -> None:
        await self.send(b"M", json.dumps(fields).encode())

    async def failure(self) -> str:
        """Wait until the app has ended; return why it failed, "" if it did not."""
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._process.wait()
        status = self._process.returncode
        return exit_reason(status, "", self._last_words()) if status else ""

    def _last_words(self) -> str:
        """Return the last line that the app wrote to standard error, "" without one."""
        with contextlib.suppress(OSError), (self._folder / _ERRORS).open("rb") as errors:
            return clean_line(last_output(errors).rpartition("\n")[2])
        return ""

    async def end(self) -> None:
        """Let the app leave, then kill what is left of its group."""
        process = self._process
        if process is None:
            return
        await self.send_meta(type="quit")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                while await self.read() is not None:  # a full pipe would hold it
                    pass
                await process.wait()
        kill_group(process.pid)
        await process.wait()


LEFT_SECONDS = 60.0
"""Until a session ends that nobody looks at: a page that is loaded again keeps it."""
IDLE_SECONDS = 30 * 60.0
"""Without a key or click, until a session ends."""
OFFER_SECONDS = 60.0
"""In which a page begins the session that its address offers."""
SESSION_BYTES = 120 << 20
"""Memory of one more app."""
_MOST_QUEUED = 1 << 20
_FOLDER, _LOCK = "cpuchat-tab-", "server.lock"
"""The folder of a session in the temporary folder; its file that the server holds locked."""
_LEAST, _MOST_WIDTH, _MOST_HEIGHT = 10, 500, 200
_CLIPBOARD = b"\x1b]52;"
_TERMINAL = b"\x1b[?1049h\x1b[?25l"
_INPUT = b"\x1b[?1000h\x1b[?1003h\x1b[?1015h\x1b[?1006h\x1b[?2004h"
"""Modes that the app sets once, at its start: alternate screen, no cursor; mouse, bracketed paste."""


class Screen(Protocol):
    """A browser that shows a session."""

    async def send(self, data: bytes | str) -> None:
        """Send what a terminal gets, or JSON for the page. Raises an exception when it has gone."""

    async def close(self) -> None: ...


class Viewer:
    """One browser of a session. One that falls behind is disconnected; its page can reconnect."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._queue: asyncio.Queue[bytes | str | None] = asyncio.Queue()
        self._queued = 0

    def put(self, data: bytes | str) -> None:
        self._queued += len(data)
        self._queue.put_nowait(data if self._queued <= _MOST_QUEUED else None)

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def send(self) -> None:
        """Send what was put, until the end or until the browser has gone."""
        with contextlib.suppress(Exception):
            while (data := await self._queue.get()) is not None:
                await self._screen.send(data)
                self._queued -= len(data)
        with contextlib.suppress(Exception):
            await self._screen.close()


class Session:
    """One app. `id` opens it, `watch_id` shows it read-only."""

    def __init__(
        self,
        server: str,
        token: str,
        tell: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
        id: str = "",
    ) -> None:
        self.id = id or secrets.token_urlsafe(16)
        self.watch_id = secrets.token_urlsafe(16)
        self.size = (80, 24)
        self.ended = False
        self._server = server
        self._token = token
        self._tell = tell
        self._clock = clock
        self._owner: Viewer | None = None
        self._viewers: set[Viewer] = set()
        self._folder: Path | None = None
        self._held = contextlib.ExitStack()
        self._process: TabProcess | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._input_at = self._seen_at = clock()

    @property
    def overdue(self) -> bool:
        """Return whether nobody uses it any more."""
        now = self._clock()
        return (not self._viewers and now - self._seen_at > LEFT_SECONDS) or now - self._input_at > IDLE_SECONDS

    @contextlib.asynccontextmanager
    async def shown(self, screen: Screen, size: tuple[int, int] | None = None, origin: str = "") -> AsyncIterator[None]:
        """Show the session on `screen` inside the block. `size`: it is the owner's, whose terminal has so many columns
        and rows, and who has the page from `origin`; an owner who was there before is sent away.
        """
        viewer = Viewer(screen)
        size = None if size is None else _clamped(*size)
        if size is not None:
            before, self._owner = self._owner, viewer
            if before is not None:
                before.end()
        self._viewers.add(viewer)
        sending = asyncio.create_task(viewer.send())
        try:
            if size is not None:
                self._input_at = self._clock()
                await self._start(size, f"{origin}/watch/{self.watch_id}")
            viewer.put(_TERMINAL + (_INPUT if size is not None else b""))
            await self._resize(size or self.size)
            yield
        finally:
            self._viewers.discard(viewer)
            self._seen_at = self._clock()
            if self._owner is viewer:
                self._owner = None
            viewer.end()
            sending.cancel()

    async def take(self, message: str) -> None:
        """Take a message of the owner's page. Raises ValueError for one that is not the client's."""
        kind, value = _parsed(message)
        if self._process is None or self.ended:
            return
        if kind == "stdin":  # whole: a part of a paste has no end, and the app would wait for it
            self._input_at = self._clock()
            await self._process.send(b"D", str(value).encode("utf-8", "replace"))
        elif kind == "resize":
            await self._resize(value)
        elif kind in ("focus", "blur"):
            await self._process.send_meta(type=kind)
        elif kind == "ping" and self._owner is not None:
            self._owner.put(json.dumps(["pong", str(value)[:40]]))

    async def end(self) -> None:
        """End the app and remove everything that it wrote."""
        self.ended = True
        async with self._starting:  # an app that starts right now is ended, too
            if self._reading is not None:
                self._reading.cancel()
                await asyncio.wait({self._reading})
            if self._process is not None:
                await self._process.end()
            self._end_viewers()
            self._held.close()
            if self._folder is not None:
                await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _start(self, size: tuple[int, int], watch_url: str) -> None:
        """Start the app if it does not run."""
        async with self._starting:
            if self._process is not None or self.ended:
                return
            self.size = size
            try:
                self._folder = folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
                (folder / _LOCK).touch()
                self._held.enter_context(file_lock(folder / _LOCK))
                if self._token:
                    KeyRing(file=folder / "data" / "keys.toml").store(self._server, self._token)
                process = TabProcess(folder, self._server)
                await process.start(size, watch_url)
            except OSError as error:
                self.ended = True
                self._tell(f"cpuchat: a browser session did not start: {error.strerror or error}")
                self._end_viewers()
                return
            self._process = process
            self._reading = asyncio.create_task(self._read(process))

    async def _resize(self, size: tuple[int, int]) -> None:
        """Tell the app the size; it draws everything anew. Spectators of another size have to come again."""
        before, self.size = self.size, size
        if self.size != before:
            for viewer in self._viewers:
                if viewer is not self._owner:
                    viewer.end()
        if self._process is not None:
            await self._process.send_meta(type="resize", width=self.size[0], height=self.size[1])

    async def _read(self, process: TabProcess) -> None:
        """Pass on what the app draws, until it ends."""
        n_packets = 0
        while (packet := await process.read()) is not None:
            kind, payload = packet
            n_packets += 1
            if kind == b"D":
                self._draw(payload)
            elif kind == b"M" and self._owner is not None and (link := _link(payload)):
                self._owner.put(json.dumps(["open_url", {"url": link, "new_tab": True}]))
        self.ended = True
        self._end_viewers()
        if failure := await process.failure():
            self._tell(f"cpuchat: a browser session {'failed' if n_packets else 'did not start'}: {failure}")

    def _draw(self, payload: bytes) -> None:
        """Send what the app draws to all viewers, what it copies to the owner's clipboard alone."""
        for viewer in self._viewers:
            if viewer is self._owner or not payload.startswith(_CLIPBOARD):
                viewer.put(payload)

    def _end_viewers(self) -> None:
        for viewer in self._viewers:
            viewer.end()


class Sessions:
    """All sessions of a server.

    Args:
        server: its address, for the apps.
        token: that it wants of them, "" = none.
        limit: of sessions; fewer where memory is short.
        tell: called with what went wrong.
    """

    def __init__(
        self, server: str, token: str = "", limit: int = 8, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        self.token = token
        self._server = server
        self._limit = limit
        self._tell = tell
        self._by_id: dict[str, Session] = {}
        self._ending = False
        self._begun: set[str] = set()  # offered ids that are used up
        self._secret = secrets.token_bytes(32)

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def _has_room(self) -> bool:
        return not self._ending and len(self._by_id) < self._limit and available_bytes() >= 2 * SESSION_BYTES

    def offer(self) -> str:
        """Return the id of a session that `open` begins, "" while there is no room, and once the server ends. Nothing
        is reserved: who loads pages and opens none (a prefetch, a link checker) takes no session.
        """
        if not self._has_room:
            return ""
        # Signed rather than remembered: pages that are never opened would fill any list.
        unsigned = f"{secrets.token_urlsafe(16)}.{int(time.monotonic() + OFFER_SECONDS)}"
        return f"{unsigned}.{self._signature(unsigned)}"

    def _signature(self, unsigned: str) -> str:
        return hmac.new(self._secret, unsigned.encode(), "sha256").hexdigest()[:32]

    def can_open(self, id: str) -> bool:
        """Return whether `open` returns a session, as things are."""
        if id in self._begun:
            return self.owned(id) is not None
        unsigned, _, signature = id.rpartition(".")
        is_ours = hmac.compare_digest(signature.encode(), self._signature(unsigned).encode())
        return is_ours and _is_fresh(id) and self._has_room

    def open(self, id: str) -> Session | None:
        """Return the session of this id, a new one if it was offered; None if it has ended, or there is no room now."""
        if not self.can_open(id):
            return None
        if id not in self._begun:
            self._begun = {one for one in self._begun if one in self._by_id or _is_fresh(one)} | {id}
            self._by_id[id] = Session(self._server, self.token, self._tell, id=id)
        return self._by_id[id]

    def owned(self, id: str) -> Session | None:
        """Return the session that this id opens."""
        session = self._by_id.get(id)
        return session if session is not None and not session.ended else None

    def watched(self, watch_id: str) -> Session | None:
        """Return the session that this id shows."""
        return next((one for one in self._by_id.values() if one.watch_id == watch_id and not one.ended), None)

    async def watch_over(self, seconds: float = 5.0) -> None:
        """End sessions that nobody uses, until cancelled; then all. Removes what killed servers left."""
        try:
            await asyncio.to_thread(remove_abandoned)
            while True:
                await asyncio.sleep(seconds)
                await self._end([one for one in self._by_id.values() if one.ended or one.overdue])
        finally:
            self._ending = True
            await self._end(list(self._by_id.values()))

    async def _end(self, sessions: list[Session]) -> None:
        """End them. Those of a call that was cancelled are still known."""
        await asyncio.gather(*(one.end() for one in sessions))
        for one in sessions:
            self._by_id.pop(one.id, None)


def _is_fresh(id: str) -> bool:
    """Return whether an id that was offered may still begin a session."""
    return time.monotonic() < int(id.split(".")[1])


def remove_abandoned() -> None:
    """Remove the folders of sessions whose server and app were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        with contextlib.suppress(OSError):
            lock = folder / _LOCK
            if folder.lstat().st_uid == os.getuid() and lock.is_file() and not is_locked(lock):
                shutil.rmtree(folder, ignore_errors=True)


def _clamped(width: int, height: int) -> tuple[int, int]:
    """Return the size that the app gets for one that a page asks for."""
    return min(max(width, _LEAST), _MOST_WIDTH), min(max(height, _LEAST), _MOST_HEIGHT)


class _Size(msgspec.Struct):
    width: int
    height: int


def _parsed(message: str) -> tuple[str, Any]:
    """Return the kind and the value of a message. Raises ValueError."""
    found = msgspec.json.decode(message, type=prepared(Annotated[list[Any], msgspec.Meta(min_length=1)]))
    kind, value = msgspec.convert(found[0], str), found[1] if len(found) > 1 else None
    if kind == "resize":
        size = msgspec.convert(value, prepared(_Size), strict=False)
        value = _clamped(size.width, size.height)
    return kind, value


def _link(payload: bytes) -> str:
    """Return the address that the app wants to open, "" for anything else."""
    with contextlib.suppress(ValueError):
        found = json.loads(payload)
        if isinstance(found, dict) and found.get("type") == "open_url":
            url = str(found.get("url"))
            return url if urlsplit(url).scheme in ("http", "https") else ""
    return ""
