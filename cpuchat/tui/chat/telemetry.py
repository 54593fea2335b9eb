"""Live figures: a panel for wide screens, one line for narrow ones, and what updates both while something runs.

Both are drawn by hand: an update compares rows and never causes a layout. While an answer is written every value keeps
its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import Any, ClassVar

from rich.cells import cell_len
from rich.style import Style
from textual.geometry import Region
from textual.screen import Screen
from textual.strip import Strip
from textual.widget import Widget

from cpuchat.protocol.timings import SERVER_WIDE
from cpuchat.telemetry import units
from cpuchat.telemetry.machine import ProcessMemory, process_memory
from cpuchat.telemetry.meter import Figures
from cpuchat.telemetry.speech import Speech
from cpuchat.tui.chat.figure_sections import (
    SCALE,
    SECTIONS,
    WAITED,
    Frame,
    Line,
    byte_words,
    draw,
    percent,
    reuse,
    shown_speed,
    speed_up,
    state,
    timeline,
)
from cpuchat.tui.chat.status import WARNING_SHARE, StatusLine
from cpuchat.tui.markdown.transcript import Transcript
from cpuchat.tui.services import SPARE, Services, pace_beside_model

PARTS = ("label", "value", "now", "fill", "track", "limit", "missing")
_CSS = """
        & > .figures--label, & > .figures--missing { color: $hint; }
        & > .figures--value { color: $foreground; }
        & > .figures--now { color: $now; text-style: bold; }
        & > .figures--fill { color: $now; }
        & > .figures--track { color: $foreground 30%; }
        & > .figures--limit { color: $limit; text-style: bold; }
        &:ansi > .figures--label, &:ansi > .figures--missing, &:ansi > .figures--track {
            color: ansi_default;
            text-style: dim;
        }
"""


class _Figures(Widget):
    """Draws rows and refreshes only those that changed."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"figures--{part}" for part in PARTS}

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._last: tuple[Figures, ProcessMemory | None] | None = None
        self._lines: list[Line] = []
        self._rows: list[Strip] = []  # of the lines
        self._styles: dict[str, Style] = {}  # working them out costs more than drawing does
        self._base = Style.null()

    def show(self, figures: Figures, memory: ProcessMemory | None) -> None:
        """Show these figures. Never causes a layout."""
        self._last = (figures, memory)
        if changed := self._draw():
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def compose_rows(self, frame: Frame, height: int) -> list[Line]:
        """Return the rows of the figures, at most `height`; a widget has its own."""
        return []

    def _draw(self) -> list[int]:
        """Update the rows; returns the numbers of those that changed."""
        if self._last is None or not self.is_attached or not self.size:
            return []
        if not self._styles:
            self._base = self.rich_style
            self._styles = {part: self.get_component_rich_style(f"figures--{part}") for part in PARTS}
        figures, memory = self._last
        width, height = self.size
        frame = Frame(figures, memory, width, height >= _TALL, self._styles)
        lines = self.compose_rows(frame, height)[:height]
        lines += [[]] * (height - len(lines))
        old, self._lines = self._lines, lines
        if len(old) != height:
            old, self._rows = [], [Strip.blank(width, self._base)] * height
        changed = [y for y, line in enumerate(lines) if not old or line != old[y]]
        for y in changed:
            self._rows[y] = Strip(lines[y]).adjust_cell_length(width, self._base)
        return changed

    def _redraw(self) -> None:
        self._lines, self._rows = [], []
        self._draw()
        self.refresh()

    def on_resize(self) -> None:
        self._redraw()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._styles = {}
        self.call_later(self._redraw)

    def render_line(self, y: int) -> Strip:
        return self._rows[y] if y < len(self._rows) else Strip.blank(self.size.width, self.rich_style)


_TALL = 20
_CURVE = (2, 6)  # rows of the timeline, at least and at most


