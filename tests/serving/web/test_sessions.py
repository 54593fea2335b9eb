"""Tests sessions and pages without an app: who may come in, when a session is over, slow browsers."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from cpuchat.serving.server import Guard
from cpuchat.serving.web import sessions
from cpuchat.serving.web.pages import WebPages
from cpuchat.serving.web.sessions import Session, Sessions, Viewer, WebAccess

TOKEN = "t" * 20


pytest.importorskip("textual_serve", reason="needs the extra `web`")


def test_a_token_is_given_once_and_the_cookie_opens_pages_only() -> None:
    access, found = WebAccess(TOKEN), Sessions("http://127.0.0.1:1", "for tabs")
    models = Route("/v1/models", lambda request: PlainTextResponse("models"))
    guard = Middleware(Guard, token=TOKEN, local=False, web=access, tab_token="for tabs")
    with TestClient(Starlette(routes=[models, *WebPages(found, access).routes], middleware=[guard])) as browser:
        assert browser.get("/").status_code == 401
        assert browser.get("/?token=wrong").status_code == 401
        assert browser.get("/chat/any").status_code == 401
        entered = browser.get(f"/?token={TOKEN}", follow_redirects=False)
        assert entered.headers["location"] == "/" and TOKEN not in str(entered.headers)
        assert "HttpOnly" in entered.headers["set-cookie"] and "SameSite=lax" in entered.headers["set-cookie"]
        assert browser.head("/").status_code == 200 and len(found) == 0
        image = browser.get("/", headers={"sec-fetch-dest": "image"})  # in a page of another site
        assert image.status_code == 403 and len(found) == 0
        page = browser.get("/")
        assert page.status_code == 200 and "/chat/" in str(page.url) and len(found) == 0
        for purpose in ({"sec-purpose": "prefetch;prerender"}, {"purpose": "prefetch"}):
            assert browser.get("/", headers=purpose).status_code == 403
            assert browser.get(str(page.url), headers=purpose).status_code == 403
        assert browser.get("/v1/models").status_code == 401
        for token, status in ((TOKEN, 200), ("for tabs", 200), ("neither", 401)):
            assert browser.get("/v1/models", headers={"authorization": f"Bearer {token}"}).status_code == status


class Page:
    """Stands in for a browser: what it got."""

    def __init__(self) -> None:
        self.data = b""
        self.closed = asyncio.Event()

    async def send(self, data: bytes | str) -> None:
        await asyncio.sleep(0)
        self.data += data if isinstance(data, bytes) else data.encode()

    async def close(self) -> None:
        self.closed.set()


class App:
    """Stands in for the app of a tab: it draws `packets`, and ends with a failure."""

    def __init__(self, *packets: bytes) -> None:
        self._packets = list(packets)
        self.taken: list[bytes] = []

    async def read(self) -> tuple[bytes, bytes] | None:
        return (b"D", self._packets.pop(0)) if self._packets else None

    async def send(self, kind: bytes, payload: bytes) -> None:
        self.taken.append(payload)

    async def send_meta(self, **fields: object) -> None:
        pass

    async def failure(self) -> str:
        return "RuntimeError: no reason"


async def test_a_session_that_nobody_uses_is_overdue() -> None:
    now = 0.0
    session = Session("http://127.0.0.1:1", "", clock=lambda: now)
    session._process = App()  # type: ignore[assignment]
    now = sessions.LEFT_SECONDS
    assert not session.overdue
    now += 1
    assert session.overdue
    async with session.shown(Page(), (80, 24)):
        await session.take('["stdin", "x"]')
        now += sessions.IDLE_SECONDS
        await session.take('["focus"]')  # no key
        assert not session.overdue
        now += 1
        assert session.overdue


async def test_a_browser_that_is_too_slow_is_closed() -> None:
    page = Page()
    viewer = Viewer(page)
    for _ in range(20):
        viewer.put(bytes(100_000))
    await viewer.send()
    assert page.closed.is_set() and 0 < len(page.data) < 20 * 100_000


async def test_what_the_app_copies_goes_to_its_owner_alone() -> None:
    told: list[str] = []
    session, app = Session("http://127.0.0.1:1", "", told.append), App(b"drawn", b"\x1b]52;c;SGk=\a")
    session._process = app  # type: ignore[assignment]
    owner, spectator = Page(), Page()
    async with session.shown(owner, (99_999_999, -1)), session.shown(spectator):
        assert session.size == (500, 10)
        await session.take(json.dumps(["stdin", "x" * 300_000]))
        await session._read(app)  # type: ignore[arg-type]
        await owner.closed.wait()
        await spectator.closed.wait()
    assert b"drawn\x1b]52" in owner.data and b"drawn" in spectator.data and b"\x1b]52" not in spectator.data
    assert app.taken == [b"x" * 300_000]  # a part of a paste would have no end
    assert session.ended and told == ["cpuchat: a browser session failed: RuntimeError: no reason"]


async def test_a_session_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    told: list[str] = []
    session, page = Session("http://127.0.0.1:1", "", told.append), Page()
    async with session.shown(page, (80, 24)):
        await page.closed.wait()
    assert session.ended and told == ["cpuchat: a browser session did not start: No such file or directory"]


def test_no_session_begins_while_all_are_in_use_or_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Sessions("http://127.0.0.1:1", limit=1)
    monkeypatch.setattr(sessions, "available_bytes", lambda: 2 * sessions.SESSION_BYTES - 1)
    assert not found.offer()
    monkeypatch.setattr(sessions, "available_bytes", lambda: 2 * sessions.SESSION_BYTES)
    first, second = found.offer(), found.offer()
    assert found.can_open(first) and found.can_open(second) and len(found) == 0
    session = found.open(first)
    assert session is not None and found.open(first) is session
    assert not found.can_open(second) and found.open(second) is None and not found.offer()
    session.ended = True  # its folder is not yet removed
    assert found.open(first) is None and len(found) == 1


def test_only_what_was_offered_just_now_begins_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    found, other = Sessions("http://127.0.0.1:1"), Sessions("http://127.0.0.1:1")
    offered = found.offer()
    nonce, until, signature = offered.split(".")
    for id in (
        "",
        ".",
        "..",
        "any",
        "\u00e9.9.x",
        f"{nonce}.{int(until) + 1}.{signature}",
        other.offer(),
        f"{nonce}.x.",
    ):
        assert found.open(id) is None
    monkeypatch.setattr(sessions.time, "monotonic", lambda: float(until))
    assert found.open(offered) is None and len(found) == 0


def test_the_cookie_is_valid_for_a_day_and_cannot_be_made_valid_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    access, response, now = WebAccess(TOKEN), PlainTextResponse(), 1_000_000_000
    monkeypatch.setattr("cpuchat.serving.web.sessions.time.time", lambda: now)
    assert access.log_in(TOKEN, response, secure=False)
    cookie = response.headers["set-cookie"].partition(";")[0]
    assert "Max-Age=86400" in response.headers["set-cookie"]
    now += 86_399
    assert access.is_known(Headers({"cookie": cookie}))
    now += 1
    assert not access.is_known(Headers({"cookie": cookie}))
    for forged in (cookie.replace("=1", "=2"), "cpuchat_web=", "cpuchat_web=x.y", "cpuchat_web=9999999999."):
        assert not access.is_known(Headers({"cookie": forged}))


async def test_an_app_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packet = "D\\0\\0\\0\\1x"
    failing = [sys.executable, "-Sc", f"import sys; sys.stdout.write('{packet}'); sys.exit('no reason')"]
    monkeypatch.setattr("cpuchat.serving.web.sessions.python_command", lambda *_: failing)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told: list[str] = []
    session, page = Session("http://127.0.0.1:1", "", told.append), Page()
    async with session.shown(page, (80, 24)):
        while not told:
            await asyncio.sleep(0)
        sessions.remove_abandoned()
        assert list(tmp_path.iterdir())  # its server runs
    await session.end()
    assert told == ["cpuchat: a browser session failed: no reason"] and not list(tmp_path.iterdir())


def test_folders_of_killed_servers_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("cpuchat-tab-killed", "cpuchat-tab-begun", "another"):
        (tmp_path / name).mkdir()
    for name in ("cpuchat-tab-killed", "another"):
        (tmp_path / name / "server.lock").touch()
    sessions.remove_abandoned()
    assert {folder.name for folder in tmp_path.iterdir()} == {"cpuchat-tab-begun", "another"}


async def test_at_the_end_of_the_server_a_session_that_starts_is_waited_for_and_none_begins() -> None:
    found = Sessions("http://127.0.0.1:1")
    session, watching = found.open(found.offer()), asyncio.create_task(found.watch_over())
    assert session is not None
    async with session._starting:
        await asyncio.sleep(0)
        watching.cancel()
        while not session.ended:
            await asyncio.sleep(0)
        assert not found.offer() and not watching.done()
    await asyncio.wait({watching})
    assert len(found) == 0


@pytest.mark.parametrize(
    "message",
    ["", "{}", "[]", "[1]", '["resize", 1]', '["resize", {"width": "x", "height": 1}]',
     '["resize", {"width": 1e999, "height": 1}]'],
)  # fmt: skip
async def test_a_message_that_is_not_the_client_s_is_refused(message: str) -> None:
    with pytest.raises(ValueError):
        await Session("http://127.0.0.1:1", "").take(message)
