"""Tests commands without --model after a model on a server was used last."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from cpuchat import settings
from cpuchat.cli.options import key_ring
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


def test_ask_refuses_options_of_the_worker() -> None:
    settings.update({"model": {"last": "http://127.0.0.1:9#name"}})
    done = run("ask", "--threads", "1", "Hello")
    assert done.returncode == 2 and "engine.threads" in done.stderr


@pytest.mark.parametrize("command", [("tune",), ("system", "measure"), ("bench",)])
def test_what_computes_here_wants_a_model_of_this_machine(command: tuple[str, ...]) -> None:
    settings.update({"model": {"last": "http://127.0.0.1:9#name"}})
    done = run(*command)
    assert done.returncode == 2 and "on a server" in done.stderr
