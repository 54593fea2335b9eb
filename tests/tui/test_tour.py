"""Tests that the tour runs by itself, keeps nothing, and heeds its keys."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cpuchat.base import paths
from cpuchat.config import settings
from cpuchat.planner.specs import machines
from cpuchat.protocol.timings import Timings
from cpuchat.tui.tour import (
    ANSWER,
    BESIDE,
    COMPARE,
    DRAFTING,
    ELSEWHERE,
    END,
    LIVE,
    LOADING,
    MACHINE,
    PREDICTION,
    Caption,
    Recording,
    TourApp,
    TourText,
    load_recording,
)
from tests.support.chat_app import running
from tests.support.scripted_backend import WITH_DRAFT, ScriptedBackend

RECORDING = Recording(
    question="Why?",
    model="Qwen2.5 1.5B Q4_K_M",
    draft="0.5B Q8_0",
    machine="EPYC 7543, 8 threads",
    parts=(TourText(0.0, "Because "), TourText(0.01, "of bandwidth.", "draft")),
    timings=Timings(predicted_n=4, predicted_ms=100.0, ttft_ms=50.0),
)


class QuickTour(TourApp):
    PACE = 0.0


class WatchedTour(QuickTour):
    """Shows the recording until it was seen."""

    seen = False

    async def _hold(self, seconds: float) -> None:
        if self.captions[-1] == BESIDE.format(model=RECORDING.model):
            await self._until(lambda: self.seen)


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


@pytest.fixture
def recording_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "recording.json"
    monkeypatch.setattr(paths, "recording_file", lambda: file)
    return file


async def test_the_tour_runs_by_itself(recording_file: Path) -> None:
    recording_file.write_bytes(msgspec.json.encode(RECORDING))
    backend = ScriptedBackend(model=WITH_DRAFT)
    async with running(backend, kind=WatchedTour) as app:
        beside = ("live · Qwen2.5", "recording · Qwen2.5 1.5B Q4_K_M", "drafted by 0.5B Q8_0", "Because of bandwidth.")
        await app.until(lambda: all(text in app.screen_text for text in beside))
        assert isinstance(app.app, WatchedTour)
        tour = app.app
        tour.seen = True
        await app.until(lambda: tour.over)
        assert tour.captions == [
            LOADING,
            ANSWER,
            BESIDE.format(model=RECORDING.model),
            DRAFTING,
            COMPARE,
            MACHINE,
            PREDICTION,
            END,
        ]
        depths = {request.messages[-1].content: request.speculation.depth for request in backend.requests}
        questions = ("What is cpuchat?", LIVE, "What is speculative decoding?")  # a slow tour asks for titles, too
        assert [depths[one] for one in questions] == [0, 0, 4]
        assert app.conversation.drafting == "auto" and not app.transcript.colors_drafts
        await app.until(lambda: END in app.screen_text)
        app.press_last("x")
        await app.until(lambda: backend.closed)
    assert not paths.settings_file().exists() and settings.load().ui.color_drafts is False


async def test_on_a_busy_machine_it_plans_for_another_one(
    recording_file: Path, monkeypatch: pytest.MonkeyPatch
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


async def test_keys_pause_skip_and_quit(recording_file: Path) -> None:
    backend = ScriptedBackend()
    async with running(backend, kind=TourApp) as app:
        assert isinstance(app.app, TourApp)
        tour = app.app
        await app.until(lambda: ANSWER in app.screen_text)
        await app.press("space")
        await app.until(lambda: "Paused" in app.screen_text)
        await app.press("right")
        await app.until(lambda: DRAFTING in app.screen_text)
        assert tour.captions == [LOADING, ANSWER, DRAFTING]  # there is no recording
        app.press_last("escape")
        await app.until(lambda: backend.closed)


def test_a_damaged_recording_is_left_out(recording_file: Path) -> None:
    assert load_recording() is None
    recording_file.write_text("{")
    assert load_recording() is None
