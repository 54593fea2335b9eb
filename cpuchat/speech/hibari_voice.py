"""The voice in the wheel of hibari-tts: one US English voice, 24 kHz, no network."""

from __future__ import annotations

import numpy as np
from hibari import Hibari

_FULL_SCALE = 32767.0
# Reads every table and allocates what a sentence needs: the first one of an answer is not late.
_WARM_UP = "Ready, at 1.5 tokens per second."


class HibariVoice:
    """See `Voice`."""

    def __init__(self, speed: float) -> None:
        self._tts = Hibari(threads=1)
        self._speed = speed
        self.rate: int = self._tts.sample_rate
        self.synthesize(_WARM_UP)

    def synthesize(self, text: str) -> bytes:
        # Without brackets, which would be taken for phonemes; with a seed, the same text gives the same sound.
        sound = self._tts(text.replace("[", " ").replace("]", " "), speed=self._speed, seed=0)
        return (np.clip(sound, -1.0, 1.0) * _FULL_SCALE).astype("<i2").tobytes()

    def close(self) -> None: ...
