"""Tests a model over a real RPC worker, where llama.cpp was built with RPC (`benchmarks/build_llama.py --rpc`)."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from cpuchat.backend.heads.server import free_port
from cpuchat.backend.switching import SwitchingBackend
from cpuchat.base import paths
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.protocol.messages import TextDelta
from tests.cli.program import start
from tests.support.chatting import chat, collect, load

DEMO = paths.demo_dir() / DEMO_FILES["demo"]
PROGRAMS = Path(__file__).parents[3] / "benchmarks/work/llama/rpc/bin"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (PROGRAMS / "ggml-rpc-server").is_file(), reason="no rpc-server was built"),
]


@pytest.fixture
async def backend() -> AsyncIterator[SwitchingBackend]:
    backend = SwitchingBackend()
    yield backend
    await backend.close()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Return a worker, and its address."""
    monkeypatch.setenv("PATH", f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}")
    port = free_port()
    process = start("serve", "--rpc-worker", "--port", str(port))
    assert process.stdout is not None
    assert f"RPC worker on 127.0.0.1:{port}" in process.stdout.readline().decode()
    while not is_open(port):
        assert process.poll() is None
    yield f"127.0.0.1:{port}", process
    process.kill()
    process.communicate()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_two_processes_answer_as_one(
    backend: SwitchingBackend, worker: tuple[str, subprocess.Popen[bytes]]
) -> None:
    address, process = worker
    await load(backend, DEMO, n_ctx=512)
    alone = (await collect(backend.generate(chat("Tell me a story")))).text
    model = await load(backend, DEMO, n_ctx=512, rpc=address, rpc_layers=3)
    assert (model.engine, model.rpc_layers) == ("llama-server", 3)
    got = await collect(backend.generate(chat("Tell me a story")))
    assert got.text == alone and got.timings.predicted_n == 24
    endless = chat("Tell me a story", max_tokens=0, ignore_eos=True)
    events = []
    async for event in backend.generate(endless):
        events.append(event)
        if isinstance(event, TextDelta):
            await backend.cancel()
    assert events[-1].stop_reason == "cancelled"

    server = backend.pid
    events = []
    async for event in backend.generate(endless):
        events.append(event)
        if isinstance(event, TextDelta):
            process.kill()
    assert events[-1].code == "worker_died" and any(isinstance(one, TextDelta) for one in events)
    assert server is not None and not psutil.pid_exists(server)
    process.wait()
    assert (await collect(backend.generate(endless))).failed.code == "server_unreachable"
