"""Tests the real worker process answering: streaming, cancelling, repeating, reusing its cache."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from cpuchat.backend.local import LocalBackend
from cpuchat.config.servers import RunningServer, recorded
from cpuchat.protocol.messages import (
    ContextTrimmed,
    Generate,
    GenerationFinished,
    LoadOptions,
    LoadProgress,
    Message,
    ModelLoaded,
    Sampling,
    StateKey,
    TextDelta,
)
from tests.support.chatting import chat, collect, load, worker
from tests.support.tiny_gguf import CHATML, write_tiny_gguf

LONG = "the inner line there " * 75

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_load_reports_progress_then_the_model(tiny_model: Path, other: LocalBackend) -> None:
    served, shown = RunningServer("http://127.0.0.1:9", "other", pid=1), RunningServer("", "", pid=2)
    with recorded(served), recorded(shown):
        answer = await collect(other.load(tiny_model, LoadOptions(n_ctx=512)))
    *read, last = answer.of(LoadProgress)
    assert read[-1].done == read[-1].total and last.phase == "warming"
    loaded = answer.events[-1]
    assert isinstance(loaded, ModelLoaded)
    assert loaded.model.n_ctx == 512
    assert loaded.model.has_template
    assert other.model == loaded.model
    # Whoever loads a model beside a server or another app is told.
    assert "running too (http://127.0.0.1:9, in another terminal)" in loaded.model.notes[-1]


async def test_saved_cache_survives_a_restart_and_a_deleted_chat_leaves_nothing_on_disk(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with worker(tiny_model, state_dir=tmp_path) as backend:
        first = await collect(backend.generate(chat(LONG, state=StateKey(chat="c1"))))
        await collect(backend.generate(chat(f"another {LONG}", state=StateKey(chat="c2"))))
    assert len(list(tmp_path.glob("*.kv"))) == 2
    async with worker(tiny_model, state_dir=tmp_path) as backend:
        second = await collect(backend.generate(chat(LONG, first.text, "and then?", state=StateKey(chat="c1"))))
        assert second.timings.cache_n >= first.timings.prompt_n
    async with worker(tiny_model, state_dir=tmp_path) as backend:
        fork = await collect(backend.generate(chat(LONG, first.text, "and then?", state=StateKey(chat="c3"))))
        assert fork.timings.cache_n >= first.timings.prompt_n
        for chat_id in ("c1", "c2", "c3"):
            await backend.forget(chat_id)
        assert not list(tmp_path.glob("*.kv"))
    assert not list(tmp_path.glob("*.kv"))


async def test_cancel_while_writing_keeps_what_was_said(shared: LocalBackend) -> None:
    events = []
    async for event in shared.generate(chat("hello", max_tokens=0)):
        if isinstance(event, TextDelta) and not events:
            await shared.cancel()
        if isinstance(event, TextDelta | GenerationFinished):
            events.append(event)
    assert isinstance(events[-1], GenerationFinished)
    assert events[-1].stop_reason == "cancelled"
    assert 0 < events[-1].timings.predicted_n < 3_000
    assert (await collect(shared.generate(chat("hello")))).finished.stop_reason == "max_tokens"


async def test_leaving_the_stream_early_cancels_the_answer(shared: LocalBackend) -> None:
    stream = shared.generate(chat("hello", max_tokens=0))
    async for event in stream:
        if isinstance(event, TextDelta):
            break
    await stream.aclose()
    assert (await collect(shared.generate(chat("hello", max_tokens=5)))).timings.predicted_n == 5
    await shared.cancel()  # too late to stop the next answer
    assert (await collect(shared.generate(chat("hello")))).finished.stop_reason == "max_tokens"


async def test_cancel_while_a_prompt_of_many_messages_is_tokenized(shared: LocalBackend) -> None:
    request = Generate(request_id=0, messages=(Message(role="user", content=""),) * 20_000)
    async with asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(collect(shared.generate(request)))
        while not answering.done():
            await asyncio.sleep(0.01)  # until the worker has it
            await shared.cancel()
    answer = answering.result()
    assert answer.finished.stop_reason == "cancelled"
    assert not answer.of(ContextTrimmed), "it was tokenized to its end"
    assert (await collect(shared.generate(chat("hello", max_tokens=5)))).timings.predicted_n == 5


async def test_plain_completion_uses_no_template(tiny_model: Path) -> None:
    async with worker(tiny_model) as backend:
        request = Generate(prompt="abc", sampling=Sampling(temperature=0.0), max_tokens=8)
        answer = await collect(backend.generate(request))
        assert answer.timings.prompt_n <= 4
        assert answer.timings.predicted_n == 8
        assert await backend.count_tokens("abc") in (
            answer.timings.prompt_n,
            answer.timings.prompt_n - 1,
        )  # begin token
        assert await backend.count_tokens("") == 0
        os.kill(backend.pid, signal.SIGSTOP)
        count = asyncio.ensure_future(backend.count_tokens("abc"))
        await asyncio.sleep(0)
        os.kill(backend.pid, signal.SIGKILL)
        assert await count is None
        assert await backend.count_tokens("abc") is None


async def test_tokens_are_not_counted_during_an_answer(shared: LocalBackend) -> None:
    async for _ in shared.generate(chat("hello", max_tokens=5)):
        assert await shared.count_tokens("abc") is None


async def test_the_reasoning_ends_when_the_user_wants_the_answer(tmp_path: Path, other: LocalBackend) -> None:
    template = CHATML.replace("assistant\n", "assistant\n<think>\n")
    await load(other, write_tiny_gguf(tmp_path / "thinker.gguf", template=template))
    assert not await other.end_reasoning()
    channels = []
    async for event in other.generate(chat("hello", max_tokens=200)):
        if isinstance(event, TextDelta):
            channels.append(event.channel)
            assert await other.end_reasoning() == (event.channel == "reasoning")
    assert channels[0] == "reasoning" and channels[-1] == "answer"
