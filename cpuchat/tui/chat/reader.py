"""Reads answers aloud on the chat screen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from textual.screen import Screen

from cpuchat.base.errors import CpuchatError
from cpuchat.config.settings import SpeechSection
from cpuchat.protocol.messages import TextDelta
from cpuchat.session.chat import ChatSession
from cpuchat.session.events import AnswerBegun, AnswerEnded, SessionEvent
from cpuchat.tui.services import Services

if TYPE_CHECKING:
    from cpuchat.speech.speaker import Speaker


class Reader:
    """Owns the speech process, which runs only while answers are to be read. Use it from the event loop."""

    def __init__(self, screen: Screen[Any], services: Services, session: ChatSession) -> None:
        self.enabled = services.settings.speech.answers
        self._screen, self._services, self._session = screen, services, session
        self._speaker: Speaker | None = None
        self._program = ""  # that plays
        self._is_writing = False  # an answer
        self._reads_answer = False  # not another text
        self._leaving: asyncio.Task[None] | None = None

    def follow(self, event: SessionEvent) -> Awaitable[None] | None:
        match event:
            case AnswerBegun(summarizes=False):
                return self._begin_answer()
            case TextDelta(channel="answer") if self._speaker is not None and self._reads_answer:
                self._speaker.feed(event.text)
            case AnswerEnded():
                self._is_writing = False
                if self._speaker is not None and self._reads_answer:
                    self._speaker.finish()
        return None

    @property
    def busy(self) -> bool:
        return self._speaker is not None and self._speaker.busy

    async def switch(self) -> None:
        """Toggle reading answers, from the next one on. Raises SpeechFailed: no voice, or nothing that plays."""
        if self.enabled:
            self.enabled = False
            await self.close()
            self._session.tell("Reading aloud is off.")
        else:
            await self.prepare()
            self.enabled = True
            self._session.tell("Reading answers aloud (Esc stops).")
        self._services.save_settings({"speech": {"answers": self.enabled}})

    async def read(self, text: str) -> None:
        """Read a text that is there. Raises SpeechFailed as `switch`."""
        self.stop()
        speaker = await self.prepare()
        self._begin(speaker, answer=False)
        await speaker.feed_whole(text)

    async def prepare(self) -> Speaker:
        """Start the speech process, if it does not run. Raises SpeechFailed."""
        from cpuchat.speech.player import ProgramPlayer, playing_program
        from cpuchat.speech.speaker import Speaker, check_voice

        speed = self._services.settings.speech.speed
        check_voice()
        self._program = self._program or await playing_program()
        if self._speaker is not None and self._speaker.speed != speed:
            await self.close()
        if self._speaker is None:
            self._speaker = Speaker(speed, lambda: ProgramPlayer(self._program), tell=self._failed, ended=self._over)
        self._speaker.prepare()
        return self._speaker

    async def prepare_if_enabled(self) -> Speaker | None:
        """Prepare if answers are to be read; a voice that is missing turns that off for this run."""
        if self.enabled:
            try:
                return await self.prepare()
            except CpuchatError as error:
                self._failed(error)
        return None

    async def settings_changed(self, before: SpeechSection) -> None:
        now = self._services.settings.speech
        if now == before:
            return
        self.enabled = now.answers
        if self.enabled:
            await self.prepare_if_enabled()
        elif before.answers:
            await self.close()

    async def _begin_answer(self) -> None:
        """Begin with an answer that was just asked for, if answers are to be read."""
        self.stop()  # what is still read of the answer before
        self._is_writing, self._reads_answer = True, False
        self._session.conversation.logs_speed = True
        if (speaker := await self.prepare_if_enabled()) is not None and self.enabled:
            self._begin(speaker, answer=True)

    def stop(self) -> bool:
        """Be silent at once; False if nothing was read."""
        if self._speaker is None or not self._speaker.busy:
            return False
        self._speaker.stop()
        self._screen.refresh_bindings()
        return True

    async def close(self) -> None:
        """End the speech process; the next reading starts it again."""
        speaker, self._speaker, self._reads_answer = self._speaker, None, False
        if speaker is not None:
            await speaker.close()
            self._screen.refresh_bindings()

    def _begin(self, speaker: Speaker, *, answer: bool) -> None:
        self._reads_answer = answer
        if self._is_writing:  # what is read beside it costs a little of its speed: that is not the model's
            self._session.conversation.logs_speed = False
        speaker.begin()
        self._screen.refresh_bindings()

    def _over(self) -> None:
        """Follow the end of a reading; the process stays while answers are to be read."""

        async def leave() -> None:
            if not self.enabled and not self.busy:
                await self.close()

        self._screen.refresh_bindings()
        if not self.enabled:
            self._leaving = asyncio.ensure_future(leave())

    def _failed(self, error: CpuchatError) -> None:
        off = "Reading aloud is off until the next start (Ctrl+S retries)." if self.enabled else ""
        self.enabled = False
        self._program = ""
        self._session.tell(f"{error} {off}".rstrip(), "error")
