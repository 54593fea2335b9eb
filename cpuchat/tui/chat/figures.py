"""Draws the figures of an answer: in brief for the panel, and in one line for narrow screens.

All of them draw the same figures with the same words. What is not known is not there: its row stays empty.
"""

from __future__ import annotations

import functools
import textwrap
from dataclasses import dataclass

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style

from cpuchat.base.text import clean_line
from cpuchat.hardware.process import ProcessMemory
from cpuchat.measure.difference import of_answer
from cpuchat.present import answers as words
from cpuchat.telemetry import units
from cpuchat.telemetry.meter import ChatFigures
from cpuchat.tui.chat.status import WARNING_SHARE
from cpuchat.tui.widgets.charts import bar, big_digits, braille, nice_max, over_time

Line = list[Segment]
TALL = 13
"""Rows from which on the panel has large digits."""
SCALE = 1.1
"""End of the bandwidth bar as a multiple of the peak: more than the peak is an error that must be visible."""
PARTS = ("label", "value", "now", "fill", "track", "limit")


@dataclass(frozen=True)
class Frame:
    """What is drawn, in so many cells; `draft` is the draft model's name in short."""

    figures: ChatFigures
    memory: ProcessMemory | None
    width: int
    height: int
    styles: dict[str, Style]
    draft: str = ""

    @property
    def settled(self) -> bool:
        """Return whether no answer is running. During one, rows without a figure keep their place."""
        return self.figures.phase not in ("prefill", "decoding")

    @property
    def approximately(self) -> str:
        """Return the mark behind the unit of figures that are counted by the parts that a server sends."""
        return " ≈" if self.figures.approximate else ""

    def text(self, part: str, text: str) -> Segment:
        return Segment(text, self.styles[part])

    def item(self, before: str, number: str, after: str = "") -> Line:
        drawn = [self.text("label", before), self.text("value", number), self.text("label", after)]
        return [segment for segment in drawn if segment.text]

    def bar(self, fraction: float, width: int, *marks: float, warns: bool = False) -> Line:
        limits = ("peak", "fill") if warns else ("peak",)
        return [self.text("limit" if part in limits else part, text) for text, part in bar(fraction, width, *marks)]

    def gauge(self, fraction: float, label: str, *marks: float, warns: bool = False) -> Line:
        """Draw a bar before `label`, in the cells that it leaves."""
        drawn = self.bar(fraction, self.width - len(label) - 1, *marks, warns=warns)
        return [*drawn, self.text("value", f" {label}")]

    def sentence(self, text: str, max_lines: int, part: str = "label") -> list[Line]:
        rows = textwrap.wrap(clean_line(text), max(8, self.width), max_lines=max_lines, placeholder=" …")
        return [[self.text(part, row)] for row in rows]


def fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def percent(value: float) -> str:
    return f"{100 * value:.0f}"


def title(figures: ChatFigures) -> str:
    """Return of what the figures are: `Now · reading the prompt`, `Last answer · stopped`."""
    loads = "connecting" if figures.on_server else "loading"
    parts = ["Now", {"loading": loads, "prefill": "reading the prompt"}.get(figures.phase, "")]
    if figures.phase == "done":
        parts = ["Last answer", words.stop_reason(figures.stop_reason) if figures.stop_reason else "failed"]
    return " · ".join(filter(None, parts))


def rough(figures: ChatFigures) -> str:
    """Return the mark of figures that other programs or a wrong measurement blurred; "" for others."""
    disturbed = figures.drafting.counts.disturbed or figures.cores_share is not None
    return "rough speeds" if figures.roofline.rough or disturbed else ""


def _progress(figures: ChatFigures) -> float | None:
    if figures.phase == "prefill" and figures.prefill_total:
        return min(1.0, figures.prefill_processed / figures.prefill_total)
    return figures.load_fraction if figures.phase == "loading" else None