class TelemetryPanel(_Figures):
    """Shows the figures of the running or last answer, one section below the other; made for 28 columns and more.

    Sections that have nothing to say are left out, and so are rows without a figure unless an answer is being written:
    then they keep their place, so that nothing jumps. What does not fit is cut or left out, the least important first.
    """

    DEFAULT_CSS = f"TelemetryPanel {{ width: 32; {_CSS} }}"
    FOR_THE_CURVE: ClassVar[tuple[tuple[str, int], ...]] = (("memory", 0), ("timing", 3))
    """Sections cut to their first rows, in this order, if the timeline fits then."""
    TO_FIT: ClassVar[tuple[tuple[str, int], ...]] = (
        ("memory", 0), ("serving", 3), ("speech", 4), ("timing", 3), ("drafting", 2), ("roofline", 7), ("context", 1),
        ("roofline", 4), ("speech", 2), ("timing", 0), ("speech", 0),
    )  # fmt: skip
    """Else sections cut to their first rows, in this order, until everything fits."""

    def on_mount(self) -> None:
        self.border_title = "Now"

    def compose_rows(self, frame: Frame, height: int) -> list[Line]:
        gap = int(frame.tall)
        least = _CURVE[0]
        drawn = {name: rows for name, section in SECTIONS.items() if (rows := draw(section, frame))}
        waits = len(WAITED) if frame.figures.server is not None else 0  # rows before that of prefill

        def size(parts: dict[str, list[Line]]) -> int:
            return sum(len(part) + gap for part in parts.values()) - gap

        def cut(cuts: tuple[tuple[str, int], ...], most: int) -> dict[str, list[Line]]:
            parts = dict(drawn)
            for name, rows in cuts:
                if size(parts) <= most:
                    break
                rows += waits if name == "timing" and rows else 0
                parts[name] = parts.get(name, [])[:rows]
                parts = {name: part for name, part in parts.items() if part}
            return parts

        with_curve = height - (1 + least + gap)
        parts = cut(self.FOR_THE_CURVE, with_curve)
        if size(parts) > with_curve:
            parts = cut(self.TO_FIT, height)
        rows: list[Line] = []
        for part in parts.values():
            above = gap if rows else 0
            if len(rows) + above + len(part) > height:
                break
            rows += [*([[]] * above), *part]
        return rows + self._below(frame, height - len(rows))

    @staticmethod
    def _below(frame: Frame, height: int) -> list[Line]:
        """Draw, in the rows that are left, what was reused and the timeline. The latter alone while an answer is
        written, if there is no room for both; before and after that, it gives way.
        """
        least, most = _CURVE
        gap: list[Line] = [[]] if frame.tall else []
        needed = len(gap) + 1 + least
        reused = [*gap, *rows] if (rows := reuse(frame)) else []
        if frame.figures.phase == "decoding" and height >= needed > height - len(reused):
            reused = []
        rows = reused[:height]
        room = height - len(rows) - len(gap) - 1
        if room >= least and (frame.figures.history or not frame.settled):
            rows += [*gap, *timeline(frame, min(most, room))]
        return rows


_BAR_FROM = 76  # cells: below, the line has no room for another bar
_BAR = 8
_FIRST_AUDIO_FROM = 100  # cells of a line that has room for first audio


class TelemetryLine(_Figures):
    """Shows the figures in one line, the most important first."""

    DEFAULT_CSS = f"TelemetryLine {{ height: 1; {_CSS} }}"

    def compose_rows(self, frame: Frame, height: int) -> list[Line]:
        figures = frame.figures
        number, part = shown_speed(frame)
        line = state(frame.narrow(30))
        parts: list[Line] = []
        if number or not frame.settled:
            parts = [] if figures.phase == "decoding" else [line]
            line = [
                frame.text(part, f"{number or 'n/a':>5}"),
                frame.text("label", f" tok/s{frame.approximately}"),
                *(speed_up(frame, part) if figures.drafting.speed_up.value is not None else []),
            ]
        parts += [
            _drafting_in_line(frame),
            speech_in_line(frame),
            _bandwidth_in_line(frame),
            *_figures_in_line(frame, is_average=part == "value"),
        ]
        room = frame.width - _cells(line)
        for drawn in filter(None, parts):
            if (need := _cells(drawn) + 3) <= room:
                line += [frame.text("track", " · "), *drawn]
                room -= need
        return [line]


