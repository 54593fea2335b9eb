"""Chooses the speech engine, and the command of its process."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cpuchat.children import python_command
from cpuchat.errors import SpeechFailed
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.paths import expanded, shown
from cpuchat.settings import SpeechSection
from cpuchat.speech.messages import EngineName

INSTALL = 'Run `uv tool install ".[speech]"` in the checkout of cpuchat, or put piper on the PATH and set its voice.'


class Voice(Protocol):
    """A loaded voice. Made in the speech process only.

    `rate` in samples per second.
    """

    rate: int

    def synthesize(self, text: str) -> bytes:
        """Return 16-bit mono samples. Raises SpeechFailed."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class VoiceChoice:
    """The engine to use, and for piper its voice file; `speed` 1 is normal."""

    engine: EngineName
    file: str = ""
    speed: float = 1.0

    def command(self, cpus: Collection[int] = ()) -> list[str]:
        """Return the command that starts the speech process on `cpus` (none given: on all)."""
        options = ["--engine", self.engine, "--speed", str(self.speed), "--voice", self.file]
        return python_command("-m", "cpuchat.speech", *options, "--cpus", format_cpu_list(cpus))


def choose_voice(section: SpeechSection) -> VoiceChoice:
    """Return the engine of the settings; "auto" is hibari if it is installed, else piper with its voice.

    Raises:
        SpeechFailed: it is not installed, or piper's voice is missing.
    """
    hibari, piper = importlib.util.find_spec("hibari") is not None, shutil.which("piper") is not None
    engine: EngineName
    match section.engine:
        case "auto" if hibari or not (piper and section.voice):
            engine = "hibari"
        case "auto":
            engine = "piper"
        case name:
            engine = name
    if engine == "hibari":
        if not hibari:
            raise SpeechFailed("No voice is installed.", INSTALL)
        return VoiceChoice("hibari", speed=section.speed)
    if not piper:
        raise SpeechFailed("piper is not on the PATH.", INSTALL)
    file = expanded(section.voice)
    if not section.voice or not file.is_file():
        what = f"{shown(file)} is not a file." if section.voice else "piper needs a voice file."
        raise SpeechFailed(what, "Set speech.voice to an .onnx voice of piper, with its .onnx.json beside it.")
    return VoiceChoice("piper", str(Path(file).absolute()), section.speed)
