"""Tests clients that hang up, wait, or are too many; a worker that dies; a server that ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from cpuchat.backend.remote.backend import RemoteBackend
from cpuchat.config.servers import ServerModel, running_servers
from cpuchat.protocol.messages import GenerationFinished, LoadOptions, ModelLoaded, TextDelta
from tests.support.chatting import chat as request
from tests.support.chatting import collect
from tests.support.serving import HANG_GUARD, Server, chat, server, wait_until_gone

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def idle(endless: Server) -> Iterator[None]:
    """Check that each test leaves an idle engine."""
    yield
    endless.wait_for(running=0, waiting=0)


def count(endless: Server, result: str) -> float:
    return endless.metric("requests_total", endpoint="chat", result=result) or 0


def wait_for_count(endless: Server, result: str, wanted: float) -> None:
    """A request is counted a moment after its slot is free."""
    deadline = time.monotonic() + HANG_GUARD
    while (counted := count(endless, result)) != wanted:
        assert counted < wanted and time.monotonic() < deadline, (counted, wanted)
        time.sleep(0.01)


def forever(text: str = "Hello") -> dict:
    return chat(text, max_tokens=-1, stream=True)


def first_text(lines: Iterator[str], kind: str = "content") -> str:
    """Read a stream up to its first text."""
    for line in lines:
        if line.startswith("data: ") and (text := json.loads(line[6:])["choices"][0]["delta"].get(kind)):
            return text
    raise AssertionError("no text")


@contextlib.contextmanager
def writing(running: Server, n: int = 1) -> Iterator[list[Iterator[str]]]:
    """Yield the lines of streams without an end that have all begun."""
    with contextlib.ExitStack() as stack:
        found = list[Iterator[str]]()
        for number in range(n):
            response = stack.enter_context(running.http.stream("POST", CHAT, json=forever(f"Hello {number}")))
            found.append(response.iter_lines())
            assert first_text(found[-1])
        yield found


def errors(lines: Iterator[str]) -> list[str]:
    return [json.loads(line[6:])["error"]["code"] for line in lines if line.startswith('data: {"error"')]


def sent(endless: Server, body: dict) -> socket.socket:
    """Send a request without waiting for its answer; returns the connection."""
    url, data = httpx.URL(endless.url), json.dumps(body).encode()
    connection = socket.create_connection((url.host, url.port))
    head = f"POST {CHAT} HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("half", [False, True], ids=["gone", "closed its half of the connection"])
def test_a_client_that_hangs_up_before_its_answer_stops_the_engine(endless: Server, half: bool) -> None:
    before, worker = count(endless, "cancelled"), endless.worker.pid
    with sent(endless, chat("Hello", max_tokens=-1)) as connection:
        endless.wait_for(running=1)
        if half:
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    endless.wait_for(running=0)
    wait_for_count(endless, "cancelled", before + 1)
    assert endless.worker.pid == worker


def test_requests_wait_and_too_many_are_refused(endless: Server) -> None:
    before = count(endless, "queue_full")
    with endless.http.stream("POST", CHAT, json=forever()) as response:
        lines = response.iter_lines()  # without it, the stream would be closed
        assert first_text(lines)
        with ThreadPoolExecutor(8) as threads:
            waiting = [threads.submit(endless.post, chat("Hello", max_tokens=4)) for _ in range(8)]
            endless.wait_for(waiting=8)
            refused = endless.post(chat("Hello"))
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) >= 1
            response.close()
            assert [future.result().status_code for future in waiting] == [200] * 8
    wait_for_count(endless, "queue_full", before + 1)


def test_more_answers_than_can_ever_wait_are_refused(endless: Server) -> None:
    assert len(endless.post(chat("Hi", max_tokens=2, n=9)).json()["choices"]) == 9
    refused = endless.post(chat("Hi", max_tokens=2, n=10))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
    assert "--queue" in refused.json()["error"]["message"]


def test_one_that_waits_may_leave(endless: Server) -> None:
    before = count(endless, "cancelled")
    with writing(endless):
        with sent(endless, chat("Hello")):
            endless.wait_for(waiting=1)
        endless.wait_for(waiting=0)
        assert endless.metric("requests_running") == 1
    endless.wait_for(running=0)
    wait_for_count(endless, "cancelled", before + 2)


def test_no_client_waits_behind_many_requests_of_another_one(endless: Server) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(sent(endless, forever()))
        endless.wait_for(running=1)
        for number in range(1, 4):
            stack.enter_context(sent(endless, forever()))
            endless.wait_for(waiting=number)
        with ThreadPoolExecutor(1) as thread:
            editor = {"user-agent": "editor"}
            other = thread.submit(endless.http.post, CHAT, json=chat("Hi", max_tokens=2), headers=editor)
            endless.wait_for(waiting=4)
            first.close()
            assert other.result().status_code == 200
        assert endless.metric("requests_waiting")  # one of the others may have filled its context
    endless.wait_for(running=0, waiting=0)


async def test_the_app_s_backend_waits_in_the_queue_and_stops(endless: Server) -> None:
    backend = RemoteBackend()
    try:
        model = (await collect(backend.load(ServerModel(endless.url), LoadOptions()))).events[-1]
        assert isinstance(model, ModelLoaded)
        assert model.model.server == f"cpuchat serve at {httpx.URL(endless.url).netloc.decode()}"
        with writing(endless):
            waiting = asyncio.create_task(collect(backend.generate(request("Hello", max_tokens=64))))
            await asyncio.to_thread(endless.wait_for, waiting=1)
        queued = await waiting
        assert queued.text == "c" * 64
        assert queued.timings.draft_n_accepted > 32
        async with contextlib.aclosing(backend.generate(request("Hello", max_tokens=0))) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    await backend.cancel()
        assert isinstance(event, GenerationFinished)
        assert (event.stop_reason, event.note) == ("cancelled", "")
        endless.wait_for(running=0)
    finally:
        await backend.close()


def test_a_signal_ends_the_server_its_answers_its_worker_and_its_record(
    endless_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(endless_model, tmp_path, "--parallel", "2", ctx=8192) as running:
        monkeypatch.setenv("CPUCHAT_DATA_DIR", str(tmp_path / "data"))
        (record,) = running_servers()
        assert (record.url, record.model, record.pid) == (running.url, "endless-F32", running.process.pid)
        worker = running.worker
        with writing(running, 2) as lines:
            running.process.send_signal(signal.SIGTERM)
            assert [errors(one) for one in lines] == [["shutting_down"]] * 2
        assert running.process.wait(180) == 0
        wait_until_gone(worker)
        assert running_servers() == []
        assert "Traceback" not in (tmp_path / "stderr.txt").read_text()


def test_a_second_signal_ends_the_server_at_once(endless_model: Path, tmp_path: Path) -> None:
    """Its worker is stopped, and a stream is open: without the second signal, both would be waited for."""
    with server(endless_model, tmp_path, ctx=8192) as running:
        worker = running.worker
        with writing(running):
            worker.suspend()
            running.process.send_signal(signal.SIGTERM)
            while "stopping" not in (tmp_path / "stderr.txt").read_text():
                time.sleep(0.01)
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(180) == 130
        wait_until_gone(worker)
