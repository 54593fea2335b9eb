"""Reads aloud on the chat screen: actions and their figures."""

from __future__ import annotations

from collections.abc import Awaitable

from textual import work

from cpuchat.base.errors import CpuchatError
from cpuchat.tui.chat.answering import Answering
from cpuchat.tui.chat.history import HistoryScreen
from cpuchat.tui.chat.reader import Reader
from cpuchat.tui.chat.telemetry import LiveFigures
from cpuchat.tui.markdown.transcript import Transcript

_FIGURES_SECONDS = 1.0


class SpeakingScreen(HistoryScreen):
    """Base of the chat screen."""

    _answering: Answering
    _figures: LiveFigures

    async def on_unmount(self) -> None:
        self.services.machine_watch.close()
        await self._reader.close()

    def silence(self) -> bool:
        """Stop reading aloud; False if nothing was read."""
        return self._reader.stop()

    def _make_reader(self) -> Reader:
        """Return the reader, connected to the figures."""
        self._reader = Reader(self.services, self.tell, self._reading_changed)
        self._figures.speech = self._reader.figures
        self._reading_timer = self.set_interval(_FIGURES_SECONDS, lambda: self._figures.show(), pause=True)
        return self._reader

    def _model_ready(self) -> None:
        self._figures.share_the_cores()
        self.run_worker(self._reader.prepare_if_enabled(), group="speech")

    def _reading_changed(self) -> None:
        """Keep the figures of what is read up to date, and Esc enabled."""
        if not self.is_running:
            return
        if self._reader.busy:
            self._reading_timer.resume()
        else:
            self._reading_timer.pause()
        self._figures.show()
        self.refresh_bindings()

    @work(exclusive=True, group="speech")
    async def action_speak(self) -> None:
        """Toggle reading answers aloud."""
        await self._try_speaking(self._reader.switch(lambda: self._answering.text_to_read))

    @work(exclusive=True, group="speech")
    async def action_read_answer(self) -> None:
        """Read the selected message, or the last answer."""
        if text := self.query_one(Transcript).current_message_text():
            await self._try_speaking(self._reader.read(text))
        else:
            self.tell("No answer to read yet.")

    async def _try_speaking(self, speaking: Awaitable[None]) -> None:
        await self._stream.stop_probes()
        try:
            await speaking
        except CpuchatError as error:
            self.tell(str(error), "error")
