"""Tests commands on models of scripted servers, named or used last."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from cpuchat.cli.app import initial_model
from cpuchat.cli.options import key_ring
from cpuchat.config import settings
from cpuchat.models.library.library import Library
from tests.cli.program import run


class _Refusing(http.server.BaseHTTPRequestHandler):
    seen: list[str]

    def do_GET(self) -> None:
        self.seen.append(self.headers.get("Authorization", ""))
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[tuple[str, list[str]]]:
    """The address of a server that wants a key, and what it was given."""
    seen: list[str] = []
    handler = type("Handler", (_Refusing,), {"seen": seen})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()


def test_ask_uses_it_without_the_key_of_another(
    refusing: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, seen = refusing
    monkeypatch.setenv("CPUCHAT_API_KEY", "sk-other")
    settings.update({"model": {"last": f"{url}#name"}})
    done = run("ask", "Hello")
    assert done.returncode == 22 and "needs an API key" in done.stderr
    assert seen and not any(seen)
    assert key_ring(settings.load(), None).key(url) == ""


def test_the_app_says_that_they_have_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    settings.update({"model": {"last": "http://127.0.0.1:9#name"}})
    found = initial_model(Library(()), None, settings.load(), {"engine__threads": 1})
    assert str(found) == "http://127.0.0.1:9#name"
    assert "engine.threads has no effect" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("tune",), ("bench",)])
def test_what_computes_here_wants_a_model_of_this_machine(command: tuple[str, ...]) -> None:
    settings.update({"model": {"last": "http://127.0.0.1:9#name"}})
    done = run(*command)
    assert done.returncode == 2 and "on a server" in done.stderr
