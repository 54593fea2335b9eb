"""The speech process, `python -m cpuchat.speech`: takes sentences and gives sound; see `messages`.

It loads one voice and keeps to the CPUs it is given, at a lower priority than the threads that compute tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from cpuchat.base.errors import CpuchatError, SpeechFailed
from cpuchat.base.line_process import Refused
from cpuchat.hardware.lists import parse_cpu_list
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.speech.messages import Answer, Sound, Synthesize, VoiceReady
from cpuchat.speech.player import trimmed
from cpuchat.speech.speaker import Voice

# As the app's: a token of milliseconds goes first. Still lower, the first sound would get a tenth of a core beside a
# model that computes on all of them, and take no less from it.
NICENESS = 5
_REINSTALL = {"hibari": "Reinstall hibari-tts.", "piper": "Reinstall piper."}


def _load(engine: str, voice: str, speed: float) -> Voice:
    try:
        if engine == "piper":
            from cpuchat.speech.voices import PiperVoice

            return PiperVoice(Path(voice), speed)
        from cpuchat.speech.voices import HibariVoice

        return HibariVoice(speed)
    except (ImportError, OSError, RuntimeError) as error:
        raise SpeechFailed(f"Cannot load the voice of {engine}: {error}.", _REINSTALL[engine]) from None


def _keep_to(cpus: str) -> None:
    """Restrict this process to `cpus` and lower its priority; what the system refuses is left as it is."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        if cpus:
            os.sched_setaffinity(0, parse_cpu_list(cpus))
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))


def _synthesize(voice: Voice, text: str) -> bytes:
    """Return the sound of a sentence; none for one that the voice fails at. Raises SpeechFailed: the voice is gone."""
    try:
        return trimmed(voice.synthesize(text), voice.rate)
    except CpuchatError:
        raise
    except Exception as error:  # of a library that knows nothing of ours: the next sentence may be fine
        print(f"Skipped a sentence: {error!r}", file=sys.stderr)
        return b""


def _serve(options: argparse.Namespace, requests: BinaryIO, answers: BinaryIO) -> None:
    def send(answer: Answer | Refused) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()

    voice: Voice | None = None
    try:
        voice = _load(options.engine, options.voice, options.speed)
        send(VoiceReady(engine=options.engine, rate=voice.rate, cpus=own_cpus()))
        decoder = msgspec.json.Decoder(Synthesize)
        for line in requests:
            request = decoder.decode(line)
            start = time.perf_counter()
            send(Sound(id=request.id, samples=_synthesize(voice, request.text), seconds=time.perf_counter() - start))
    except CpuchatError as error:
        send(Refused(code=error.code, message=error.message, hint=error.hint))
    finally:
        if voice is not None:
            voice.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("hibari", "piper"), required=True)
    parser.add_argument("--voice", default="")
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--cpus", default="")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # piper and its files are removed on the way
    _keep_to(options.cpus)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        _serve(options, sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
