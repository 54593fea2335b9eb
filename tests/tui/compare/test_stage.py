"""Tests the stage on a recording, without a comparison."""

from __future__ import annotations

import asyncio
from math import inf
from pathlib import Path

import msgspec
import pytest
from textual.message import Message

from cpuchat.compare.figures import Verdict
from cpuchat.compare.recording import Recording
from cpuchat.tui.compare import stage as stage_module
from cpuchat.tui.compare.stage import Scene, Stage
from tests.support.recorded import RECORDING, STOPPED
from tests.support.snapshots import HostApp, snapshot
from tests.tui.compare.test_agreement import BOTH


def drawn(recording: Recording, at_ms: float = inf, width: int = 116, say: str = "Said.") -> list[str]:
    return ["".join(text for text, _ in line) for line in Scene(recording, say).rows(at_ms, width)]


def test_the_tracks_are_as_long_as_the_rates_when_the_first_side_ends() -> None:
    for at_ms in (RECORDING.finish_ms, inf):
        _, a, b, *_ = drawn(RECORDING, at_ms)
        assert b.count("▆") == pytest.approx(2 * a.count("▆"), abs=2)
        assert "⚑" in b and ("⚑" in a) == (at_ms == inf)
    assert drawn(RECORDING)[1].count("┄") > 0  # what A wrote afterwards


def test_the_ratio_and_the_sentence_come_when_they_are_known() -> None:
    narrow = [drawn(RECORDING, at_ms, 76) for at_ms in (0, 2000, 2950, 5900)]
    assert ["2.00×" in lines[1] for lines in narrow] == [False, False, True, True]
    assert ["Said." in lines[-1] for lines in narrow] == [False, False, False, True]
    assert "10.0 tok/s" in narrow[-1][0] and "20.0 tok/s" in narrow[-1][1]


def test_no_time_changes_the_number_of_rows_or_leaves_the_width() -> None:
    for width in (200, 92, 91, 56, 40):
        for recording in (RECORDING, STOPPED, msgspec.structs.replace(RECORDING, verdict=Verdict("disturbed", 2.0))):
            heights = {len(drawn(recording, at_ms, width)) for at_ms in (0, 500, 2950, 4000, inf)}
            assert len(heights) == 1
            assert all(len(line) <= width for line in drawn(recording, inf, width))
    for width in (0, 1, 5):  # a window without room
        assert Scene(RECORDING, "Said.").rows(inf, width) and Scene(RECORDING, "Said.", BOTH).rows(inf, width)


def test_without_a_verdict_there_is_no_ratio_and_a_disturbed_round_is_no_race() -> None:
    disturbed = msgspec.structs.replace(RECORDING, verdict=Verdict("disturbed", 2.0))
    for recording in (STOPPED, disturbed):
        assert "×" not in "".join(drawn(recording, inf, 76))
    assert "⚑" not in drawn(STOPPED, inf, 76)[0]
    assert "⚑" not in "".join(drawn(disturbed))
    assert {part for line in Scene(disturbed).rows(inf, 76)[:2] for text, part in line[1:] if text.strip()} == {"label"}


def test_weights_in_the_cache_and_unknown_bytes_draw_no_bus() -> None:
    cached = tuple(msgspec.structs.replace(side, cached=True) for side in RECORDING.sides)
    assert any("fit in L3" in line for line in drawn(msgspec.structs.replace(RECORDING, sides=cached)))
    unknown = tuple(msgspec.structs.replace(side, bytes_per_token=None) for side in RECORDING.sides)
    assert not any("memory bus" in line for line in drawn(msgspec.structs.replace(RECORDING, sides=unknown)))
    one, other = (msgspec.structs.replace(RECORDING.sides[0], utilization=used) for used in (1.4, None))
    (costs,) = (line for line in drawn(msgspec.structs.replace(RECORDING, sides=(one, other))) if "memory bus" in line)
    bus = costs.partition("memory bus")[2]
    assert "140 %" in bus and "B " not in bus and bus.count("▆") == costs.partition("B ")[0].count("▆")


def test_an_agreement_has_a_strip_that_fills() -> None:
    for width in (116, 76, 56):
        strip, *_ = (line for line in Scene(RECORDING, "Said.", BOTH).rows(inf, width) if line[0][0][:3] == "agr")
        text = "".join(text for text, _ in strip)
        assert "2 places matter" in text and len(text) <= width
        assert {("□", "changed"), ("◆", "parted")} <= {*strip}
        assert ("◆ matters" in text) == (width >= 76)  # the tints of both answers are explained
    begun, done = (str(Scene(RECORDING, "Said.", BOTH).rows(at_ms, 116)).count("■") for at_ms in (0, inf))
    assert begun < done


async def test_a_recording_is_shown_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stage, "MIN_S", 0.1)
    monkeypatch.setattr(Stage, "MAX_S", 0.1)
    stage, ended = Stage(), asyncio.Event()

    class Host(HostApp):
        def on_stage_replayed(self, event: Message) -> None:
            ended.set()

    sheet = Path(stage_module.__file__).with_name("compare.tcss").read_text()
    app = Host(stage, css=f"{sheet} Stage {{ border: round $foreground; }}", theme="textual-dark")
    async with app.run_test(size=(120, 12)) as pilot:
        stage.replay()  # nothing yet
        assert stage.at_ms == inf
        stage.show(RECORDING)
        await pilot.pause()
        await snapshot(app, "stage-120")
        stage.replay()
        assert stage.at_ms < inf and "shown at 59.0× speed" in str(stage.border_title)
        await asyncio.wait_for(ended.wait(), 10)
        assert stage.at_ms == inf
        await snapshot(app, "stage-120")
        await pilot.resize_terminal(60, 12)
        await snapshot(app, "stage-60")
        stage.show(STOPPED)
        stage.replay()
        assert stage.at_ms == inf