def _figures_in_line(frame: Frame, is_average: bool) -> list[Line]:
    """Draw waiting times, context, averages and memory for one line; `is_average`: the line begins with that."""
    figures, parts = frame.figures, list[Line]()
    if figures.ttft_s.value is not None:
        parts.append(frame.item("first ", " ".join(units.duration(figures.ttft_s.value))))
    if figures.server is not None and (queue := figures.server.queue_s.value) is not None:
        parts.append(frame.item("queue ", " ".join(units.duration(queue))))
    if figures.n_ctx.value and figures.n_past.value is not None:
        share = figures.n_past.value / figures.n_ctx.value
        used = f"ctx {units.context(figures.n_past.value, figures.n_ctx.value)}"
        gauge = frame.narrow(len(used) + 13).gauge(share, f"{100 * share:3.0f} %", used, warns=share >= WARNING_SHARE)
        parts.append(gauge)
    if figures.decode_tok_s.value is not None and not is_average:
        parts.append(frame.item("avg ", units.rate(figures.decode_tok_s.value), f" tok/s{frame.approximately}"))
    if figures.prefill_tok_s.value is not None:
        parts.append(frame.item("prefill ", units.rate(figures.prefill_tok_s.value), " tok/s"))
    if figures.predicted_n:
        parts.append(frame.item("", f"{figures.predicted_n:,}", f" tokens{frame.approximately}"))
    if frame.memory is not None:
        parts.append(frame.item("mem ", " ".join(byte_words(frame.memory.private))))
    return parts


def _drafting_in_line(frame: Frame) -> Line:
    """Draw acceptance and tokens per pass for one line; nothing without drafters or before the first draft."""
    now = frame.figures.drafting
    if not now.wanted:
        return []
    if now.acceptance_now.value is None:
        return [frame.text("label", "drafts off")] if now.reason and frame.figures.server is None else []
    wide = f" {SERVER_WIDE}" if now.counts.source == SERVER_WIDE else ""
    line = frame.item("acc ", f"{percent(now.acceptance_now.value):>3}", f" %{wide}")
    if now.reason:
        return [*line, frame.text("label", " drafts off")]
    per_pass = now.tokens_per_pass.value
    return line if per_pass is None else [*line, *frame.item("", f"{per_pass:>5.1f}", "/pass")]


def speech_in_line(frame: Frame) -> Line:
    """Draw the audio queued, and first audio where there is room, for one line; nothing while nothing is read."""
    now = frame.figures.speech
    if not now.reading:
        return []
    if frame.width < _FIRST_AUDIO_FROM:
        return frame.item("audio ", f"{f'+{now.queued_s:.1f}':>5}", " s")
    first = "n/a" if now.first_audio_s is None else " ".join(units.duration(now.first_audio_s))
    return [
        frame.text("label", "first audio "),
        frame.text("missing" if now.first_audio_s is None else "value", f"{first:>6}"),
        *frame.item(", queued ", f"{now.queued_s:>4.1f}", " s"),
    ]


def _bandwidth_in_line(frame: Frame) -> Line:
    """Draw `44/51 GB/s ████──╎ 86 % ≈` for one line; nothing before the first token."""
    now = frame.figures.roofline
    if now.bandwidth.value is None:
        return []
    used, mark = units.bandwidth(now.bandwidth.value), "≈" if now.counted.value is None else now.source
    if now.peak.value is None or now.utilization.value is None:
        return frame.item("", f"{used:>3}", f" GB/s {mark}")
    peak = units.bandwidth(now.peak.value.bytes_per_s)
    line = frame.item("", f"{used:>{len(peak)}}", f"/{peak} GB/s ")
    share = f"{100 * now.utilization.value:3.0f} %"
    if frame.width >= _BAR_FROM:
        line += frame.narrow(_BAR + len(share) + 1).gauge(now.utilization.value / SCALE, share, peak=1 / SCALE)
    else:
        line.append(frame.text("value", share))
    return [*line, frame.text("limit" if now.off else "label", f" {'peak too low' if now.off else mark}")]


def _cells(line: Line) -> int:
    return sum(cell_len(segment.text) for segment in line)


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
        self._status.show_context(figures.n_past.value or 0)
        shown = TelemetryPanel if self._screen.has_class("-wide") else TelemetryLine
        for one in self._screen.query(shown):  # none when the app ends while a model loads
            one.show(figures, memory)
