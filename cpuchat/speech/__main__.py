"""The speech process, `python -m cpuchat.speech`: takes sentences and gives sound; see `messages`.

It loads one voice and keeps to the CPUs it is given, at a lower priority than the threads that compute tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import wave
from pathlib import Path
from typing import BinaryIO, Protocol

import msgspec
import numpy as np

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import CpuchatError, SpeechFailed
from cpuchat.base.line_process import LineOutput
from cpuchat.base.processes import child_environment
from cpuchat.hardware.lists import parse_cpu_list
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.speech.messages import Sound, Synthesize, VoiceReady
from cpuchat.speech.player import trimmed

# As the app's: a token of milliseconds goes first. Still lower, the first sound would get a tenth of a core beside a
# model that computes on all of them, and take no less from it.
NICENESS = 5
_REINSTALL = {"hibari": "Reinstall hibari-tts.", "piper": "Reinstall piper."}


class Voice(Protocol):
    """A loaded voice; `rate` in samples per second."""

    rate: int

    def synthesize(self, text: str) -> bytes:
        """Return 16-bit mono samples. Raises SpeechFailed."""
        ...

    def close(self) -> None: ...


_FULL_SCALE = 32767.0
# Reads every table and allocates what a sentence needs: the first one of an answer is not late.
_WARM_UP = "Ready, at 1.5 tokens per second."


class HibariVoice:
    """The voice in the wheel of hibari-tts: one US English voice, 24 kHz, no network. See `Voice`."""

    def __init__(self, speed: float) -> None:
        from hibari import Hibari

        self._tts = Hibari(threads=1)
        self._speed = speed
        self.rate: int = self._tts.sample_rate
        self.synthesize(_WARM_UP)

    def synthesize(self, text: str) -> bytes:
        # Without brackets, which would be taken for phonemes; with a seed, the same text gives the same sound.
        sound = self._tts(text.replace("[", " ").replace("]", " "), speed=self._speed, seed=0)
        return (np.clip(sound, -1.0, 1.0) * _FULL_SCALE).astype("<i2").tobytes()

    def close(self) -> None: ...


class PiperVoice:
    """A voice of piper, the external program: one process that writes a WAV file for each line of its input.

    Both piper programs, the one in C++ and the one in Python, name the file that they have written: on standard output,
    or in the log that `--debug` turns on. See `Voice`. Raises SpeechFailed if the voice's description cannot be read.
    """

    def __init__(self, voice: Path, speed: float) -> None:
        description = Path(f"{voice}.json")
        try:
            self.rate = int(json.loads(description.read_text(encoding="utf-8"))["audio"]["sample_rate"])
        except (OSError, ValueError, KeyError, TypeError):
            raise SpeechFailed(
                f"Cannot read the sample rate of the voice from {description}.", "Download it beside the .onnx file."
            ) from None
        self._folder = tempfile.TemporaryDirectory(prefix="cpuchat-speech-")
        self._written = re.compile(re.escape(self._folder.name) + r"/[\w.-]+\.wav")
        try:
            self._process = subprocess.Popen(
                ["piper", "--model", str(voice), "--output_dir", self._folder.name, "--length_scale", f"{1 / speed:g}",
                 "--debug"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self._folder.name,
                env=child_environment(PYTHONUNBUFFERED="1"),
            )  # fmt: skip
        except OSError as error:
            raise SpeechFailed(f"Cannot start piper: {error.strerror}.") from None
        try:
            self.synthesize("Ready.")  # it loads the voice with the first line
        except BaseException:
            self.close()
            raise

    def synthesize(self, text: str) -> bytes:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # what it said last tells why
            self._process.stdin.write(text.replace("\n", " ").encode() + b"\n")
            self._process.stdin.flush()
        said = ""
        for line in self._process.stdout:
            said = line.decode("utf-8", "replace").strip() or said
            if found := self._written.search(said):
                return self._read(Path(found[0]))
        raise SpeechFailed(f"piper ended: {said or 'without a message'}.", "Check speech.voice.")

    def _read(self, file: Path) -> bytes:
        try:
            with wave.open(str(file), "rb") as sound:
                if sound.getsampwidth() != 2 or sound.getnchannels() != 1:
                    raise SpeechFailed(f"piper wrote {8 * sound.getsampwidth()}-bit sound, not 16-bit mono.")
                return sound.readframes(sound.getnframes())
        except wave.Error as error:  # nothing to say: a WAV file without parameters
            if file.stat().st_size == 0:
                return b""
            raise SpeechFailed(f"piper wrote an invalid WAV file: {error}.") from None
        except EOFError:
            return b""
        finally:
            file.unlink(missing_ok=True)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def _load(engine: str, voice: str, speed: float) -> Voice:
    try:
        if engine == "piper":
            return PiperVoice(Path(voice), speed)
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


def synthesize(voice: Voice, text: str) -> bytes:
    """Return the sound of a sentence; none for one that the voice fails at. Raises SpeechFailed: the voice is gone."""
    try:
        return trimmed(voice.synthesize(text), voice.rate)
    except CpuchatError:
        raise
    except Exception as error:  # of a library that knows nothing of ours: the next sentence may be fine
        print(f"Skipped a sentence: {error!r}", file=sys.stderr)
        return b""


def _serve(options: argparse.Namespace, requests: BinaryIO, answers: LineOutput) -> None:
    voice: Voice | None = None
    try:
        voice = _load(options.engine, options.voice, options.speed)
        answers.send(VoiceReady(engine=options.engine, rate=voice.rate, cpus=own_cpus()))
        decoder = msgspec.json.Decoder(prepared(Synthesize))
        for line in requests:
            request = decoder.decode(line)
            start = time.perf_counter()
            samples = synthesize(voice, request.text)
            answers.send(Sound(id=request.id, samples=samples, seconds=time.perf_counter() - start))
    except CpuchatError as error:
        answers.refuse(error)
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
    with contextlib.suppress(BrokenPipeError):
        _serve(options, sys.stdin.buffer, LineOutput.claim())


if __name__ == "__main__":
    main()
