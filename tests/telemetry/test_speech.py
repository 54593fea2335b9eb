from __future__ import annotations

import pytest

from cpuchat.telemetry.speech import SpeechMeter


def test_first_audio_counts_from_request_token_and_sentence() -> None:
    meter = SpeechMeter()
    meter.begin(10.0)
    meter.token(10.5)
    meter.token(10.6)
    meter.sentence(11.0)
    meter.sentence(12.0)
    assert meter.figures(12.0).first_audio_s is None
    meter.synthesized(4.0, 0.04)
    meter.played(4.0, 11.1, paced=True)
    meter.played(2.0, 12.0, paced=True)
    found = meter.figures(12.0)
    assert found.first_audio_s == pytest.approx(1.1)
    assert found.after_token_s == pytest.approx(0.6)
    assert found.after_sentence_s == pytest.approx(0.1)


def test_the_real_time_factor_is_of_the_whole_reading() -> None:
    meter = SpeechMeter()
    meter.begin(None)
    assert meter.figures(0).real_time_factor is None
    meter.synthesized(4.0, 0.1)
    meter.synthesized(1.0, 0.1)
    assert meter.figures(0).real_time_factor == pytest.approx(0.04)
    assert meter.figures(0).sound_s == 5.0
    meter.begin(None)
    assert meter.figures(0).real_time_factor is None


def test_queued_sound_is_what_waits_and_what_the_player_has_left() -> None:
    meter = SpeechMeter()
    meter.begin(0.0)
    meter.synthesized(3.0, 0.1)
    meter.synthesized(2.0, 0.1)
    assert meter.queued(1.0) == 5.0
    meter.played(3.0, 1.0, paced=True)
    assert meter.queued(2.0) == pytest.approx(2.0 + 2.0)
    assert meter.queued(9.0) == pytest.approx(2.0)
    meter.played(2.0, 9.0, paced=False)  # into a file
    assert meter.queued(9.0) == 0.0
    meter.end()
    assert not meter.figures(9.0).reading


def test_decoding_with_and_without_speech_is_of_one_model() -> None:
    meter = SpeechMeter()
    meter.answered("a", 41.2, read=False)
    meter.answered("a", 39.8, read=True)
    found = meter.figures(0)
    assert (found.decode_tok_s, found.plain_tok_s) == (39.8, 41.2)
    meter.answered("b", 12.0, read=True)
    assert (meter.figures(0).decode_tok_s, meter.figures(0).plain_tok_s) == (12.0, None)
