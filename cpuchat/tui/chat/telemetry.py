"""Live figures: panel and line, and what updates them while something runs.

They are drawn by hand: an update compares rows and never causes a layout.
"""

from __future__ import annotations

from dataclasses import replace
from time import monotonic
from typing import Any, ClassVar

from rich.style import Style
from textual import on
from textual.events import MouseScrollDown, MouseScrollUp
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

from cpuchat.config.servers import ServerModel
from cpuchat.hardware.process import ProcessMemory, process_memory
from cpuchat.session.activity import Activity
from cpuchat.telemetry.meter import ChatFigures
from cpuchat.tui.chat.figure_sections import all_figures
from cpuchat.tui.chat.figures import PARTS, Frame, Line, brief, one_line, presented, rough, title
from cpuchat.tui.chat.status import StatusLine, short_name
from cpuchat.tui.chat.transcript import ChatTranscript
from cpuchat.tui.services import SPARE, Services, pace_beside_model


class FigureRows(Widget):
    """Draws rows and refreshes only those that changed."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"figures--{part}" for part in PARTS}
    DEFAULT_CSS = """
    FigureRows {
        & > .figures--label { color: $hint; }
        & > .figures--value { color: $foreground; }
        & > .figures--now { color: $now; text-style: bold; }
        & > .figures--fill { color: $now; }
        & > .figures--track { color: $foreground 30%; }
        & > .figures--limit { color: $limit; }
        &:ansi > .figures--label, &:ansi > .figures--track { color: ansi_default; text-style: dim; }
    }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._last: tuple[ChatFigures, ProcessMemory | None, str] | None = None
        self._lines: list[Line] = []
        self._rows: list[Strip] = []  # of the lines
        self._styles: dict[str, Style] = {}  # working them out costs more than drawing does
        self._base = Style.null()

    def compose_rows(self, frame: Frame) -> list[Line]:
        return [one_line(frame)]

    def show(self, figures: ChatFigures, memory: ProcessMemory | None, draft: str = "") -> None:
        """Show these figures; `draft` is the draft model's name in short. Never causes a layout."""
        self._last = (figures, memory, draft)
        if changed := self._draw():
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def _draw(self) -> list[int]:
        if self._last is None or not self.is_attached or not self.size:
            return []
        if not self._styles:
            self._base = self.rich_style
            self._styles = {part: self.get_component_rich_style(f"figures--{part}") for part in PARTS}
        figures, memory, draft = self._last
        if (names := (title(figures), rough(figures))) != (self.border_title, self.border_subtitle):
            self.border_title, self.border_subtitle = names
        width, height = self.size
        lines = self.compose_rows(Frame(figures, memory, width, height, self._styles, draft))[:height]
        lines += [[]] * (height - len(lines))
        old, self._lines = self._lines, lines
        if len(old) != height:
            old, self._rows = [], [Strip.blank(width, self._base)] * height
        changed = [y for y, line in enumerate(lines) if not old or line != old[y]]
        for y in changed:
            self._rows[y] = Strip(lines[y]).adjust_cell_length(width, self._base)
        return changed

    def redraw(self) -> None:
        self._lines, self._rows = [], []
        self._draw()
        self.refresh()

    on_resize = redraw

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._styles = {}
        self.call_later(self.redraw)

    def render_line(self, y: int) -> Strip:
        return self._rows[y] if y < len(self._rows) else Strip.blank(self.size.width, self.rich_style)


class TelemetryLine(FigureRows):
    """Shows the figures in one line, the most important first."""


class PresentedFigures(FigureRows):
    """Shows the figures that matter in large digits, for an audience."""

    def compose_rows(self, frame: Frame) -> list[Line]:
        return presented(frame)


class TelemetryPanel(FigureRows):
    """Shows the figures of the running or last answer, in brief or (class `-all`) all of them, which scroll."""

    _top = 0

    def compose_rows(self, frame: Frame) -> list[Line]:
        rows = all_figures(frame) if self.has_class("-all") else brief(frame)
        self._top = max(0, min(self._top, len(rows) - frame.height))
        return rows[self._top :]

    @on(MouseScrollDown)
    @on(MouseScrollUp)
    def _scroll(self, event: MouseScrollDown | MouseScrollUp) -> None:
        self._top += 2 if isinstance(event, MouseScrollDown) else -2
        self.redraw()


class LiveFigures:
    """Updates status line and figures from the meter, the worker process and the counters.

    Where text is drawn, they are drawn with it: each frame has a price of its own. Created paused, when `screen` is
    mounted. Use from the event loop."""

    def __init__(self, screen: Screen[Any], services: Services) -> None:
        self._screen = screen
        self._services = services
        self._status = screen.query_one(StatusLine)
        self._transcript = screen.query_one(ChatTranscript)
        self._transcript.on_flush = self._with_text
        self._running = False
        self._shown = self._drawn = 0.0  # when the figures were, and the text
        self._pace = SPARE
        self._timer = screen.set_interval(SPARE.figures, self._without_text, pause=True)

    def start(self) -> None:
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
        self._services.conversation.set_pace(self._pace.text)
        self._transcript.min_interval = self._pace.interval
        self._timer.stop()
        self._timer = self._screen.set_interval(self._pace.figures, self._without_text, pause=not self._running)

    def _with_text(self) -> None:
        self._drawn = monotonic()
        if self._running and self._drawn - self._shown > 0.9 * self._pace.figures:
            self.show()

    def _without_text(self) -> None:
        if monotonic() - self._drawn > self._pace.figures:
            self._transcript.show_reading()
            self.show()

    def show_with_text(self) -> None:
        """Update with the text that is drawn next, whatever the pace: both tell how much of the prompt is read."""
        self._shown = 0.0

    def show(self) -> None:
        """Update now."""
        self._shown = monotonic()
        conversation, watch = self._services.conversation, self._services.machine_watch
        pid, model = conversation.backend.pid, conversation.model
        if not conversation.settings.hardware.counters:
            watch.close()
        elif pid is not None and (sample := watch.sample()) is not None:
            conversation.meter.machine(sample)
        figures = conversation.figures()
        if (session := self._services.session).activity is Activity.LOADING:  # its files are looked for, before it is
            figures = replace(figures, phase="loading", on_server=isinstance(session.source, ServerModel))
        drafting = figures.drafting
        if not conversation.activity.is_streaming and not figures.on_server:  # it tells of the next answer
            drafting = replace(drafting, wanted=bool(conversation.speculation.drafters))
        self._status.show_figures(figures.n_past.value or 0, conversation.backend.engine, drafting)
        memory = None if pid is None else process_memory(pid)
        draft = short_name(model.draft) if model is not None and model.draft else ""
        for one in self._screen.query(FigureRows):
            if one.display:
                one.show(figures, memory, draft)
