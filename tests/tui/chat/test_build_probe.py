"""Tests that the app measures each model once per build of the engine, and reports a slower build."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cpuchat.base import paths
from cpuchat.config.settings import EngineSection
from cpuchat.protocol.messages import Generate, GenerationFinished
from cpuchat.protocol.model_info import EngineInfo
from cpuchat.protocol.timings import Timings
from cpuchat.telemetry.answer import DecodeRate
from cpuchat.tui.chat import probes
from cpuchat.tune.measurer import BuildSpeed, BuildSpeeds, speed_key
from tests.support.chat_app import RunningApp, running
from tests.support.scripted_backend import MODEL, Gate, ScriptedBackend, Step, answer

PROBE = 64
"""Tokens of a measured answer."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes.BuildProbe, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(probes.BuildProbe, "CHECKS", 1)


class Backend(ScriptedBackend):
    """Decodes at `tok_s` with the build `commit`."""

    def __init__(self, commit: str, tok_s: float, *answers: list[Step]) -> None:
        timings = Timings(predicted_n=PROBE, predicted_ms=1e3 * (PROBE - 1) / tok_s)
        measured: list[Step] = [GenerationFinished(request_id=1, stop_reason="max_tokens", timings=timings)]
        super().__init__([*answers, measured])
        self._commit = commit

    @property
    def engine(self) -> EngineInfo:
        return EngineInfo(version="1", llama_commit=self._commit)

    @property
    def probes(self) -> list[Generate]:
        return [request for request in self.requests if request.prompt is not None]


def done(app: RunningApp) -> bool:
    """Return whether the loaded model is or was measured, or cannot be."""
    return bool(app.chat.build_probe.done)


def known() -> BuildSpeed | None:
    return BuildSpeeds().newest(speed_key(MODEL, EngineSection()))


def remember(commit: str, tok_s: float) -> None:
    rate = DecodeRate(tok_s=tok_s, spread=0.1, rounds=(tok_s,) * 3)
    BuildSpeeds().put(speed_key(MODEL, EngineSection()), BuildSpeed(build=f"1 {commit}", commit=commit, measured=rate))


async def test_a_model_is_measured_once_per_build() -> None:
    backend = Backend("new", 20.0)
    async with running(backend) as app:
        await app.until(known)
        found = known()
        assert found is not None and found.commit == "new" and found.measured.tok_s == pytest.approx(20.0)
        n = len(backend.probes)
        assert n == 4  # three rounds and a short one before
        await app.send("Hello")
        assert len(backend.probes) == n and not app.notices
    again = Backend("new", 10.0)
    async with running(again) as app:
        await app.until(lambda: done(app))
        assert not again.probes and not app.notices


async def test_a_slower_build_is_told_once() -> None:
    remember("old", 20.0)
    async with running(Backend("new", 17.0)) as app:
        await app.until(lambda: app.notices)
        (notice,) = app.notices
        assert "20.0 tok/s with llama.cpp old, 17.0 with new (−15.0 %)" in notice
    found = known()
    assert found is not None and found.commit == "new"
    async with running(Backend("new", 17.0)) as app:
        await app.until(lambda: done(app))
        assert not app.notices


@pytest.mark.parametrize("tok_s", [19.9, 20.0, 30.0])
async def test_one_that_is_not_slower_by_more_than_the_spread_is_not_told(tok_s: float) -> None:
    remember("old", 20.0)
    async with running(Backend("new", tok_s)) as app:
        await app.until(lambda: (speed := known()) is not None and speed.commit == "new")
        assert not app.notices


async def test_a_message_stops_the_measurement_and_is_answered() -> None:
    gate = Gate()
    backend = Backend("new", 20.0, answer("measured", gate=gate), answer("Good morning."))
    async with running(backend) as app:
        await gate.reached.wait()
        await app.send("Hello")
        assert [message.content for message in app.conversation.messages] == ["Hello", "Good morning."]
        assert not app.notices
        await app.until(known)  # it is measured afterwards


async def test_quitting_stops_the_measurement() -> None:
    gate = Gate()
    backend = Backend("new", 20.0, answer("measured", gate=gate))
    async with running(backend) as app:
        await gate.reached.wait()
        app.press_last("ctrl+q")
        await app.until(lambda: backend.closed)
    assert known() is None


async def test_a_model_that_ends_at_once_is_not_tried_again(tmp_path: Path) -> None:
    short = Timings(predicted_n=2, predicted_ms=50.0)
    ends: list[Step] = [GenerationFinished(request_id=1, stop_reason="end", timings=short)]
    backend = ScriptedBackend([ends])
    async with running(backend) as app:
        await app.until(lambda: done(app))
        assert len(backend.requests) == 6 and not app.notices


def test_another_way_of_running_is_another_measurement() -> None:
    keys = {
        speed_key(MODEL, EngineSection()),
        speed_key(MODEL, EngineSection(flash_attn="off")),
        speed_key(msgspec.structs.replace(MODEL, cpus=(0,)), EngineSection()),
    }
    assert len(keys) == 3 and not paths.build_speeds_file().exists()
