"""Tests small samples of benchmarks/kill_chats.py and benchmarks/hostile/databases.py, which run hundreds."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(request.param)


@pytest.mark.parametrize("script", ["kill_chats"], indirect=True)
def test_a_killed_app_and_a_full_disk_leave_a_sound_beginning_of_the_answer(script: ModuleType) -> None:
    lost, missing, told = script.measure(kills=1, seed=1)
    assert len(lost) == 1
    assert missing == [0.0]
    assert told


@pytest.mark.parametrize("script", ["hostile.databases"], indirect=True)
def test_the_app_starts_on_damaged_chats(script: ModuleType) -> None:
    outcomes = script.measure(2, 5, 2, lambda _: None)
    assert len({outcome.kind for outcome in outcomes}) > 1
    assert [outcome.fault for outcome in outcomes if outcome.fault and "after" not in outcome.fault] == []
