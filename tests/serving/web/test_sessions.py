"""Tests sessions and pages without an app: who may come in, when a session is over, slow browsers."""

from __future__ import annotations

import asyncio

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from cpuchat.serving.guard import Guard
from cpuchat.serving.web import sessions
from cpuchat.serving.web.access import WebAccess
from cpuchat.serving.web.pages import WebPages
from cpuchat.serving.web.sessions import Session, Sessions, Viewer

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
        assert "HttpOnly" in entered.headers["set-cookie"] and "SameSite=strict" in entered.headers["set-cookie"]
        assert browser.get("/").status_code == 200 and len(found) == 1
        assert browser.get("/v1/models").status_code == 401
        for token, status in ((TOKEN, 200), ("for tabs", 200), ("neither", 401)):
            assert browser.get("/v1/models", headers={"authorization": f"Bearer {token}"}).status_code == status


def test_a_session_that_nobody_uses_is_overdue() -> None:
    now = 0.0
    session = Session("http://127.0.0.1:1", "", clock=lambda: now)
    now = sessions.LEFT_SECONDS
    assert not session.overdue
    now += 1
    assert session.overdue


async def test_a_browser_that_is_too_slow_is_closed() -> None:
    class Screen:
        sent = 0
        closed = False

        async def send(self, data: bytes | str) -> None:
            await asyncio.sleep(0)
            self.sent += len(data)

        async def close(self) -> None:
            self.closed = True

    screen = Screen()
    viewer = Viewer(screen)
    for _ in range(20):
        viewer.put(bytes(100_000))
    await viewer.send()
    assert screen.closed and 0 < screen.sent < 20 * 100_000


@pytest.mark.parametrize("message", ["", "{}", "[]", "[1]", '["resize", {"width": "x", "height": 1}]'])
async def test_a_message_that_is_not_the_client_s_is_refused_or_ignored(message: str) -> None:
    session = Session("http://127.0.0.1:1", "")
    try:
        await session.take(message)
    except ValueError:
        return
    assert session.size == (80, 24)
