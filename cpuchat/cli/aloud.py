"""Reads one text aloud for a command."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from cpuchat.base.errors import CpuchatError, UsageError
from cpuchat.base.paths import shown
from cpuchat.config.settings import SpeechSection
from cpuchat.hardware.topology import read_topology
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.speech.player import Player, ProgramPlayer, WavPlayer, playing_program
from cpuchat.speech.speaker import Speaker, check_voice, cpus_beside
from cpuchat.telemetry.speech import Speech


class Aloud:
    """An async context manager; leaving it stops the sound. `where` is the player or the file.

    Args:
        output: a WAV file to write instead of playing; None plays.

    Raises:
        SpeechFailed: no voice is installed; on entering, no program can play here.
        UsageError: the folder of `output` does not exist.
    """

    def __init__(self, section: SpeechSection, output: Path | None) -> None:
        if output is not None and not output.absolute().parent.is_dir():
            raise UsageError(f"{shown(output.parent)} is not a folder.", "Choose another file.")
        self._section = section
        self._output = output
        self._problem: CpuchatError | None = None
        self.where = ""
        check_voice()
        self.speaker = Speaker(section.speed, self._player, tell=self._fail)

    async def __aenter__(self) -> Self:
        self.where = shown(self._output) if self._output is not None else await playing_program()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.speaker.close()

    def prepare(self, model: ModelInfo | None = None) -> None:
        """Load the voice beside `model`, in the background."""
        cpus, shared = cpus_beside(read_topology(), self._section.cores, model)
        self.speaker.prepare(cpus, shared=shared)

    async def wait(self) -> Speech:
        """Return the figures once everything was heard. Raises SpeechFailed."""
        await self.speaker.wait()
        if self._problem is not None:
            raise self._problem
        return self.speaker.figures()

    def _player(self) -> Player:
        return WavPlayer(self._output) if self._output is not None else ProgramPlayer(self.where)

    def _fail(self, error: CpuchatError) -> None:
        self._problem = error