def _headline(frame: Frame) -> tuple[str, str, str]:
    """Return the number that matters now, its unit and its style; without one "", and the state in words."""
    figures = frame.figures
    if (share := _progress(figures)) is not None:
        return f"{words.percent_done(share)}%", "", "now"
    unit = f" tok/s{frame.approximately}"
    if figures.live_tok_s.value is not None:
        return units.rate(figures.live_tok_s.value), unit, "now"
    if figures.phase == "done" and figures.decode_tok_s.value is not None:
        return units.rate(figures.decode_tok_s.value), unit, "value"
    idle = "ready" if figures.n_ctx.value or figures.on_server else clean_line(figures.n_ctx.why)
    return "", idle if figures.phase == "idle" else "", "label"


def speed_up(frame: Frame, part: str) -> Line:
    """Draw ` 1.64×` in six cells, in the style of `part` (slower than plain: as a limit; where one answer does not tell
    which: as a label); nothing when unknown."""
    factor = frame.figures.drafting.speed_up.value
    if factor is None:
        return []
    style = {"faster": part, "slower": "limit"}.get(of_answer(factor).verdict, "label")
    return [frame.text(style, f"{units.factor(factor):>6}")]


_END = 19  # cell at which the large figure ends, whose four digits and comma take as many


def large(frame: Frame) -> list[Line]:
    """Draw the figure that matters now: in three rows of large digits, or in one row."""
    number, unit, part = _headline(frame)
    beside = speed_up(frame, part) if "tok/s" in unit else []
    if not number:
        state = [frame.text(part, f"{unit:^{frame.width}}" if frame.height > 1 else unit)]
        return [[], state, []] if frame.height >= TALL else [state]
    if frame.height < TALL:
        limit = frame.figures.roofline.ceiling_plain.value
        if frame.height == 1 and limit is not None and "tok/s" in unit and not beside:  # which drafts may pass
            unit = f" of {units.rate(limit)}{unit}"
        return [
            [frame.text(part, f"{number:>{5 if frame.height == 1 else _END - 6}}"), frame.text("label", unit), *beside]
        ]
    rows = [[frame.text(part, row.rjust(_END))] for row in big_digits(number)]
    rows[1] += beside
    rows[2].append(frame.text("label", unit))
    return rows


_SPANS = 30, 60, 120  # samples of Figures.history, two per second: the chart covers the shortest that holds them


def timeline(frame: Frame, rows: int) -> list[Line]:
    """Draw tok/s of the last minute, with the limit as a line: above it, or in it where drafts pass the limit. Without
    a limit it is drawn up to a round number."""
    history, limit = frame.figures.history, frame.figures.roofline.ceiling_plain.value
    most = max(history, default=0.0)
    if limit is None and not history:
        return [[]] * rows
    if limit is None:
        top = nice_max(most)
        head = frame.item(f"{'tok/s, last minute':<{frame.width - 8}}", "", f"{f'0–{top:g}':>8}")
        return [head, *([frame.text("fill", row)] for row in _curve(history, frame.width, rows - 1, top))]
    at = min(round((rows - 1) * (1 - limit / most)), rows - 2) if most > limit else 0
    label = f" {units.rate(limit)} limit"
    lines = [[frame.text("fill", row)] for row in _curve(history, frame.width, rows - 1, max(limit, most))]
    lines.insert(at, [frame.text("limit", f"{'╌' * (frame.width - len(label))}{label}")])
    return lines


@functools.lru_cache(maxsize=2)  # the history grows less often than it is shown
def _curve(history: tuple[float, ...], width: int, rows: int, top: float) -> list[str]:
    has_room = history and rows > 0
    span = next((one for one in _SPANS if len(history) <= one), _SPANS[-1])
    return braille(over_time(history, span, 2 * width), width, rows, top) if has_room else [""] * rows


def shape(frame: Frame, rows: int) -> list[Line]:
    """Draw the timeline; in its place, while something is read, its progress, rate and time left."""
    figures = frame.figures
    if (share := _progress(figures)) is None:
        return timeline(frame, rows)
    lines = [_read(frame), frame.bar(share, frame.width), _pace(frame)]
    return [*lines, *([[]] * rows)][:rows]


