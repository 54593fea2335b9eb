from __future__ import annotations

import pytest

from cpuchat.telemetry.speech import SpeechMeter


def test_first_audio_counts_from_request_and_token() -> None:
    meter = SpeechMeter()
    meter.begin(10.0)
    meter.token(10.5)
    meter.token(10.6)
    assert meter.figures(12.0).first_audio_s is None
    meter.played(4.0, 0.04, 11.1, paced=True)
    meter.played(2.0, 0.04, 12.0, paced=True)
    found = meter.figures(12.0)
    assert found.first_audio_s == pytest.approx(1.1)
    assert found.after_token_s == pytest.approx(0.6)


def test_the_real_time_factor_is_of_the_whole_reading() -> None:
    meter = SpeechMeter()
    meter.begin(None)
    assert meter.figures(0).real_time_factor is None
    meter.played(4.0, 0.1, 0.0, paced=True)
    meter.played(1.0, 0.1, 0.0, paced=True)
    assert meter.figures(0).real_time_factor == pytest.approx(0.04)
    assert meter.figures(0).sound_s == 5.0
    meter.begin(None)
    assert meter.figures(0).real_time_factor is None


def test_queued_sound_is_what_the_player_has_left() -> None:
    meter = SpeechMeter()
    meter.begin(0.0)
    meter.played(3.0, 0.1, 1.0, paced=True)
    assert meter.figures(2.0).queued_s == pytest.approx(2.0)
    meter.played(2.0, 0.1, 3.0, paced=True)
    assert meter.figures(3.0).queued_s == pytest.approx(3.0)
    assert meter.figures(9.0).queued_s == 0.0
    meter.played(2.0, 0.1, 9.0, paced=False)  # into a file
    assert meter.figures(9.0).queued_s == 0.0
    meter.end()
    assert not meter.figures(9.0).reading
