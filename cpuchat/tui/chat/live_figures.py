"""Sets the pace of the chat screen while something runs, and updates its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any

from textual.screen import Screen

from cpuchat.telemetry.machine import process_memory
from cpuchat.telemetry.speech import Speech
from cpuchat.tui.chat.status import StatusLine
from cpuchat.tui.chat.telemetry import TelemetryLine, TelemetryPanel
from cpuchat.tui.markdown.transcript import Transcript
from cpuchat.tui.services import SPARE, Services, pace_beside_model


class LiveFigures:
    """Updates status line and figures from the meter, the worker process and the counters.

    Where text is drawn, they are drawn with it: each frame has a price of its own. Created paused, when `screen` is
    mounted. Use from the event loop.
    """

    def __init__(self, screen: Screen[Any], services: Services) -> None:
        self._screen = screen
        self._services = services
        self._status = screen.query_one(StatusLine)
        self._transcript = screen.query_one(Transcript)
        self._transcript.on_flush = self._with_text
        self.speech: Callable[[], Speech] = Speech
        """Returns the figures of reading aloud."""
        self._running = False
        self._shown = self._drawn = 0.0  # when the figures were, and the text
        self._pace = SPARE
        self._timer = screen.set_interval(SPARE.figures, self._without_text, pause=True)

    def start(self) -> None:
        """Update periodically."""
        self._running = True
        self._timer.resume()

    def stop(self) -> None:
        """Update once more, then only on request."""
        self._running = False
        self._timer.pause()
        self.show()

    def share_the_cores(self) -> None:
        """Choose the pace: slower if the model uses every core."""
        self._pace = pace_beside_model(self._services.conversation.model)
        self._services.conversation.frame_seconds = self._pace.text
        self._transcript.min_interval = self._pace.interval
        self._timer.stop()
        self._timer = self._screen.set_interval(self._pace.figures, self._without_text, pause=not self._running)

    def _with_text(self) -> None:
        self._drawn = monotonic()
        if self._running and self._drawn - self._shown > 0.9 * self._pace.figures:
            self.show()

    def _without_text(self) -> None:
        if monotonic() - self._drawn > self._pace.figures:
            self.show()

    def show(self) -> None:
        self._shown = monotonic()
        conversation, watch = self._services.conversation, self._services.machine_watch
        pid = conversation.backend.pid
        if not conversation.settings.hardware.counters:
            watch.close()
        elif pid is not None and (sample := watch.sample(pid)) is not None:
            conversation.meter.machine(sample)
        figures = replace(conversation.figures(), speech=self.speech())
        self._status.show_drafting(figures.drafting)
        self._status.show_engine(conversation.backend.engine)
        memory = None if pid is None else process_memory(pid)
        self._status.show_context(figures.n_past or 0)
        shown = TelemetryPanel if self._screen.has_class("-wide") else TelemetryLine
        for one in self._screen.query(shown):  # none when the app ends while a model loads
            one.show(figures, memory)
