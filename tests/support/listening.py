"""Listens to WAV files: length, silence, clipping, loudness."""

from __future__ import annotations

import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Heard:
    """`loudness` is the root mean square of full scale, `silent` the share of 20 ms windows below 1 % of it, `pause`
    the longest silence in seconds, `clipped` the share of samples at full scale."""

    rate: int
    seconds: float
    loudness: float
    silent: float
    pause: float
    clipped: float


def listen(file: Path) -> Heard:
    with wave.open(str(file), "rb") as sound:
        assert (sound.getnchannels(), sound.getsampwidth()) == (1, 2)
        rate = sound.getframerate()
        samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2").astype(float) / 32768
    window = rate // 50
    loud = np.sqrt((samples[: len(samples) // window * window].reshape(-1, window) ** 2).mean(axis=1))
    longest = current = 0
    for quiet in loud < 0.01:
        current = current + 1 if quiet else 0
        longest = max(longest, current)
    return Heard(
        rate=rate,
        seconds=len(samples) / rate,
        loudness=float(np.sqrt((samples**2).mean())),
        silent=float((loud < 0.01).mean()),
        pause=longest / 50,
        clipped=float((np.abs(samples) > 0.999).mean()),
    )
