"""The speech process, `python -m cpuchat.speech`: takes sentences and gives sound; see `speaker`.

It loads the voice of hibari-tts (US English, 24 kHz, no network), at a lower priority than the threads that compute.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from typing import Any, BinaryIO

import msgspec
import numpy as np

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import SpeechFailed
from cpuchat.base.line_process import LineOutput
from cpuchat.speech.speaker import Sound, Synthesize, VoiceReady

# As the app's: a token of milliseconds goes first. Still lower, the first sound would get a tenth of a core beside a
# model that computes on all of them, and take no less from it.
NICENESS = 5
# Reads every table and allocates what a sentence needs: the first one of an answer is not late.
_WARM_UP = "Ready, at 1.5 tokens per second."
_FULL_SCALE = 32767.0
_AUDIBLE = 0.01
"""Of full scale."""
_BEFORE_SECONDS, _AFTER_SECONDS = 0.03, 0.2


def synthesize(voice: Any, text: str, speed: float) -> bytes:
    """Return the sound of a sentence; none for one that the voice fails at."""
    try:
        # Without brackets, which would be taken for phonemes; with a seed, the same text gives the same sound.
        sound = voice(text.replace("[", " ").replace("]", " "), speed=speed, seed=0)
    except Exception as error:  # of a library that knows nothing of ours: the next sentence may be fine
        print(f"Skipped a sentence: {error!r}", file=sys.stderr)
        return b""
    return trimmed((np.clip(sound, -1.0, 1.0) * _FULL_SCALE).astype("<i2").tobytes(), voice.sample_rate)


def trimmed(samples: bytes, rate: int) -> bytes:
    """Return the samples without most of the silence around them: hibari leaves 0.3 s before and 0.46 s after."""
    values = np.frombuffer(samples, "<i2")
    audible = np.flatnonzero(np.abs(values.astype(np.int32)) > _AUDIBLE * 32768)
    if not audible.size:
        return b""
    start = max(0, int(audible[0]) - int(_BEFORE_SECONDS * rate))
    return values[start : int(audible[-1]) + 1 + int(_AFTER_SECONDS * rate)].tobytes()


def _serve(speed: float, requests: BinaryIO, answers: LineOutput) -> None:
    try:
        from hibari import Hibari

        voice = Hibari(threads=1)
    except (ImportError, OSError, RuntimeError) as error:
        answers.refuse(SpeechFailed(f"Cannot load the voice of hibari: {error}.", "Reinstall hibari-tts."))
        return
    synthesize(voice, _WARM_UP, speed)
    answers.send(VoiceReady(rate=voice.sample_rate))
    decoder = msgspec.json.Decoder(prepared(Synthesize))
    for line in requests:
        request = decoder.decode(line)
        answers.send(Sound(id=request.id, samples=synthesize(voice, request.text, speed)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--speed", type=float, default=1.0)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with contextlib.suppress(OSError, AttributeError):  # where the system refuses it
        os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    with contextlib.suppress(BrokenPipeError):
        _serve(options.speed, sys.stdin.buffer, LineOutput.claim())


if __name__ == "__main__":
    main()
