"""Tests commands on models of scripted servers, named or used last."""

from __future__ import annotations

import asyncio
import http.server
import signal
import threading
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Iterator
from pathlib import Path

import pytest

from cpuchat.cli.app import initial_model
from cpuchat.cli.options import key_ring
from cpuchat.config import settings
from cpuchat.models.library.library import Library
from tests.cli.program import COMMAND, HANG_GUARD, run
from tests.support.remote_server import Reply, remote_server
from tests.support.sound_program import SoundProgram


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
    done = run("ask", "--threads", "1", "Hello", stdin=b"\xff")
    assert done.returncode == 2 and "engine.threads" in done.stderr  # before standard input is read


def test_the_app_says_that_they_have_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    settings.update({"model": {"last": "http://127.0.0.1:9#name"}})
    found = initial_model(Library(()), None, settings.load(), {"engine__threads": 1})
    assert str(found) == "http://127.0.0.1:9#name"
    assert "engine.threads has no effect" in capsys.readouterr().err


async def test_a_player_that_fails_leaves_the_answer_and_an_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = SoundProgram(tmp_path / "bin", monkeypatch, status="3 if heard > 0.1 else 0")  # the probe is shorter
    async with remote_server() as server:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "ask", "--server", server.url, "--speak", "Hello", stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )
        out, errors = await asyncio.wait_for(process.communicate(), HANG_GUARD)
    assert (process.returncode, out) == (23, b"Hello there.\n") and b"aplay stopped playing" in errors
    assert program.seconds() > 0.5


@pytest.mark.parametrize("command", [("tune",), ("bench",)])
def test_what_computes_here_wants_a_model_of_this_machine(command: tuple[str, ...]) -> None:
    settings.update({"model": {"last": "http://127.0.0.1:9#name"}})
    done = run(*command)
    assert done.returncode == 2 and "on a server" in done.stderr


async def test_ctrl_c_stops_and_keeps_the_partial_answer() -> None:
    async def answer(reply: Reply) -> None:
        await reply.head()
        await reply.text("The first half")
        await reply.until_left()
        server.left.set()

    async with remote_server(answer=answer) as server:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "ask", "--server", server.url, "Hello", stdin=DEVNULL, stdout=PIPE, stderr=PIPE
        )
        assert process.stdout is not None
        first = await process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, _ = await asyncio.wait_for(process.communicate(), HANG_GUARD)
        assert (first + rest).strip() == b"The first half"
        assert process.returncode == 130
        await asyncio.wait_for(server.left.wait(), HANG_GUARD)
