"""Tests the calibration, at a load or between answers: measured once, kept, and made again when it was disturbed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from cpuchat.costs import calibrations
from cpuchat.costs.calibrations import PassCosts
from cpuchat.engine import answer
from cpuchat.engine.drafting import calibration
from cpuchat.engine.llama.model import Model
from cpuchat.engine.llama.threads import CpuWait
from cpuchat.measure import store
from cpuchat.models import costs as record
from cpuchat.models.drafts.candidates import UNKNOWN, measured_draft_ms, target_costs
from cpuchat.protocol.messages import (
    Event,
    Failed,
    LoadCancelled,
    LoadProgress,
    Measure,
    Measured,
    Speculation,
    SpeculationUpdate,
    StateKey,
)
from cpuchat.protocol.reasons import UNCALIBRATED
from tests.support.pair_chat import PairChat


def test_costs_are_measured_once(chat: PairChat, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"draft_path": str(files[1])}
    assert chat.load(files[0], **more).pass_ms == ()  # not asked for
    monkeypatch.setattr(calibrations, "DEAREST", math.inf)  # else a busy machine decides whether it is kept
    monkeypatch.setattr(calibrations, "MIN", 0.0)
    monkeypatch.setattr(calibrations, "STEEPEST", 0.0)
    monkeypatch.setattr(CpuWait, "shares", lambda _: (0.0, 1.0))
    first = chat.load(files[0], calibrate=True, **more)
    assert "calibrating" in chat.phases() and len(first.pass_ms) == 32
    again = chat.load(files[0], calibrate=True, **more)
    assert "calibrating" not in chat.phases() and again.pass_ms == first.pass_ms
    assert chat.load(files[0], **more).pass_ms == first.pass_ms  # what is known is used anyway
    found = target_costs(files[0])  # what tells the gain of a draft model before it is loaded
    assert found.pass_ms == first.pass_ms
    assert measured_draft_ms(found, files[1]) > 0 == measured_draft_ms(found, files[0])
    plain, _ = chat.ask()
    drafted, timings = chat.ask(Speculation(drafters=("draft", "suffix")))
    assert drafted == plain
    assert timings.speculation is not None and timings.speculation.plain_ms


def test_a_pair_is_known_after_a_restart(
    chat: PairChat, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = PassCosts(tuple(5.0 + 0.1 * n for n in range(32)), draft_ms=0.1, read_ms=0.05)
    monkeypatch.setattr(calibration, "measure", lambda *_, **__: costs)
    more = {"draft_path": str(files[1]), "calibrate": True}

    drafting = Speculation(drafters=("draft",), depth=4)  # whatever it costs on this machine

    def compared() -> list[float]:
        return [one.value[1] for one in store.find_all(record.ACCEPTED, tuple[float, float])]

    chat.load(files[0], **more)
    assert compared() == []
    chat.ask(drafting)
    chat.engine.idle()
    [before] = compared()
    assert before > 0
    chat.load(files[0], **more)
    chat.ask(drafting)
    chat.engine.close()
    [after] = compared()
    assert after > before


def test_a_disturbed_calibration_is_said_and_made_again(
    chat: PairChat, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"draft_path": str(files[1]), "calibrate": True}
    quiet = PassCosts(tuple(5.0 + n for n in range(32)), draft_ms=1.0, read_ms=0.5)
    disturbed = replace(quiet, verify_ms=(5.0, 34.0, *quiet.verify_ms[2:]))
    monkeypatch.setattr(calibration, "measure", lambda *_, **__: disturbed)
    info = chat.load(files[0], **more)
    assert info.notes == ()
    assert info.pass_ms == () and target_costs(files[0]) == UNKNOWN
    _, timings = chat.ask(Speculation(drafters=("draft",)))
    assert timings.speculation.off == UNCALIBRATED
    monkeypatch.setattr(calibration, "measure", lambda *_, **__: quiet)
    assert chat.load(files[0], **more).pass_ms == quiet.verify_ms
    # Too old by now, but better than one beside other load.
    monkeypatch.setattr(record, "KEPT_SECONDS", -1.0)
    for worse in (disturbed, replace(quiet, verify_ms=tuple(2 * ms for ms in quiet.verify_ms), disturbed=True)):
        monkeypatch.setattr(calibration, "measure", lambda *_, worse=worse, **__: worse)
        info = chat.load(files[0], **more)
        assert (info.pass_ms, info.notes) == (quiet.verify_ms, ())


def test_a_calibration_beside_other_programs_tells_no_speed_up(
    chat: PairChat, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its plain pass took twice as long, so it must not tell how much faster drafts are."""
    disturbed = PassCosts(tuple(10.0 + 2 * n for n in range(32)), draft_ms=1.0, read_ms=0.5, disturbed=True)
    found = [disturbed]
    monkeypatch.setattr(calibration, "measure", lambda *_, **__: found.pop())
    monkeypatch.setattr(CpuWait, "shares", lambda _: (0.0, 1.0))
    for _ in range(2):  # the second load measures nothing: `found` is empty
        info = chat.load(files[0], draft_path=str(files[1]), calibrate=True)
        assert info.notes == ()  # the missing speed-up tells its reason; a notice at each start would not help
        assert info.pass_ms == () and target_costs(files[0]).pass_ms == ()
    _, fixed = chat.ask(Speculation(drafters=("draft",), depth=4))
    assert fixed.speculation is not None and fixed.draft_n
    assert fixed.speculation.plain_ms is fixed.speed_up is None


