"""Tests the headless core with a real worker and a real database."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cpuchat.backend.switching import SwitchingBackend
from cpuchat.base import paths
from cpuchat.base.errors import UsageError
from cpuchat.chats.records import title_of
from cpuchat.chats.store import ChatStore
from cpuchat.config.servers import ServerModel, Source
from cpuchat.config.settings import Settings
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.models.library.usage import usage_of, usages
from cpuchat.protocol.messages import Failed, Generate, GenerationFinished, LoadCancelled, ModelLoaded, TextDelta
from cpuchat.protocol.timings import MAX_CPU_WAIT, MIN_TOKENS
from cpuchat.session.conversation import Conversation
from tests.chats.test_branches import everything
from tests.models.drafts.files import write_catalog
from tests.support.chatting import in_use
from tests.support.cores import ON_ONE_CPU
from tests.support.edited_gguf import edited
from tests.support.scripted_backend import ScriptedBackend, answer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("measured_machine"), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SwitchingBackend]:
    """A worker for all tests that leave it usable; every conversation loads its model there."""
    folder = tmp_path_factory.mktemp("shared")
    backend = SwitchingBackend()
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("CONFIG", "DATA", "CACHE"):
            patch.setenv(f"CPUCHAT_{kind}_DIR", str(folder))
        await backend.local.start()
    yield backend
    await backend.close()


@pytest.fixture(params=["worker", "server"])
def anywhere(request: pytest.FixtureRequest, tiny_model: Path) -> Source:
    """The same model, loaded by a worker and served by a llama-server."""
    return tiny_model if request.param == "worker" else request.getfixturevalue("served_model")


@contextlib.asynccontextmanager
async def conversation(
    model: Source, max_tokens: int = 8, backend: SwitchingBackend | None = None
) -> AsyncIterator[Conversation]:
    """A conversation with a loaded model. `backend` stays as it is for a server, which it would end its worker for."""
    if isinstance(model, ServerModel):
        backend = None
    settings = Settings()
    settings.chat.max_tokens = max_tokens
    settings.sampling.temperature = 0.0
    settings.engine.n_ctx = 2048
    settings.engine.cores = ON_ONE_CPU.cores
    store = ChatStore(paths.chats_db())
    core = Conversation(settings=settings, backend=backend or SwitchingBackend(), store=store)
    try:
        assert isinstance((await everything(core.load_model(model)))[-1], ModelLoaded)
        yield core
    finally:
        if backend is None:
            await core.close()
        else:
            await core.history.saver.close()
            await core.history.close_store()


async def test_a_message_and_its_answer_are_kept(anywhere: Source, shared: SwitchingBackend) -> None:
    async with conversation(anywhere, backend=shared) as core:
        events = await everything(core.send("hello\nthere"))
        assert isinstance(events[-1], GenerationFinished)
        chat_id, answer = core.chat.id, core.messages[1]
        assert core.chat.title == "hello"
        assert answer.content == "".join(e.text for e in events if isinstance(e, TextDelta))
        assert answer.stop_reason == "max_tokens"
        assert answer.timings.predicted_n == 8
        assert core.meter.figures().predicted_n == 8
    async with conversation(anywhere, backend=shared) as core:
        await core.open_chat(chat_id)
        assert [m.role for m in core.messages] == ["user", "assistant"]
        assert core.messages[1] == answer


async def test_what_was_used_and_how_fast_it_was_is_remembered(tiny_model: Path, shared: SwitchingBackend) -> None:
    async with conversation(tiny_model, max_tokens=MIN_TOKENS, backend=shared) as core:
        assert usage_of(usages(), [tiny_model]).used > 0
        core.drafts = False
        await everything(core.send("hello"))
        timings = core.messages[1].timings
        usage = usage_of(usages(), [tiny_model])
        alone = (timings.cpu_wait or 0.0) <= MAX_CPU_WAIT  # else it would tell of the other programs
        tells = alone and timings.predicted_n >= MIN_TOKENS
        assert usage.plain_tok_s == (timings.predicted_per_second if tells else 0.0)


async def test_a_draft_model_that_the_engine_leaves_out_is_not_said_to_draft(
    tmp_path: Path, shared: SwitchingBackend
) -> None:
    demo, draft = (paths.demo_dir() / DEMO_FILES[name] for name in ("demo", "demo-draft"))
    write_catalog(("big", "Big", 0.0085, ["small"]), ("small", "Small", 0.0011, []))
    target = Path(shutil.copy(demo, tmp_path / "Big-Q8_0.gguf"))
    async with conversation(target, backend=shared) as core:
        core.settings.model.folders = [str(tmp_path)]
        for changes, said in (
            ({"llama.feed_forward_length": 64}, "No draft model: "),
            ({}, "recommended by the catalog"),
        ):
            edited(draft, tmp_path / "Small-Q8_0.gguf", changes)
            loaded = (await everything(core.load_model(target)))[-1]
            assert isinstance(loaded, ModelLoaded)
            [note] = [note for note in loaded.model.notes if "raft model" in note]
            assert said in note


async def test_a_stop_while_the_message_is_stored_is_heard(tiny_model: Path, shared: SwitchingBackend) -> None:
    async with conversation(tiny_model, max_tokens=0, backend=shared) as core:
        for stream in (core.send, core.edit):
            answering = asyncio.create_task(everything(stream("hello")))
            while not core.activity.is_streaming:
                await asyncio.sleep(0)
            await core.stop()
            events = await answering
            assert isinstance(events[-1], GenerationFinished) and events[-1].stop_reason == "cancelled"
            assert not any(isinstance(event, TextDelta) for event in events)


async def test_stop_keeps_what_was_said(anywhere: Source, shared: SwitchingBackend) -> None:
    async with conversation(anywhere, max_tokens=0, backend=shared) as core:
        async for event in core.send("hello"):
            if isinstance(event, TextDelta):
                await core.stop()
        assert core.messages[-1].content
        assert core.messages[-1].stop_reason == "cancelled"
        assert not core.activity.is_streaming


async def test_death_of_the_worker_leaves_the_conversation_intact(tiny_model: Path) -> None:
    async with conversation(tiny_model, max_tokens=0) as core:
        events = []
        async for event in core.send("hello"):
            events.append(event)
            if isinstance(event, TextDelta) and core.backend.pid is not None:
                os.kill(core.backend.pid, signal.SIGKILL)
        assert isinstance(events[-1], Failed)
        said, name = core.messages[-1].content, core.messages[-1].model
        assert said and core.model is None and core.model_name == name
        core.settings.chat.max_tokens = 5
        events = await everything(core.send("go on"))
        assert isinstance(events[-1], GenerationFinished)
        assert [m.role for m in core.messages] == ["user", "assistant", "user", "assistant"]
        assert core.messages[1].content == said


async def test_a_request_aside_leaves_the_chat_and_its_figures_alone(
    tiny_model: Path, shared: SwitchingBackend
) -> None:
    async with conversation(tiny_model, backend=shared) as core:
        await everything(core.send("hello"))
        figures, messages = core.figures(), list(core.messages)
        request = Generate(prompt="Once upon a time", max_tokens=7)
        stream = core.generate_detached(request)
        events = [await anext(stream)]
        assert core.activity.is_streaming
        with pytest.raises(UsageError, match="still being loaded or measured"):
            await anext(core.send("more"))
        events += await everything(stream)
        assert isinstance(events[-1], GenerationFinished)
        assert events[-1].timings.predicted_n == 7
        assert core.figures() == figures
        assert core.messages == messages


async def test_titles() -> None:
    assert title_of("  Why   is it slow?\nmore") == "Why is it slow?"
    assert title_of("## Why is **this** `slow`?") == "Why is this slow?"
    assert title_of("2 * 3 = ?") == "2 * 3 = ?"
    assert title_of("") == "New chat"
    long = title_of("word " * 40)
    assert long.endswith("word…")
    assert len(long) <= 50


async def test_a_stop_is_heard_however_early_in_a_load(anywhere: Source, shared: SwitchingBackend) -> None:
    """Also while a draft model is looked up, before the worker gets a command."""
    async with conversation(anywhere, backend=shared) as core:
        for steps in range(4):
            loading = asyncio.create_task(everything(core.load_model(anywhere)))
            while not core.activity.is_streaming:
                await asyncio.sleep(0)
            for _ in range(steps):
                await asyncio.sleep(0)
            await core.stop()
            assert isinstance((await loading)[-1], LoadCancelled)
        assert isinstance((await everything(core.load_model(anywhere)))[-1], ModelLoaded)


async def test_without_a_store_nothing_is_kept(tmp_path: Path) -> None:
    backend = ScriptedBackend(answers=[answer("One."), answer("Two.")])
    core = Conversation(settings=Settings(), backend=backend, store=None)
    [_ async for _ in core.load_model(Path("/models/m.gguf"))]
    for question in ("First", "Second"):
        [_ async for _ in core.send(question, stop=("END",))]
    assert [m.content for m in core.messages] == ["First", "One.", "Second", "Two."]
    assert [m.content for m in backend.requests[1].messages] == ["First", "One.", "Second"]
    assert backend.requests[1].stop == ("END",) and backend.requests[1].state.chat == ""
    assert core.history.saver.answer is None and core.history.saver.problem is None
    with pytest.raises(UsageError):
        await core.history.list_chats()
    core.new_chat()
    assert core.chat is None and core.messages == []
    await core.close()
    assert backend.closed


async def test_the_sampling_recommended_for_a_model_is_used_unless_the_user_set_another() -> None:
    backend = ScriptedBackend([answer("One."), answer("Two."), answer("Three.")])
    async with in_use(Conversation(settings=Settings(), backend=backend, store=ChatStore(paths.chats_db()))) as core:
        await everything(core.load_model(paths.demo_dir() / DEMO_FILES["demo"]))
        await everything(core.send("Hello"))
        assert backend.requests[-1].sampling.temperature == 0
        written = core.messages[-1]
        assert written.sampling == written.default_sampling == core.default_sampling

        core.settings.sampling.temperature = 0.7  # the default of other models
        await everything(core.send("Hello"))
        assert backend.requests[-1].sampling.temperature == 0.7
        unset = backend.requests[-1].unset  # a server keeps its own values of these
        assert "top_k" in unset and "temperature" not in unset

        core.settings.sampling.temperature = None
        await everything(core.load_model(Path("/models/unknown.gguf")))
        await everything(core.send("Hello"))
        assert backend.requests[-1].sampling.temperature == 0.7 and core.default_sampling.temperature == 0.7