def _read(frame: Frame) -> Line:
    figures = frame.figures
    if figures.phase == "loading":
        return []
    return frame.item("", f"{figures.prefill_processed:,}", f" of {figures.prefill_total:,} tokens")


def _pace(frame: Frame) -> Line:
    figures = frame.figures
    rate, left = figures.prefill_tok_s.value, figures.prefill_left_s
    line = [] if rate is None or figures.phase == "loading" else frame.item("", units.rate(rate), " tok/s")
    ahead = "" if left is None else f"{' · ' if line else ''}{units.time_left(left)}"
    return [*line, frame.text("label", ahead)] if ahead else line


_LABEL, _FIGURE, _TAIL = 9, 5, 6
_BAR = 4  # cells of a bar on a line of many figures


def _labelled(frame: Frame, label: str, figure: str, after: str = "") -> Line:
    if frame.height == 1:
        return frame.item(f"{label} ", figure, after)
    return frame.item(f"{label:<{_LABEL}}", f"{figure:>{_FIGURE + figure.endswith(' ')}}", after)


def _bar_row(
    frame: Frame, label: str, figure: str, share: float, tail: str = "", *marks: float, warns: bool = False
) -> Line:
    """Draw `bandwidth  86 % █████▏╎─ 0.5B`; the bar has the room of a missing `tail`."""
    room = _BAR if frame.height == 1 else frame.width - _LABEL - _FIGURE - 1 - (_TAIL + 1 if tail else 0)
    line = [*_labelled(frame, label, f"{figure} "), *frame.bar(share, room, *marks, warns=warns)]
    return [*line, frame.text("label", f" {fit(tail, _TAIL)}")] if tail else line


def _first(frame: Frame) -> Line:
    """Draw the time to the first token; before it, how much of the prompt was reused."""
    figures = frame.figures
    if figures.ttft_s.value is not None:
        number, unit = units.duration(figures.ttft_s.value)
        return frame.item("first token ", number.rjust(0 if frame.height == 1 else 6), f" {unit}")
    reused = figures.prefill_cached.value
    if figures.phase != "prefill" or not reused:
        return []
    return frame.item("reused ", f"{reused:,}".rjust(0 if frame.height == 1 else 11), " tokens")


def _drafts(frame: Frame) -> Line:
    """Draw the acceptance of drafts and who drafts, or that the draft model that is loaded is off."""
    now, figures = frame.figures.drafting, frame.figures
    if not figures.on_server and figures.phase in ("decoding", "done") and (now.off or not now.wanted):
        return _labelled(frame, "drafts", "off") if frame.draft and now.is_off else []
    share = now.acceptance.value
    if share is None:
        return []
    ranked = sorted(now.counts.by_drafter, key=lambda one: one.draft_n_accepted)
    name = ranked[-1].name if ranked else now.counts.drafter
    name = frame.draft if name == "draft" and frame.draft else name
    tail = "server" if now.counts.source else "" if frame.height == 1 else name
    return _bar_row(frame, "drafts", f"{percent(share)} %", share, tail)


def _memory(frame: Frame) -> Line:
    """Draw the bandwidth in use against the measured peak, with a mark at that."""
    now = frame.figures.roofline
    share = now.utilization.value
    if now.fits_cache and now.bandwidth.value is not None:
        return _labelled(frame, "weights", "in L3")
    if share is None:
        return []
    return _bar_row(frame, "bandwidth", f"{percent(share)} %", share / SCALE, "", 1 / SCALE)


def _context(frame: Frame) -> Line:
    used, size = frame.figures.n_past.value, frame.figures.n_ctx.value
    if not size or used is None:
        return _labelled(frame, "context", f"{used:,}", " tokens") if used else []
    share, (number, of) = used / size, units.context(used, size).split("/")
    return _bar_row(frame, "context", number, share, of, warns=share >= WARNING_SHARE)


