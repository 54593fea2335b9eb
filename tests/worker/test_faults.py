"""Tests the real worker under attack: killed, aborted by llama.cpp, fed with damaged files and hostile text."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from cpuchat.backend.local import LocalBackend
from cpuchat.protocol.messages import LoadOptions, TextDelta
from tests.support.chatting import chat, collect, load, worker
from tests.support.cores import ON_ONE_CPU
from tests.support.edited_gguf import edited
from tests.support.tiny_gguf import write_tiny_gguf

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_killed_in_mid_answer_or_idle_it_starts_again_and_no_process_stays_behind(tiny_model: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    async with worker(tiny_model) as backend:
        events = []
        async for event in backend.generate(chat("hello", max_tokens=0)):
            events.append(event)
            if isinstance(event, TextDelta) and backend.pid is not None:
                os.kill(backend.pid, signal.SIGKILL)
        assert events[-1].code == "worker_died"
        assert "killed" in events[-1].message
        assert sum(isinstance(event, TextDelta) for event in events) >= 1
        assert backend.model is None
        assert (await collect(backend.generate(chat("hello")))).finished.stop_reason == "max_tokens"
        assert backend.model is not None and backend.pid is not None
        os.kill(backend.pid, signal.SIGKILL)
        assert (await collect(backend.generate(chat("hello")))).finished.stop_reason == "max_tokens"
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


async def test_assertion_in_llama_cpp_is_quoted(tmp_path: Path) -> None:
    # Heads that are all position, and a KV cache with room for that: llama.cpp asserts what one architecture needs.
    sound = write_tiny_gguf(tmp_path / "sound.gguf", arch="deepseek2")
    heads = {"rope.dimension_count": 32, "attention.key_length": 64}
    model = edited(sound, tmp_path / "heads.gguf", {f"deepseek2.{key}": value for key, value in heads.items()})
    async with worker() as backend:
        failed = (await collect(backend.load(model, LoadOptions(n_ctx=512), ON_ONE_CPU))).failed
        assert failed.code == "worker_died"
        assert "GGML_ASSERT(n_embd_head_qk_nope" in failed.message
        assert "may be damaged" in failed.hint


@pytest.mark.skipif(sys.platform == "win32", reason="Windows lets nobody cut a mapped file")
async def test_a_file_that_is_cut_while_it_is_loaded_is_named_and_loaded_anew(
    tiny_model: Path, tmp_path: Path, other: LocalBackend
) -> None:
    data = tiny_model.read_bytes()
    model = tmp_path / "model.gguf"
    model.write_bytes(data)
    await load(other, model)
    os.truncate(model, len(data) // 2)
    failed = (await collect(other.generate(chat("hello")))).failed
    assert failed.code == "worker_died" and "SIGBUS" in failed.message
    words = f"model.gguf was changed while it was in use: {len(data):,} bytes when loaded, {len(data) // 2:,} now"
    assert words in failed.message and "download it again" in failed.hint
    again = (await collect(other.generate(chat("hello")))).failed
    assert again.code == "model_damaged" and "truncated" in again.message
    model.write_bytes(data)
    assert (await collect(other.generate(chat("hello")))).finished.stop_reason == "max_tokens"


@contextlib.asynccontextmanager
async def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> AsyncIterator[LocalBackend]:
    """Yield a worker with a fault that no input causes: Python runs this file in every process that it starts."""
    (tmp_path / "sitecustomize.py").write_text(fault)
    with monkeypatch.context() as faulted:
        faulted.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
        async with asyncio.timeout(180), worker() as backend:
            yield backend


ALL_BUT_ANSWERS_FAIL = """
from cpuchat.worker import server
from cpuchat.engine.engine import Engine
server.IDLE_SECONDS = 0.01
def idle(self):
    open(__file__ + ".idled", "w").close()
    raise RuntimeError("idle failed")
def count_tokens(self, _):
    raise RuntimeError("count failed")
def forget(self, _):
    raise RuntimeError("forget failed")
Engine.idle, Engine.count_tokens, Engine.forget = idle, count_tokens, forget
"""
ENGINE_ENDS = """
from cpuchat.engine.engine import Engine
def generate(self, *_):
    raise SystemExit(0)
Engine.generate = generate
"""


async def test_what_fails_in_the_worker_or_in_an_idle_moment_is_logged_and_ends_nothing_else(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with faulty(tmp_path, monkeypatch, ALL_BUT_ANSWERS_FAIL) as backend:
        await load(backend, tiny_model)
        while not (tmp_path / "sitecustomize.py.idled").exists():
            await asyncio.sleep(0)
        assert await backend.count_tokens("hello") is None
        await backend.forget("of nobody")
        assert (await collect(backend.generate(chat("hello")))).finished.stop_reason == "max_tokens"
        log = backend.log_file.read_text()
        assert all(f"RuntimeError: {name} failed" in log for name in ("idle", "count", "forget"))


async def test_an_engine_thread_that_ends_is_a_worker_that_dies(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with faulty(tmp_path, monkeypatch, ENGINE_ENDS) as backend:
        await load(backend, tiny_model)
        failed = (await collect(backend.generate(chat("hello")))).failed
        assert failed.code == "worker_died" and "status 70" in failed.message
