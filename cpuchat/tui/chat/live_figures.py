"""Updates the figures on the chat screen a few times a second while something runs."""

from __future__ import annotations

from typing import Any

from textual.screen import Screen
from textual.timer import Timer

from cpuchat.hardware.sysfs import own_cpus
from cpuchat.telemetry.process import process_memory
from cpuchat.tui.chat.status import StatusLine
from cpuchat.tui.chat.telemetry import TelemetryLine, TelemetryPanel
from cpuchat.tui.markdown.transcript import MIN_INTERVAL, Transcript
from cpuchat.tui.services import Services

FIGURES_HZ = 4
# While every core computes, what the UI takes is taken from the model: measured, 8 % of a core cost 6 to 9 % of the
# tokens on two cores (benchmarks/README.md). So there it draws half as often.
CROWDED_FIGURES_HZ = 2
CROWDED_INTERVAL = 0.2


class LiveFigures:
    """Updates status line and figures from the meter, the worker process and the counters.

    Created paused, when `screen` is mounted. Use from the event loop.
    """

    def __init__(self, screen: Screen[Any], services: Services) -> None:
        self._screen = screen
        self._services = services
        self._status = screen.query_one(StatusLine)
        self._running = False
        self._timer = self._every(FIGURES_HZ)

    def _every(self, hz: int) -> Timer:
        return self._screen.set_interval(1 / hz, self.show, pause=not self._running)

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
        """Choose the rate: half as often if the model uses every core."""
        model = self._services.conversation.model
        crowded = model is not None and model.n_threads >= len(own_cpus())
        self._screen.query_one(Transcript).min_interval = CROWDED_INTERVAL if crowded else MIN_INTERVAL
        self._timer.stop()
        self._timer = self._every(CROWDED_FIGURES_HZ if crowded else FIGURES_HZ)

    def show(self) -> None:
        conversation, watch = self._services.conversation, self._services.machine_watch
        pid = conversation.backend.pid
        if not conversation.settings.hardware.counters:
            watch.close()
        elif pid is not None and (sample := watch.sample(pid)) is not None:
            conversation.meter.machine(sample)
        figures = conversation.figures()
        self._status.show_drafting(figures.drafting)
        self._status.show_engine(conversation.backend.engine)
        memory = None if pid is None else process_memory(pid)
        self._status.show_context(figures.n_past or 0)
        shown = TelemetryPanel if self._screen.has_class("-wide") else TelemetryLine
        for one in self._screen.query(shown):  # none when the app ends while a model loads
            one.show(figures, memory)
