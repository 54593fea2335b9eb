"""Tests workers that die, hang or are closed at the worst moment: every request ends, and no process stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import psutil
import pytest

from cpuchat.backend import process
from cpuchat.backend.local import LocalBackend
from cpuchat.backend.process import Launch, WorkerProcess
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.protocol.messages import (
    AnyEvent,
    Cancel,
    Failed,
    Generate,
    GenerationFinished,
    LoadCancelled,
    LoadModel,
    LoadOptions,
    LoadProgress,
    ModelLoaded,
    TextDelta,
    WorkerReady,
)
from tests.support.chatting import chat, children, collect, in_use

OPTIONS = LoadOptions(n_ctx=512)
_STUCK = 120.0  # seconds after which a test that waits for ever fails


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    """A backend that leaves no process behind."""
    before = children()
    backend = LocalBackend(log_dir=tmp_path / "log")
    async with asyncio.timeout(_STUCK):
        yield backend
        await backend.close()
    assert children() <= before


@contextlib.asynccontextmanager
async def started(tmp_path: Path) -> AsyncIterator[WorkerProcess]:
    async with asyncio.timeout(_STUCK):
        worker = await WorkerProcess.start(tmp_path, Launch())
        assert isinstance(await worker.events.get(), WorkerReady)
        yield worker
        await worker.close()


async def rest(events: AsyncGenerator[AnyEvent, None]) -> AnyEvent:
    """The last event."""
    return [event async for event in events][-1]


async def test_an_answer_ends_when_its_worker_is_closed_the_hard_way(
    backend: LocalBackend, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "ANSWER_SECONDS", 0.1)
    await collect(backend.load(tiny_model, OPTIONS))
    answer = backend.generate(chat("hello", max_tokens=400))
    await anext(answer)
    os.kill(backend.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(rest(answer))
    await backend.close()
    last = await waiting
    assert isinstance(last, Failed) and last.code == "interrupted"


async def test_a_stopped_worker_is_killed_with_its_helpers(
    backend: LocalBackend, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "ANSWER_SECONDS", 0.1)
    await collect(backend.load(tiny_model, OPTIONS))
    await collect(backend.generate(chat("hello")))
    worker = psutil.Process(backend.pid)
    everyone = [worker, *worker.children(recursive=True)]
    assert len(everyone) > 1  # one renders the chat template
    for one in everyone:
        one.suspend()
    await backend.close()
    assert not psutil.wait_procs(everyone, timeout=_STUCK)[1]


async def test_a_killed_worker_takes_its_helpers_along_and_a_stop_between_the_reload_and_the_answer_is_heard(
    backend: LocalBackend, tiny_model: Path
) -> None:
    """Also a helper that was stopped and sees nothing of its parent's end."""
    await collect(backend.load(tiny_model, OPTIONS))
    await collect(backend.generate(chat("hello")))
    worker = psutil.Process(backend.pid)
    helpers = worker.children(recursive=True)
    assert helpers
    for one in helpers:
        one.suspend()
    worker.kill()
    # In a thread: the backend's loop is what notices the worker's end.
    assert not (await asyncio.to_thread(psutil.wait_procs, helpers, _STUCK))[1]
    events = []
    async for event in backend.generate(chat("hello", max_tokens=0)):
        events.append(event)
        if isinstance(event, ModelLoaded):
            await backend.cancel()
    assert any(isinstance(event, ModelLoaded) for event in events)
    assert isinstance(events[-1], GenerationFinished) and events[-1].stop_reason == "cancelled"
    assert not any(isinstance(event, TextDelta) for event in events)


async def test_an_answer_that_loads_again_and_a_load_of_the_same_share_it(
    backend: LocalBackend, tiny_model: Path
) -> None:
    await collect(backend.load(tiny_model, OPTIONS))
    psutil.Process(backend.pid).kill()
    while backend.pid is not None:
        await asyncio.sleep(0.01)
    answering = asyncio.create_task(collect(backend.generate(chat("hello", max_tokens=4))))
    await asyncio.sleep(0.05)
    answer, loaded = await asyncio.gather(answering, collect(backend.load(tiny_model, OPTIONS)))
    assert isinstance(answer.events[-1], GenerationFinished) and isinstance(loaded.events[-1], ModelLoaded)
    told = [one for one in (*answer.events, *loaded.events) if isinstance(one, LoadProgress)]
    assert sum(one.phase == "warming" and not one.done for one in told) == 1


async def test_a_stop_before_the_first_event_is_asked_for_is_heard_with_and_without_a_worker_to_tell(
    backend: LocalBackend, tiny_model: Path
) -> None:
    begun = asyncio.create_task(rest(backend.load(tiny_model, OPTIONS)))
    await asyncio.sleep(0)
    await backend.cancel()
    assert isinstance(await begun, LoadCancelled)
    loading = backend.load(tiny_model, OPTIONS)
    await backend.cancel()
    assert isinstance(await rest(loading), LoadCancelled)
    assert isinstance(await rest(backend.load(tiny_model, OPTIONS)), ModelLoaded)
    answer = backend.generate(chat("hello", max_tokens=0))
    await backend.cancel()
    last = await rest(answer)
    assert isinstance(last, GenerationFinished) and last.stop_reason == "cancelled"