def _cores(frame: Frame) -> Line:
    """Draw which share of the cores the model got while other programs had the rest: why it is slow."""
    share = frame.figures.cores_share
    return [] if share is None else _labelled(frame, "cores", f"{percent(share)} %", " yours")


def _answer(frame: Frame) -> Line:
    """Draw the average of an answer that is being written, beside its speed now; of one that is done, its tokens."""
    rate, n_written = frame.figures.decode_tok_s.value, frame.figures.predicted_n
    if frame.settled:
        return _labelled(frame, "written", f"{n_written:,}", " tokens") if n_written else []
    return [] if rate is None else _labelled(frame, "answer", units.rate(rate), " tok/s")


_SPACED = 30  # rows from which on an empty one follows each figure


def brief(frame: Frame) -> list[Line]:
    """Draw the figure that matters now, its timeline, which takes what is left, and up to six more figures, each in its
    place in every phase."""
    gap: list[Line] = [[]] if frame.height >= _SPACED else []
    below = [_answer(frame), _first(frame), _memory(frame), _context(frame), _drafts(frame), _cores(frame)]
    below = [line for row in below for line in (row, *gap)]
    tall, head = frame.height >= TALL, large(frame)
    n_rows = max(frame.height - len(head) - len(below) - 1, 3) if tall else 3
    return [*head, *shape(frame, n_rows), *([[]] if tall else []), *below]


_LARGE, _WIDE = 5, 96  # rows of the largest digits, and columns that three figures in them take


def presented(frame: Frame) -> list[Line]:
    """Draw speed, acceptance and use of the memory for a room: in large digits, each in its third."""
    figures, now = frame.figures, frame.figures.roofline
    number, unit, part = _headline(frame)
    first = figures.ttft_s.value if figures.phase == "done" and not number else None  # one token has no rate
    if first is not None:
        number, unit = units.duration(first)
        unit += " to first token"
    accepted = None if figures.drafting.off else figures.drafting.acceptance.value
    columns = [(number, unit.strip() or title(figures).removeprefix("Now · "), part)]
    for share, label in ((accepted, "of drafts accepted"), (now.utilization.value, "of memory bandwidth")):
        columns.append(("", "", part) if share is None else (f"{percent(share)}%", label, "value"))
    if now.fits_cache and now.bandwidth.value is not None:
        columns[2] = "", "weights fit in L3", part
    if first is not None:
        columns[1] = f"{figures.predicted_n:,}", units.plural(figures.predicted_n, "token").partition(" ")[2], "value"
    width, is_large = frame.width // len(columns), frame.height > _LARGE and frame.width >= _WIDE
    drawn = [big_digits(number, is_large) for number, *_ in columns]
    lines = [
        [frame.text(part, row.ljust(width)) for row, (*_, part) in zip(rows, columns, strict=True)]
        for rows in zip(*drawn, strict=True)
    ]
    return [*lines, [frame.text("value", label.ljust(width)) for _, label, _ in columns]]


def one_line(frame: Frame) -> Line:
    """Draw the brief figures in one line, as many as have room."""
    _, unit, _ = _headline(frame)
    if (share := _progress(frame.figures)) is not None:
        head = _read(frame) or frame.item("loading", "")
        tail = _pace(frame) or frame.item("", f"{words.percent_done(share)} %")
        space, room = frame.item(" ", ""), frame.width - _cells(head) - _cells(tail) - 2
        line = [*head, *space, *frame.bar(share, min(16, max(0, room))), *space, *tail]
    else:
        line = large(frame)[0] if unit else [frame.text("label", title(frame.figures))]
    rows = _cores(frame), _memory(frame), _drafts(frame), _first(frame), _context(frame)
    for row in filter(None, (*rows, frame.item(rough(frame.figures), ""))):
        if _cells(line) + 3 + _cells(row) <= frame.width:
            line += [frame.text("track", " · "), *row]
    return line


def _cells(line: Line) -> int:
    return sum(cell_len(segment.text) for segment in line)
