"""Tests a server whose model is unloaded while nobody uses it."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from tests.support.serving import HANG_GUARD, Server, chat, server


def wait_until_unloaded(running: Server) -> None:
    deadline = time.monotonic() + HANG_GUARD
    while running.metric("model_loaded"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def wait_until_no_child(running: Server) -> None:
    """Wait until the worker has ended and the server has read its status: `/health` does not wait for that."""
    deadline = time.monotonic() + HANG_GUARD
    while children := psutil.Process(running.process.pid).children():
        assert time.monotonic() < deadline, children
        time.sleep(0.01)


def test_an_idle_model_gives_its_memory_back_and_any_request_loads_it_again(tiny_model: Path, tmp_path: Path) -> None:
    with server(tiny_model, tmp_path, "--idle-unload", "0.01") as running:
        text = running.post(chat("Hello")).json()["choices"][0]["message"]["content"]
        wait_until_unloaded(running)
        wait_until_no_child(running)
        loads = running.metric("model_loads_total") or 0
        assert running.http.get("/health").json() == {"status": "ok", "model": "unloaded"}
        assert running.http.get("/v1/models").json()["data"][0]["id"] == "tiny-F32"
        assert running.metric("model_loads_total") == loads  # none of these loads it
        again = running.post(chat("Hello")).json()
        assert again["choices"][0]["message"]["content"] == text
        wait_until_unloaded(running)
        counted = running.http.post("/v1/messages/count_tokens", json=chat("Hello"))
        assert counted.status_code == 200 and counted.json()["input_tokens"] == again["usage"]["prompt_tokens"]
        assert (running.metric("model_loads_total") or 0) >= loads + 2
    log = (tmp_path / "stderr.txt").read_text()
    assert log.count("unloaded tiny-F32 after 0.01 idle minutes") >= 2 and "loaded tiny-F32 again" in log