async def test_a_cancel_concerns_one_request(tmp_path: Path, tiny_model: Path) -> None:
    """A late cancel stops neither the running request nor the next one."""
    async with started(tmp_path) as worker:
        worker.send(LoadModel(path=str(tiny_model), cpus=own_cpus()[:1], options=OPTIONS, request_id=1))
        for number in (2, 3, 4):
            worker.send(Generate(request_id=number, prompt="abc", max_tokens=40))
        worker.send(Cancel(request_id=3))
        ends: dict[int, str] = {}
        while len(ends) < 3:
            event = await worker.events.get()
            if isinstance(event, GenerationFinished):
                ends[event.request_id] = event.stop_reason
            elif isinstance(event, TextDelta) and event.request_id == 4:
                worker.send(Cancel(request_id=2))
        assert ends == {2: "max_tokens", 3: "cancelled", 4: "max_tokens"}


async def test_closing_while_a_worker_starts_or_loads(backend: LocalBackend, tiny_model: Path) -> None:
    loading = asyncio.create_task(rest(backend.load(tiny_model, OPTIONS)))
    await asyncio.sleep(0)
    await backend.close()
    last = await loading
    assert isinstance(last, Failed) and last.code == "interrupted"
    again = await rest(backend.generate(chat("hello")))
    assert isinstance(again, Failed) and again.code == "interrupted"
    assert backend.pid is None


async def test_a_start_that_is_given_up_leaves_nothing_half_done(backend: LocalBackend, tiny_model: Path) -> None:
    loading = asyncio.create_task(rest(backend.load(tiny_model, OPTIONS)))
    while backend.pid is None:  # the worker is there and not ready yet
        await asyncio.sleep(0)
    given_up = backend.pid
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    events = (await collect(backend.load(tiny_model, OPTIONS))).events
    assert isinstance(events[-1], ModelLoaded)
    assert not any(isinstance(event, WorkerReady) for event in events)
    assert backend.engine is not None and backend.engine.pid == backend.pid != given_up


@pytest.mark.parametrize(
    ("module", "code", "text"),
    [
        ("llama_cpp", "engine_mismatch", "raise ImportError('no such engine')\n"),
        ("msgspec", "worker_died", "import os, sys; sys.stderr.write('so be it'); os._exit(3)\n"),
    ],
)
async def test_a_worker_that_cannot_start_says_so_each_time(
    backend: LocalBackend, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    module: str, code: str, text: str,
) -> None:  # fmt: skip
    (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    for _ in range(2):
        failed = await rest(backend.load(tiny_model, OPTIONS))
        assert isinstance(failed, Failed) and failed.code == code and backend.pid is None
    if code == "worker_died":
        assert backend.log_file is not None and "so be it" in backend.log_file.read_text()
        assert str(backend.log_file) in failed.hint


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGTERM, "SIGTERM"),
        (signal.SIGRTMIN + 6, "signal "),
        pytest.param(signal.SIGILL, "SIGILL", id="instruction"),
    ],
)
async def test_every_signal_is_a_death_that_is_told(tmp_path: Path, number: int, words: str) -> None:
    async with started(tmp_path) as worker:
        os.kill(worker.pid, number)
        died = await worker.events.get()
        assert isinstance(died, Failed) and died.code == "worker_died" and f"killed by {words}" in died.message
        if number == signal.SIGILL:
            assert "engine.kernels to llama.cpp" in died.hint and "engine.cpu_module" in died.hint
        worker.send(Generate(request_id=1, prompt="nobody reads this"))
        assert not worker.alive


async def test_a_cache_folder_that_cannot_be_written_is_a_note(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "in the way").touch()
    log, states = (tmp_path / "in the way" / name for name in ("log", "kv"))
    async with in_use(LocalBackend(log_dir=log, state_dir=states)) as backend:
        loaded = await rest(backend.load(tiny_model, OPTIONS))
        assert isinstance(loaded, ModelLoaded) and "Cannot write to" in " ".join(loaded.model.notes)
        assert isinstance(await rest(backend.generate(chat("hello"))), GenerationFinished)
    backend.log_file.unlink()


async def test_a_stopped_worker_goes_on_to_obey_a_cancel_and_killing_it_ends_what_runs_at_once(
    backend: LocalBackend, tiny_model: Path
) -> None:
    await collect(backend.load(tiny_model, OPTIONS))
    answer = backend.generate(chat("hello", max_tokens=400))
    await anext(answer)
    os.kill(backend.pid, signal.SIGSTOP)
    await backend.cancel()
    last = await rest(answer)
    assert isinstance(last, GenerationFinished) and last.stop_reason in ("cancelled", "length")
    assert (await collect(backend.generate(chat("hello", max_tokens=2)))).timings.predicted_n > 0
    answer = backend.generate(chat("hello", max_tokens=0))
    await anext(answer)
    backend.kill()
    last = await rest(answer)
    assert isinstance(last, Failed) and last.code == "interrupted"


async def test_a_load_is_cancelled_while_its_worker_starts(backend: LocalBackend, tiny_model: Path) -> None:
    loading = asyncio.create_task(rest(backend.load(tiny_model, OPTIONS)))
    async with asyncio.timeout(_STUCK):
        while backend.pid is None:
            await asyncio.sleep(0)
        worker = psutil.Process(backend.pid)
        worker.suspend()
        await backend.cancel()
        assert isinstance(await loading, LoadCancelled)
    assert not psutil.wait_procs([worker], timeout=_STUCK)[1]
    await collect(backend.load(tiny_model, OPTIONS))
    assert backend.model is not None
