"""The voice in the wheel of hibari-tts: one US English voice, 24 kHz, no network.

A voice of piper, the external program: one process that writes a WAV file for each line of its input.

Both piper programs, the one in C++ and the one in Python, name the file that they have written: on standard output, or
in the log that `--debug` turns on.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import tempfile
import wave
from pathlib import Path

import numpy as np
from hibari import Hibari

from cpuchat.base.errors import SpeechFailed
from cpuchat.base.processes import child_environment

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


class PiperVoice:
    """See `Voice`. Raises SpeechFailed if the voice's description cannot be read."""

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
