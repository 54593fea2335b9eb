"""Provides fixtures of these tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from cpuchat.backend.local import LocalBackend
from tests.support.chatting import worker
from tests.support.engine_chat import Chat


@pytest.fixture(autouse=True)
def on_a_measured_machine(measured_machine: None) -> None:
    """Avoid the bandwidth measurement: every test here may load models."""


@contextlib.asynccontextmanager
async def started(folder: Path, model: Path | None = None) -> AsyncIterator[LocalBackend]:
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("CONFIG", "DATA", "CACHE"):
            patch.setenv(f"CPUCHAT_{kind}_DIR", str(folder))
        async with contextlib.AsyncExitStack() as stack:
            backend = await stack.enter_async_context(worker(model))
            await backend.start()
            patch.undo()
            yield backend


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalBackend]:
    """A worker with the tiny model for all tests that leave it as usable as it was."""
    async with started(tmp_path_factory.mktemp("shared"), tiny_model) as backend:
        yield backend


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def other(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalBackend]:
    """A worker for all tests that load a model, or with options, of their own."""
    async with started(tmp_path_factory.mktemp("other")) as backend:
        yield backend


@pytest.fixture
def here() -> Iterator[Chat]:
    """An engine in this process."""
    chat = Chat()
    yield chat
    chat.engine.close()
