"""Tests another placement during a chat, with a real worker and a real database."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cpuchat.backend.local import LocalBackend
from cpuchat.base import paths
from cpuchat.chats.store import ChatStore
from cpuchat.config.settings import Settings
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.protocol.messages import ModelLoaded
from cpuchat.session.conversation import Conversation
from cpuchat.session.placement import PlacementChange
from tests.support.chatting import collect, in_use

pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def conversation(model: Path) -> AsyncIterator[Conversation]:
    settings = Settings()
    settings.speculation.drafters = "off"
    settings.sampling.temperature = 0.0
    settings.chat.max_tokens = 40
    settings.engine.n_ctx = 2048
    store = ChatStore(paths.chats_db())
    backend = LocalBackend(state_dir=paths.kv_dir())
    async with in_use(Conversation(settings=settings, backend=backend, store=store)) as core:
        assert isinstance((await collect(core.load_model(model))).events[-1], ModelLoaded)
        yield core


async def test_the_model_runs_on_other_cores_with_the_chats_cache_and_a_worker_that_dies_changes_nothing(
    tiny_model: Path,
) -> None:
    shares: list[float] = []
    async with conversation(tiny_model) as core:
        await collect(core.send("hello there, how are you doing on this fine day?"))
        assert core.model
        cpu = core.model.cpus[-1]
        assert await PlacementChange(core, PlacementSpec(cores=str(cpu)), shares.append).run() == ""
        assert core.settings.engine.cores == str(cpu) and core.model.cpus == (cpu,)
        assert shares[0] == 0.0
        assert [m.role for m in core.messages] == ["user", "assistant"]
        assert (await collect(core.send("and now?"))).timings.cache_n > 40

        killed: list[int] = []

        def kill(share: float) -> None:
            if core.backend.pid is not None and not killed:
                killed.append(core.backend.pid)
                os.kill(core.backend.pid, signal.SIGKILL)

        await PlacementChange(core, PlacementSpec(), kill).run()
        assert killed and core.model is not None