def test_an_answer_beside_other_programs_is_not_compared_with_a_calibration_without(
    chat: PairChat, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = PassCosts(tuple(5.0 + n for n in range(32)), draft_ms=1.0, read_ms=0.5)
    monkeypatch.setattr(calibration, "measure", lambda *_, **__: costs)
    chat.load(files[0], draft_path=str(files[1]), calibrate=True)
    monkeypatch.setattr(answer, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr("cpuchat.engine.decoding.decode.UPDATE_SECONDS", 0.0)
    for waited, is_compared in ((0.04, True), (0.5, False), (None, True)):
        monkeypatch.setattr(CpuWait, "shares", lambda _, waited=waited: (waited, waited))
        _, timings = chat.ask(Speculation(drafters=("draft",), depth=4))
        figures = timings.speculation
        assert figures is not None and timings.draft_n
        assert (timings.speed_up is not None) == (figures.plain_ms is not None) == is_compared
        assert figures.disturbed != is_compared
        updates = [event.figures for event in chat.events if isinstance(event, SpeculationUpdate)]
        assert updates and all(one.disturbed != is_compared for one in updates)


def test_a_chat_is_calibrated_between_its_answers_and_kept(
    chat: PairChat, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = PassCosts(tuple(5.0 + n for n in range(32)), draft_ms=1.0, read_ms=0.5)
    assert chat.load(files[0], draft_path=str(files[1])).pass_ms == ()
    plain, first = chat.ask(Speculation(drafters=("draft",)), prompt="a b c d " * 20, state=StateKey(chat="a"))
    assert first.draft_n == 0 and first.speculation.off == UNCALIBRATED
    chat.engine.cancel()
    chat.engine.measure(Measure(calibrates=True))
    chat.engine.clear_cancel()
    [stopped] = chat.of(Failed)
    assert stopped.code == "interrupted" and target_costs(files[0]) == UNKNOWN

    def found(target: Model, *_: object, **__: object) -> PassCosts:
        target.sequence.clear()
        return costs

    monkeypatch.setattr(calibration, "measure", found)
    for _ in range(2):  # the second time it is known
        chat.engine.measure(Measure(calibrates=True))
        assert chat.of(Measured)[-1].pass_ms == costs.verify_ms
        monkeypatch.setattr(calibration, "measure", None)
    again, second = chat.ask(Speculation(drafters=("draft",)), prompt="a b c d " * 20, state=StateKey(chat="a"))
    assert again == plain and second.cache_n > 0
    assert second.speculation.off != UNCALIBRATED


def test_a_stop_during_the_measurement_stops_the_load(chat: PairChat, files: tuple[Path, Path]) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, LoadProgress) and event.phase == "calibrating":
            chat.engine.cancel()

    chat.react = stop
    assert isinstance(chat.command(files[0], draft_path=str(files[1]), calibrate=True), LoadCancelled)
    assert target_costs(files[0]) == UNKNOWN
