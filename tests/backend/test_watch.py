"""Tests that a worker which llama.cpp keeps from stopping is ended, and others are not."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from os import EX_SOFTWARE
from pathlib import Path

import psutil
import pytest

from cpuchat.backend import process
from cpuchat.backend.local import LocalBackend
from cpuchat.base.errors import WorkerStuck
from cpuchat.base.processes import python_command
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.protocol.messages import GenerationFinished, LoadModel, LoadOptions, encode
from tests.support.chatting import chat, collect, in_use

FAULTY = """
import sys
from cpuchat.engine.decoding.guided import Grammar
from cpuchat.worker import __main__, server
server.SAVING_SECONDS = 0.1
def accept(self, token):
    while True:
        pass
Grammar.accept = accept
sys.exit(__main__.main())
"""
"""A worker that does not end under grammars, as a fault in a library would have it."""
HANGS = 'root ::= "a"'
WORKER = python_command("-c", FAULTY)


@pytest.fixture
async def backend(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalBackend]:
    monkeypatch.setattr(process, "python_command", lambda *_: WORKER)
    async with in_use(LocalBackend(log_dir=tmp_path)) as one:
        await collect(one.load(tiny_model, LoadOptions(n_ctx=512)))
        yield one


async def answered(backend: LocalBackend) -> bool:
    answer = await collect(backend.generate(chat("Hello", max_tokens=3)))
    return isinstance(answer.events[-1], GenerationFinished)


async def test_a_worker_that_does_not_obey_a_cancel_is_ended_and_the_chat_goes_on(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "STUCK_CPU_SECONDS", 0.2)
    monkeypatch.setattr(process, "POLL_SECONDS", 0.05)
    before = backend.pid
    answer = asyncio.create_task(collect(backend.generate(chat("Hello", grammar=HANGS))))
    worker = psutil.Process(before)
    start = worker.cpu_times().user
    while worker.cpu_times().user < start + 0.2:  # it is at it
        await asyncio.sleep(0.01)
    await backend.cancel()
    failed = (await answer).failed
    assert failed.code == WorkerStuck.code and "did not stop" in failed.message
    assert backend.pid is None
    assert await answered(backend)


def test_a_worker_that_is_stuck_when_its_parent_is_gone_ends(tiny_model: Path) -> None:
    with subprocess.Popen(WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        options = LoadOptions(n_ctx=512)
        worker.stdin.write(encode(LoadModel(path=str(tiny_model), cpus=own_cpus()[:1], options=options)))
        worker.stdin.write(encode(chat("Hello", grammar=HANGS)))
        worker.stdin.close()  # as the kernel does for a killed parent
        assert worker.wait() == EX_SOFTWARE
