"""Tests trying other cores with a real worker and a real database."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import msgspec
import pytest

from cpuchat.backend.local import LocalBackend
from cpuchat.base import paths
from cpuchat.chats.store import ChatStore
from cpuchat.config.settings import Settings
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.protocol.messages import AnyEvent, Generate, ModelLoaded, TextDelta
from cpuchat.session.conversation import Conversation
from cpuchat.tune import tuner
from cpuchat.tune.trial import Trial, TrialStep
from tests.support.chatting import collect

pytestmark = pytest.mark.slow


@contextlib.asynccontextmanager
async def conversation(model: Path) -> AsyncIterator[Conversation]:
    settings = Settings()
    settings.hardware.probe = False
    settings.speculation.drafters = "off"
    settings.sampling.temperature = 0.0
    settings.chat.max_tokens = 40
    settings.engine.n_ctx = 2048
    store = ChatStore(paths.chats_db())
    core = Conversation(settings=settings, backend=LocalBackend(state_dir=paths.kv_dir()), store=store)
    try:
        assert isinstance((await collect(core.load_model(model))).events[-1], ModelLoaded)
        yield core
    finally:
        await core.close()


async def test_it_measures_loads_and_measures_again(tiny_model: Path) -> None:
    steps: list[TrialStep] = []
    async with conversation(tiny_model) as core:
        await collect(core.send("hello there, how are you doing on this fine day?"))
        figures = core.figures().predicted_n
        cpu = core.model.cpus[-1] if core.model else 0
        outcome = await Trial(core, PlacementSpec(cores=str(cpu)), steps.append).run()
        assert outcome.problem == ""
        assert outcome.before and outcome.after and outcome.comparison
        assert outcome.applied == outcome.comparison.keep
        assert core.settings.engine.cores == (str(cpu) if outcome.applied else "auto")
        assert core.model and (core.model.cpus == (cpu,) or not outcome.applied)
        stages = [step.stage for step in steps]
        assert sorted(set(stages), key=stages.index)[:3] == ["before", "loading", "after"]
        assert [m.role for m in core.messages] == ["user", "assistant"]
        assert figures == 40
        events = await collect(core.send("and now?"))
        assert events.timings.cache_n > 40


async def test_a_stop_before_the_load_changes_nothing(tiny_model: Path) -> None:
    async with conversation(tiny_model) as core:
        loaded = core.model
        assert loaded

        def stop(step: TrialStep) -> None:
            trial.leave()

        trial = Trial(core, PlacementSpec(cores=str(loaded.cpus[0])), stop)
        outcome = await trial.run()
        assert outcome.stopped and not outcome.applied
        assert core.model is loaded
        assert core.settings.engine.cores == "auto"


async def test_a_worker_killed_in_the_middle_is_told_and_the_chat_can_go_on(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[TrialStep] = []
    killed: list[int] = []
    stage = ""
    async with conversation(tiny_model) as core:
        detached = core.generate_detached

        async def dies(request: Generate) -> AsyncGenerator[AnyEvent, None]:
            if steps[-1].stage == stage and not killed:
                request = msgspec.structs.replace(request, max_tokens=1500)  # long enough to be killed in the middle
            async with contextlib.aclosing(detached(request)) as events:
                async for event in events:
                    if isinstance(event, TextDelta) and request.max_tokens == 1500 and not killed:
                        assert core.backend.pid is not None
                        killed.append(core.backend.pid)
                        os.kill(core.backend.pid, signal.SIGKILL)
                    yield event

        monkeypatch.setattr(core, "generate_detached", dies)
        cpu = str(core.model.cpus[0] if core.model else 0)
        for case in (
            ("before", True, "Settings unchanged. No model is loaded now."),
            ("after", False, "Nothing was changed."),
        ):
            stage, lost, words = case
            killed.clear()
            outcome = await Trial(core, PlacementSpec(cores=cpu), steps.append).run()
            assert killed
            assert (outcome.applied, outcome.lost, outcome.stopped) == (False, lost, False)
            assert "killed" in outcome.problem
            assert tuner.outcome(outcome).endswith(words)
            assert core.settings.engine.cores == "auto"
            assert isinstance((await collect(core.reload())).events[-1], ModelLoaded)
