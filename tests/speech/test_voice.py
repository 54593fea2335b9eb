"""Tests the sound of the voice, and what is said where it is not installed."""

from __future__ import annotations

import numpy as np
import pytest

from cpuchat.base.errors import SpeechFailed
from cpuchat.speech.__main__ import synthesize, trimmed
from cpuchat.speech.speaker import check_voice

pytestmark = pytest.mark.slow


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    check_voice()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SpeechFailed, match="uv tool install"):
        check_voice()


def test_a_sentence_that_a_voice_fails_at_is_skipped() -> None:
    def voice(text: str, **options: float) -> None:
        raise IndexError(text)

    assert synthesize(voice, "2^128", 1.0) == b""


def test_silence_around_a_sentence_is_cut() -> None:
    rate = 24_000
    tone = (8000 * np.sin(np.arange(rate) / 10)).astype("<i2")
    padded = np.concatenate([np.zeros(rate, "<i2"), tone, np.zeros(rate, "<i2")])
    cut = np.frombuffer(trimmed(padded.tobytes(), rate), "<i2")
    assert len(cut) / rate == pytest.approx(1.23, abs=0.01)
    assert trimmed(np.zeros(rate, "<i2").tobytes(), rate) == b""
    assert trimmed(b"", rate) == b""
