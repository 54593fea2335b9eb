"""Reads one text aloud for a command."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from cpuchat.base.errors import CpuchatError, UsageError
from cpuchat.base.paths import shown
from cpuchat.cli.terminal import Terminal
from cpuchat.config.settings import SpeechSection
from cpuchat.hardware.topology import read_topology
from cpuchat.present import chats as words
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.speech.player import Player, SoundDevice, WavPlayer, unused_file
from cpuchat.speech.speaker import Speaker, beside_model, choose_voice
from cpuchat.telemetry.speech import Speech

_STEM = "cpuchat-speech"


class Aloud:
    """An async context manager; leaving it stops the sound. `where` is the player or the file, once that is known.

    Args:
        output: a WAV file to write instead of playing; None plays, and writes one where there is no sound device.

    Raises:
        SpeechFailed: no voice is installed.
        UsageError: the folder of `output` does not exist.
    """

    def __init__(self, section: SpeechSection, output: Path | None, terminal: Terminal) -> None:
        if output is not None and not output.absolute().parent.is_dir():
            raise UsageError(f"{shown(output.parent)} is not a folder.", "Choose another file.")
        self._section = section
        self._output = output
        self._terminal = terminal
        self._problem: CpuchatError | None = None
        self._device = SoundDevice()
        self._player: Player | None = None
        self.where = ""
        self.speaker = Speaker(choose_voice(section), self._prepared_player, tell=self._fail)

    async def __aenter__(self) -> Self:
        if self._output is None:
            self._device.look()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._device.close()
        await self.speaker.close()

    async def prepare(self, model: ModelInfo | None = None) -> None:
        """Load the voice beside `model`, in the background; returns when it is known where the sound goes."""
        cpus, shared = beside_model(read_topology(), self._section.cores, model)
        self.speaker.prepare(cpus, shared=shared)
        self._player = await self._new_player()
        self.where = self._player.name

    async def wait(self) -> Speech:
        """Return the figures once everything was heard. Raises SpeechFailed."""
        await self.speaker.wait()
        if self._problem is not None:
            raise self._problem
        return self.speaker.figures()

    async def _new_player(self) -> Player:
        if self._output is not None:
            return WavPlayer(self._output)
        return await self._device.player(
            lambda: unused_file(Path.cwd(), _STEM),
            lambda file: self._terminal.warn(f"cpuchat: {words.no_device(shown(file))}"),
        )

    async def _prepared_player(self) -> Player:
        assert self._player is not None
        return self._player

    def _fail(self, error: CpuchatError) -> None:
        self._problem = error
