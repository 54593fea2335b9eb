"""Tests measuring a draft model from the list of draft models, with the real worker and the demo run."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.bench import run
from cpuchat.config import settings
from cpuchat.models.drafts.choice import ChosenDrafts
from cpuchat.tui.models.drafts import DraftModelsScreen, MeasurePairScreen
from tests.support.chat_app import SMALL, WIDE, RunningApp, running
from tests.support.tiny_gguf import write_tiny_gguf
from tests.tui.models.test_draft_models_screen import DRAFT, TARGET, backend, mark, opened


@pytest.fixture(autouse=True)
def lean(measured_machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set few tokens, few prompts and one thread, without a hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(run, "KINDS", ("maths", "chat"))
    monkeypatch.setattr(run, "TOKENS", 8)
    settings.update({"engine": {"threads": 1}})


async def measuring(app: RunningApp) -> MeasurePairScreen:
    await opened(app)
    await mark(app, str(DRAFT))
    await app.press("m")
    await app.until(lambda: isinstance(app.app.screen, MeasurePairScreen))
    screen = app.app.screen
    assert isinstance(screen, MeasurePairScreen)
    return screen


async def test_measured_then_used() -> None:
    async with running(backend(), model=TARGET, size=SMALL) as app:
        screen = await measuring(app)
        await app.until(lambda: screen.result is not None and "orth keeping: " in app.screen_text)
        for size in (SMALL, WIDE):
            await app.pilot.resize_terminal(*size)
            for words in ("prompts", "speed-up", "maths", "chat", "Enter uses it"):
                assert words in app.screen_text
        await app.press("enter")
        await app.until(lambda: len(app.backend.loads) == 2 and app.app.screen is app.chat and not app.chat.busy)
        await app.until(lambda: ChosenDrafts().of(TARGET) == str(DRAFT))


async def test_stopped_and_closed_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "TOKENS", 200)
    async with running(backend(), model=TARGET) as app:
        await measuring(app)
        await app.until(lambda: " of " in app.screen_text and "chat" in app.screen_text)
        await app.press("escape")
        await app.until(lambda: isinstance(app.app.screen, DraftModelsScreen))
        assert ChosenDrafts().of(TARGET) == "" and len(app.backend.loads) == 1


async def test_one_that_does_not_fit_is_not_measured(tmp_path: Path) -> None:
    other = write_tiny_gguf(tmp_path / "other.gguf")
    async with running(backend(), model=TARGET, folders=(tmp_path,)) as app:
        screen = await opened(app)
        await mark(app, str(other))
        await app.press("m")
        await app.until(lambda: any("incompatible" in notice for notice in app.notices))
        assert app.app.screen is screen
