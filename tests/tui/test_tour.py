"""Tests that the tour runs by itself, keeps nothing, says what is to be seen, and heeds its keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cpuchat.base import paths
from cpuchat.compare.recording import read_recording
from cpuchat.config import settings
from cpuchat.planner.specs import machines
from cpuchat.tui.compare.replay import ReplayScreen
from cpuchat.tui.compare.stage import Stage
from cpuchat.tui.models.screen import ModelsScreen
from cpuchat.tui.tour import (
    ANSWER,
    ELSEWHERE,
    LOADING,
    MACHINE,
    MODELS,
    PREDICTION,
    REPLAYS,
    Caption,
    TourApp,
)
from tests.support.chat_app import WIDE, running
from tests.support.scripted_backend import WITH_DRAFT, ScriptedBackend


class QuickTour(TourApp):
    PACE = 0.0


class HeldTour(QuickTour):
    """Shows the plan until a key is pressed."""

    over_chat = ""
    """The sentence over the chat once the plan is closed."""

    async def _hold(self, seconds: float) -> None:
        if self.captions[-1] == ELSEWHERE:
            await self._until(lambda: False, may_skip=True)

    async def _settle(self) -> None:
        if self.captions[-1] == ELSEWHERE:
            self.over_chat = str(self.screen.query_one(Caption).render())
        await super()._settle()


@pytest.fixture(autouse=True)
def short_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stage, "MIN_S", 0.001)
    monkeypatch.setattr(Stage, "MAX_S", 0.001)


async def test_the_tour_runs_by_itself_and_ends_at_a_first_model() -> None:
    backend = ScriptedBackend(model=WITH_DRAFT)
    async with running(backend, kind=QuickTour) as app:
        assert isinstance(app.app, QuickTour)
        tour = app.app
        await app.until(lambda: tour.over)
        assert tour.captions == [LOADING, ANSWER, *REPLAYS.values(), MACHINE, PREDICTION, MODELS]
        assert [request.messages[-1].content for request in backend.requests][:1] == ["What is cpuchat?"]
        await app.until(lambda: MODELS in app.screen_text)
        assert isinstance(app.app.screen, ModelsScreen)
        app.press_last("x")
        await app.until(lambda: backend.closed)
    assert not paths.settings_file().exists()
    assert settings.load().ui.color_drafts is False


@pytest.mark.parametrize("name", paths.RECORDINGS)
async def test_a_caption_does_not_contradict_the_figures_of_its_recording(name: str) -> None:
    """The captions of recordings hold no figures but the names of the models; the stage says which side was faster."""
    recording = read_recording(paths.recording_file(name))
    assert recording.leader == 1 and "recording" in (REPLAYS["drafts"])
    figures = re.findall(r"\d[\d.,]*", REPLAYS[name])
    names = " ".join(side.name for side in recording.sides)
    assert all(figure.rstrip(".,") in names for figure in figures), (figures, names)
    async with running(size=WIDE) as app:
        await app.ready()
        screen = ReplayScreen(name)
        await app.app.push_screen(screen)
        await app.until(lambda: screen.over)
        await app.until(lambda: recording.machine in app.screen_text)
        rates = [f"{side.tok_s:.1f} tok/s" for side in recording.sides if side.tok_s is not None]
        assert all(rate in app.screen_text for rate in rates)
        a, b = (side.tok_s or 0.0 for side in recording.sides)
        assert f"{b / a:.2f}× as fast" in " ".join(app.screen_text.split())


async def test_on_a_busy_machine_it_plans_for_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cpuchat.hardware.bandwidth.read_bandwidth.known_peak", lambda *_, **__: None)
    async with running(ScriptedBackend(model=WITH_DRAFT), kind=HeldTour) as app:
        assert isinstance(app.app, HeldTour)
        tour = app.app
        await app.until(lambda: ELSEWHERE in tour.captions)
        await app.until(lambda: ELSEWHERE in app.screen_text and machines()[0].name in app.screen_text)
        assert tour.captions[-2:] == [PREDICTION, ELSEWHERE]
        await app.press("right")
        await app.until(lambda: tour.over)
        assert ELSEWHERE in tour.over_chat


async def test_keys_pause_skip_and_quit() -> None:
    backend = ScriptedBackend()
    async with running(backend, kind=TourApp) as app:
        assert isinstance(app.app, TourApp)
        tour = app.app
        await app.until(lambda: ANSWER in app.screen_text)
        await app.press("space")
        await app.until(lambda: "Paused" in app.screen_text)
        await app.press("right")
        await app.until(lambda: REPLAYS["drafts"] in app.screen_text)
        assert tour.captions == [LOADING, ANSWER, REPLAYS["drafts"]]
        app.press_last("escape")
        await app.until(lambda: backend.closed)


async def test_a_recording_that_cannot_be_is_told_and_the_tour_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    odd = tmp_path / "odd.json"
    odd.write_text('{"title": "x", "sides": [{"name": "a", "tokens": [["a", -5]]}, {"name": "b"}]}')
    monkeypatch.setattr(paths, "recording_file", lambda name: odd)
    async with running(ScriptedBackend(model=WITH_DRAFT), kind=QuickTour) as app:
        assert isinstance(app.app, QuickTour)
        tour = app.app
        await app.until(lambda: tour.over)
        assert isinstance(app.app.screen, ModelsScreen)
