"""Reads answers aloud on the chat screen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.config.settings import SpeechSection
from cpuchat.present import chats as words
from cpuchat.protocol.timings import LEAST_TOKENS, Timings
from cpuchat.telemetry.speech import Speech, SpeechMeter
from cpuchat.tui.services import Services

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology
    from cpuchat.speech.player import Player, SoundDevice
    from cpuchat.speech.speaker import Speaker


class Reader:
    """Owns the speech process, which runs only while answers are to be read. Use it from the event loop.

    Args:
        tell: shows a message with its severity.
        changed: called when a reading began or ended.
    """

    def __init__(self, services: Services, tell: Callable[[str, str], None], changed: Callable[[], None]) -> None:
        self.enabled = services.settings.speech.answers
        self._services = services
        self._tell = tell
        self._changed = changed
        self._meter = SpeechMeter()
        self._speaker: Speaker | None = None
        self._topology: Topology | None = None
        self._device: SoundDevice | None = None
        self._told_of_files = False
        self._answering = False
        self._beside = False  # something was read while the answer was written
        self._reads_answer = False  # not another text
        self._leaving: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Return whether something is being read."""
        return self._speaker is not None and self._speaker.busy

    def figures(self) -> Speech:
        return self._meter.figures(time.monotonic())

    async def switch(self, written: Callable[[], str | None]) -> None:
        """Toggle reading answers; one that is being written is read from its start.

        Args:
            written: returns its text so far; None when there is no such answer.

        Raises:
            SpeechFailed: there is no voice.
        """
        if self.enabled:
            self.enabled = False
            self._save()
            await self.close()
            self._tell("Reading aloud is off.", "information")
            return
        if self._device is not None:
            self._device.forget()
        await self.prepare()
        self.enabled = True
        self._save()
        self._tell("Reading answers aloud (Esc stops).", "information")
        if (text := written()) is not None:
            self._begin(None, answer=True)
            self.feed(text)

    async def read(self, text: str) -> None:
        """Read a text that is there. Raises SpeechFailed if there is no voice."""
        self.stop()
        await self.prepare()
        self._begin(None, answer=False)
        if self._speaker is not None:
            await self._speaker.feed_whole(text)

    async def prepare(self) -> None:
        """Start the speech process beside the loaded model, if it does not run there. Raises SpeechFailed."""
        from cpuchat.hardware.topology import read_topology
        from cpuchat.speech.player import SoundDevice
        from cpuchat.speech.speaker import Speaker, beside_model, choose_voice

        section = self._services.settings.speech
        voice = choose_voice(section)
        self._device = self._device or SoundDevice()
        self._device.look()
        if self._topology is None:
            self._topology = await run_in_daemon_thread(read_topology)
        if self._speaker is not None and self._speaker.voice != voice:
            await self.close()
        if self._speaker is None:
            self._speaker = Speaker(voice, self._player, tell=self._failed, ended=self._over, meter=self._meter)
        cpus, shared = beside_model(self._topology, section.cores, self._services.conversation.model)
        self._speaker.prepare(cpus, shared=shared)

    async def prepare_if_enabled(self) -> None:
        """Prepare if answers are to be read; a voice that is missing turns that off for this run."""
        if self.enabled:
            try:
                await self.prepare()
            except CpuchatError as error:
                self._failed(error)

    async def settings_changed(self, before: SpeechSection) -> None:
        """Follow the settings."""
        now = self._services.settings.speech
        if now == before:
            return
        self.enabled = now.answers
        if self.enabled:
            await self.prepare_if_enabled()
        elif before.answers:
            await self.close()

    async def begin_answer(self) -> None:
        """Begin with an answer that was just asked for, if answers are to be read."""
        asked = time.monotonic()
        self.stop()  # what is still read of the answer before
        self._answering, self._beside = True, False
        self._services.conversation.logs_speed = True
        await self.prepare_if_enabled()
        if self.enabled:
            self._begin(asked, answer=True)

    def feed(self, text: str) -> None:
        """Read more of the answer, if that is what is being read."""
        if self._speaker is not None and self._reads_answer:
            self._speaker.feed(text)

    def answered(self, timings: Timings) -> None:
        """Record the speed of an answer, with speech or without."""
        model = self._services.conversation.model
        if model is not None and timings.predicted_n >= LEAST_TOKENS:
            self._meter.answered(model.path, timings.predicted_per_second, read=self._beside)

    def end_answer(self) -> None:
        """Say that the answer is complete."""
        self._answering = False
        if self._speaker is not None and self._reads_answer:
            self._speaker.finish()

    def stop(self) -> bool:
        """Be silent at once; False if nothing was read."""
        if self._speaker is None or not self._speaker.busy:
            return False
        self._speaker.stop()
        self._changed()
        return True

    async def close(self) -> None:
        """End the speech process; the next reading starts it again."""
        speaker, self._speaker = self._speaker, None
        if speaker is not None:
            await speaker.close()
            self._changed()
        if self._device is not None:
            await self._device.close()

    def _begin(self, asked: float | None, *, answer: bool) -> None:
        if self._speaker is None:
            return
        self._reads_answer = answer
        if self._answering:  # what is read beside it costs a little of its speed: that is not the model's
            self._beside, self._services.conversation.logs_speed = True, False
        self._speaker.begin(asked)
        self._changed()

    def _over(self) -> None:
        """Follow the end of a reading; the process stays while answers are to be read."""
        self._changed()
        if not self.enabled:
            self._leaving = asyncio.ensure_future(self._leave())

    async def _leave(self) -> None:
        if not self.enabled and not self.busy:
            await self.close()

    def _save(self) -> None:
        self._services.save_settings({"speech": {"answers": self.enabled}})

    def _failed(self, error: CpuchatError) -> None:
        off = "Reading aloud is off until the next start (Ctrl+S retries)." if self.enabled else ""
        self.enabled = False
        if self._device is not None:
            self._device.forget()
        self._tell(f"{error} {off}".rstrip(), "error")

    async def _player(self) -> Player:
        from cpuchat.speech.player import unused_file

        assert self._device is not None
        stem = time.strftime("%Y-%m-%d %H.%M.%S")
        return await self._device.player(lambda: unused_file(paths.speech_dir(), stem), self._tell_of_files)

    def _tell_of_files(self, _: Path) -> None:
        if not self._told_of_files:
            self._told_of_files = True
            self._tell(words.no_device(f"WAV files to {paths.shown(paths.speech_dir())}"), "warning")
