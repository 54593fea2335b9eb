"""Tests what is recorded of a comparison, and its file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cpuchat.compare.comparison import Comparison
from cpuchat.compare.recording import Recording, RecordingError, read_recording
from cpuchat.compare.runner import Round, SideAnswer, TokenText, Turn
from cpuchat.config.settings import Settings
from cpuchat.present import compare
from cpuchat.protocol.messages import TextDelta
from tests.compare.test_figures import Q4, Q8, a_round, answered
from tests.support.comparing import SIDES
from tests.support.recorded import RECORDING
from tests.support.scripted_backend import ScriptedBackend


def comparison() -> Comparison:
    return Comparison(SIDES, Settings(), backend=ScriptedBackend)


def written(answer: SideAnswer, first_ms: float, step_ms: float) -> SideAnswer:
    """Give the answer four words, with times."""
    answer.written = TokenText()
    for number, word in enumerate(("One ", "two ", "three ", "four.")):
        answer.written.add(TextDelta(request_id=1, text=word, lengths=(len(word),), at_ms=first_ms + step_ms * number))
    return answer


def test_a_fair_round_is_recorded_with_what_was_measured() -> None:
    fair = a_round(written(answered(Q8, 25.0), 300.0, 40.0), written(answered(Q4, 37.0), 200.0, 27.0))
    stopped = a_round(answered(Q8, 25.0, stop="cancelled"), answered(Q4, 37.0))
    recording = Recording.of(comparison(), Turn("Why?", [fair, stopped]))
    a, b = recording.sides
    assert (recording.title, recording.prompt) == ("Q8_0 against Q4_K_M", "Why?")
    assert (a.name, a.tok_s, a.first_s, a.ended) == ("Q8_0", 25.0, 0.22, True)
    assert a.tokens == (("One ", 0.0), ("two ", 40.0), ("three ", 80.0), ("four.", 120.0))
    assert a.bytes_per_token == pytest.approx(1.6e9)
    assert b.utilization == pytest.approx(37 * 0.96 / 51)
    assert recording.complete and recording.leader == 1 and not recording.stopped
    assert "8 threads" in recording.machine
    assert compare.label(recording) == "replay of two fair runs"


def test_a_running_round_is_recorded_as_far_as_it_is() -> None:
    running = Round(answers=(written(SideAnswer(), 300.0, 40.0), SideAnswer()))
    recording = Recording.of(comparison(), Turn("Why?", [running]), running)
    assert len(recording.sides[0].tokens) == 4 and not recording.sides[1].tokens
    assert not recording.complete and not recording.stopped and recording.leader is None
    assert recording.sides[0].rate_at(float("inf")) == pytest.approx(25.0)


def test_a_recording_that_cannot_be_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pair.json"
    with pytest.raises(RecordingError, match="Cannot read"):
        read_recording(file)
    file.write_bytes(msgspec.json.encode(RECORDING))
    assert read_recording(file) == RECORDING
    for content in (
        b'{"title": "x", "sides": [1, 2]}',
        msgspec.json.encode(RECORDING).replace(b"100.0]", b"-40.0]", 1),
    ):
        file.write_bytes(content)
        with pytest.raises(RecordingError, match="Cannot read"):
            read_recording(file)
