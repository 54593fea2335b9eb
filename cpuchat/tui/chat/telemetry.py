"""Live figures: a panel for wide screens, one line for narrow ones.

Both are drawn by hand: an update compares rows and never causes a layout. While an answer is written every value keeps
its place.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.renderables.digits import Digits
from textual.strip import Strip
from textual.widget import Widget

from cpuchat.present import answers as words
from cpuchat.present.answers import stop_reason
from cpuchat.telemetry import units
from cpuchat.tui.chat.drafting import drafting, drafting_in_line, speed_up
from cpuchat.tui.chat.frame import LABEL, NUMBER, Frame, Line, Section, fit, rate
from cpuchat.tui.chat.roofline import bandwidth_in_line, roofline
from cpuchat.tui.chat.serving import serving, waited
from cpuchat.tui.chat.speech import speech, speech_in_line
from cpuchat.tui.chat.status import WARNING_SHARE
from cpuchat.tui.widgets.charts import braille, nice_max, over_time

if TYPE_CHECKING:
    from cpuchat.telemetry.machine import ProcessMemory
    from cpuchat.telemetry.meter import Figures

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

_MINUTE = 120  # samples of Figures.history, two per second


def _size(count: int) -> tuple[str, str]:
    """Return bytes as number and unit, decimal: ("312", "MB"), ("1.61", "GB")."""
    if count < 999_500_000:
        return f"{count / 1e6:.0f}", "MB"
    return f"{count / 1e9:.2f}", "GB"


def _state(frame: Frame) -> Line:
    """Draw the phase, with a progress bar where there is one."""
    figures = frame.figures
    if figures.phase == "loading" and figures.load_fraction is not None:
        return frame.gauge(figures.load_fraction, f"{int(100 * figures.load_fraction):3d} %", "loading")
    if figures.phase == "prefill" and figures.prefill_total:
        done, total = figures.prefill_processed, figures.prefill_total
        return frame.gauge(done / total, f"{done:>{len(str(total))}}/{total}", "prefill")
    words = {"loading": "loading", "prefill": "prefill", "decoding": "decoding", "done": "done"}
    text = "queued" if figures.ahead else words.get(figures.phase, figures.phase)
    if figures.phase == "done":
        reason = figures.stop_reason
        text = " · ".join(filter(None, (text, stop_reason(reason)))) if reason else "failed"
    elif figures.phase == "idle":
        text = "ready" if figures.n_ctx else frame.why("n_ctx")
    return [frame.text("label", fit(text, frame.width))]


def speed(frame: Frame) -> list[Line]:
    """Draw live tok/s in large digits and the phase; the average once the answer is done."""
    figures = frame.figures
    number, part = rate(figures.live_tok_s), "now"
    if number is None and figures.phase == "done":
        number, part = rate(figures.decode_tok_s), "value"
    if number is None and frame.settled:
        return [_state(frame)]
    if not frame.tall:
        head = frame.row("tok/s", "live_tok_s", number, "")
        if number is not None:
            mark = [frame.text("label", "≈")] if frame.figures.approximate else []
            head[1:] = [frame.text(part, f"{number:>{NUMBER}}"), *speed_up(frame, part), *mark]
        return [head, _state(frame)]
    shown = number or "-"
    left = max(0, LABEL + NUMBER - Digits.get_width(shown))
    segments = Digits(shown, "bold").render(Style(bold=True))
    drawn = [part.text for part in segments if isinstance(part, Segment) and part.text != "\n"]
    rows = [[frame.text(part if number else "missing", " " * left + text)] for text in drawn]
    if number:
        rows[1] += speed_up(frame, part)
    rows[2].append(frame.text("label", f" tok/s{frame.approximately}"))
    return [*rows, _state(frame)]


def timing(frame: Frame) -> list[Line]:
    """Draw averages and counts of this answer."""
    figures = frame.figures
    ttft, unit = (None, "s") if figures.ttft_s is None else units.duration(figures.ttft_s)
    asked = figures.phase not in ("idle", "loading")
    reused = f"{figures.prefill_cached:,}" if asked and figures.prefill_cached is not None else None
    written, token = units.plural(figures.predicted_n, "token").split()
    return [
        frame.row("average", "decode_tok_s", rate(figures.decode_tok_s), f"tok/s{frame.approximately}"),
        frame.row("first token", "ttft_s", ttft, unit),
        *waited(frame),
        frame.row("prefill", "prefill_tok_s", rate(figures.prefill_tok_s), "tok/s"),
        _reused(frame) if asked and figures.reuse else frame.row("reused", "prefill_cached", reused, "tokens"),
        frame.row("written", "ttft_s", written if asked else None, f"{token}{frame.approximately}"),
    ]


def _reused(frame: Frame) -> Line:
    """Draw `reused 3,102 of 3,140 tokens`, without the unit where the numbers need its place."""
    figures, label = frame.figures, "reused"
    total = f"{figures.prefill_cached or 0:,} of {figures.prefill_total:,}"
    unit = " tokens" if len(label) + 1 + len(total) + 7 <= frame.width else ""
    value = f"{total:>{frame.width - len(label) - len(unit)}}"
    return [frame.text("label", label), frame.text("value", value), frame.text("label", unit)]


def reuse(frame: Frame) -> list[Line]:
    """Draw why not more of the prompt was reused, and from where what was reused came; nothing if that is not known."""
    if frame.figures.reuse is None:
        return []
    texts = filter(None, (*words.brief_reasons(frame.figures.reuse), words.restored(frame.figures.reuse)))
    shortest = (text if len(text) <= frame.width else re.sub("^(anew:|restored) ", "", text) for text in texts)
    return [[frame.text("label", fit(text, frame.width))] for text in shortest]


def context(frame: Frame) -> list[Line]:
    """Draw the tokens used and left in the context."""
    used, size = frame.figures.n_past, frame.figures.n_ctx
    if used and not size and frame.figures.server is not None:
        return [frame.row("context", "", f"{used:,}", "tokens")]
    if not size or used is None:
        return [frame.row("context", "n_past" if size else "n_ctx", None, "")]
    total = f"{used:,} of {size:,}"
    left = f"{max(0, size - used):,} left"
    return [
        [frame.text("label", "context"), frame.text("value", f"{total:>{max(len(total) + 1, frame.width - 7)}}")],
        frame.gauge(used / size, f"{left:>{len(f'{size:,} left')}}", warns=used >= WARNING_SHARE * size),
    ]


def memory(frame: Frame) -> list[Line]:
    """Draw the memory of the worker: private, and shared with the page cache (the mapped model file)."""
    if frame.memory is None:
        return []
    return [
        frame.row("private mem", "", *_size(frame.memory.private)),
        frame.row("shared mem", "", *_size(frame.memory.shared)),
    ]


def timeline(frame: Frame, rows: int) -> list[Line]:
    """Draw tok/s of the last minute, from zero to a round maximum."""
    history = frame.figures.history
    top, drawn = _curve(history, frame.width, rows)
    scale = f"0–{top:g}" if history else ""
    title = "tok/s, last 60 s"
    head = frame.text("label", f"{title}{scale:>{max(1, frame.width - len(title))}}")
    return [[head], *([frame.text("fill", row)] for row in drawn)]


@functools.lru_cache(maxsize=2)  # the history grows less often than it is shown
def _curve(history: tuple[float, ...], width: int, rows: int) -> tuple[float, list[str]]:
    """Return the end of the scale and the curve."""
    top = nice_max(max(history, default=0.0))
    return top, braille(over_time(history, _MINUTE, 2 * width), width, rows, top)


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
_BAR_FROM = 76  # cells: below, the line has no room for another bar
_CURVE = (2, 6)  # rows of the timeline, at least and at most


def _rows(section: Section, frame: Frame) -> list[Line]:
    rows = section(frame)
    return [row for row in rows if any(part.text.strip() for part in row)] if frame.settled else [*rows]


class TelemetryPanel(_Figures):
    """Shows the figures of the running or last answer, one section below the other; made for 28 columns and more.

    Sections that have nothing to say are left out, and so are rows without a figure unless an answer is being written:
    then they keep their place, so that nothing jumps. What does not fit is cut or left out, the least important first.
    """

    DEFAULT_CSS = f"TelemetryPanel {{ width: 32; {_CSS} }}"
    SECTIONS: ClassVar[tuple[Section, ...]] = (speed, timing, speech, drafting, roofline, serving, context, memory)
    FOR_THE_CURVE: ClassVar[tuple[tuple[Section, int], ...]] = ((memory, 0), (timing, 3))
    """Sections cut to their first rows, in this order, if the timeline fits then."""
    TO_FIT: ClassVar[tuple[tuple[Section, int], ...]] = (
        (memory, 0), (serving, 3), (speech, 4), (timing, 3), (drafting, 2), (roofline, 7), (context, 1), (roofline, 4),
        (speech, 2), (timing, 0), (speech, 0),
    )  # fmt: skip
    """Else sections cut to their first rows, in this order, until everything fits."""

    def on_mount(self) -> None:
        self.border_title = "Now"

    def compose_rows(self, frame: Frame, height: int) -> list[Line]:
        gap = int(frame.tall)
        least = _CURVE[0]
        drawn = {section: rows for section in self.SECTIONS if (rows := _rows(section, frame))}
        waits = len(waited(frame))  # rows of a server, before that of prefill

        def size(parts: dict[Section, list[Line]]) -> int:
            return sum(len(part) + gap for part in parts.values()) - gap

        def cut(cuts: tuple[tuple[Section, int], ...], most: int) -> dict[Section, list[Line]]:
            parts = dict(drawn)
            for section, kept in cuts:
                if size(parts) <= most:
                    break
                kept += waits if section is timing and kept else 0
                parts[section] = parts.get(section, [])[:kept]
                parts = {one: part for one, part in parts.items() if part}
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
        told = [*gap, *told] if (told := reuse(frame)) else []
        if frame.figures.phase == "decoding" and height >= needed > height - len(told):
            told = []
        rows = told[:height]
        room = height - len(rows) - len(gap) - 1
        if room >= least and (frame.figures.history or not frame.settled):
            rows += [*gap, *timeline(frame, min(most, room))]
        return rows


class TelemetryLine(_Figures):
    """Shows the figures in one line, the most important first."""

    DEFAULT_CSS = f"TelemetryLine {{ height: 1; {_CSS} }}"

    def compose_rows(self, frame: Frame, height: int) -> list[Line]:
        figures = frame.figures
        average = rate(figures.decode_tok_s)
        number, part = rate(figures.live_tok_s), "now"
        if number is None and figures.phase == "done":
            number, part, average = average, "value", None
        line = _state(frame.narrow(30))
        parts: list[Line] = []
        if number is not None or not frame.settled:
            parts = [] if figures.phase == "decoding" else [line]
            line = [
                frame.text(part if number else "missing", f"{number or 'n/a':>5}"),
                frame.text("label", f" tok/s{frame.approximately}"),
                *(speed_up(frame, part) if figures.drafting.speed_up is not None else []),
            ]
        if drafted := drafting_in_line(frame):
            parts.append(drafted)
        if spoken := speech_in_line(frame):
            parts.append(spoken)
        if read := bandwidth_in_line(frame, bar=frame.width >= _BAR_FROM):
            parts.append(read)
        if figures.ttft_s is not None:
            parts.append([frame.text("label", "first "), frame.text("value", " ".join(units.duration(figures.ttft_s)))])
        if figures.server is not None and (queue := figures.server.queue_s) is not None:
            parts.append([frame.text("label", "queue "), frame.text("value", " ".join(units.duration(queue)))])
        if figures.n_ctx and figures.n_past is not None:
            share = figures.n_past / figures.n_ctx
            used = f"ctx {units.context(figures.n_past, figures.n_ctx)}"
            parts.append(
                frame.narrow(len(used) + 13).gauge(share, f"{100 * share:3.0f} %", used, warns=share >= WARNING_SHARE)
            )
        if average is not None:
            unit = f" tok/s{frame.approximately}"
            parts.append([frame.text("label", "avg "), frame.text("value", average), frame.text("label", unit)])
        if (prefill := rate(figures.prefill_tok_s)) is not None:
            parts.append([frame.text("label", "prefill "), frame.text("value", prefill), frame.text("label", " tok/s")])
        if figures.predicted_n:
            unit = f" tokens{frame.approximately}"
            parts.append([frame.text("value", f"{figures.predicted_n:,}"), frame.text("label", unit)])
        if frame.memory is not None:
            parts.append([frame.text("label", "mem "), frame.text("value", " ".join(_size(frame.memory.private)))])
        room = frame.width - _cells(line)
        for part in parts:
            if (need := _cells(part) + 3) <= room:
                line += [frame.text("track", " · "), *part]
                room -= need
        return [line]


def _cells(line: Line) -> int:
    return sum(cell_len(segment.text) for segment in line)
