"""The sections of the figures panel: what each draws of the current figures.

A figure has its place on the panel as a `Row` of a section in `SECTIONS`.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.segment import Segment
from rich.style import Style
from textual.renderables.digits import Digits

from cpuchat.base.text import clean_line
from cpuchat.present import answers as words
from cpuchat.present.chats import cores, real_time_factor
from cpuchat.protocol.timings import SERVER_WIDE
from cpuchat.telemetry import units
from cpuchat.telemetry.machine import ProcessMemory
from cpuchat.telemetry.meter import AT_THE_END, Figures
from cpuchat.telemetry.metric import NO_ANSWER, NO_MODEL, Metric
from cpuchat.telemetry.roofline import NO_ESTIMATE, Roofline
from cpuchat.telemetry.speculation import Drafting
from cpuchat.telemetry.speech import Speech
from cpuchat.tui.chat.status import WARNING_SHARE
from cpuchat.tui.widgets.charts import LEVELS, bar, braille, nice_max, over_time

Line = list[Segment]
_LABEL, _NUMBER = 12, 8
"""Cells of a label, and of the number behind it."""


@dataclass(frozen=True)
class Row:
    """The place of a figure on the panel.

    `figure` returns the figure, or None where there is no such figure; `words` its value as number and unit. The number
    ends at cell `end`. `counted`: from tokens, which a server may not report; then ≈ stands behind the unit. `stays`:
    a row without a value is shown although no answer is running.
    """

    label: str
    figure: Callable[[Figures], Metric[Any] | None]
    words: Callable[[Any], tuple[str, str]]
    end: int = _LABEL + _NUMBER
    counted: bool = False
    stays: Callable[[Figures], bool] = lambda _: False


@dataclass(frozen=True)
class Frame:
    """What a section draws with: figures, `width` in cells; `tall` when there is room for large digits."""

    figures: Figures
    memory: ProcessMemory | None
    width: int
    tall: bool
    styles: dict[str, Style]

    @property
    def settled(self) -> bool:
        """Return whether no answer is running: then rows without a figure are left out. During an answer they keep
        their place.
        """
        return self.figures.phase not in ("prefill", "decoding")

    @property
    def approximately(self) -> str:
        """Return the mark behind the unit of figures that are counted by the parts that a server sends."""
        return " ≈" if self.figures.approximate else ""

    def text(self, part: str, text: str) -> Segment:
        return Segment(text, self.styles[part])

    def narrow(self, width: int) -> Frame:
        return replace(self, width=width)

    def item(self, before: str, number: str, after: str = "") -> Line:
        """Draw a value between two texts."""
        drawn = [self.text("label", before), self.text("value", number), self.text("label", after)]
        return [segment for segment in drawn if segment.text]

    def row(self, row: Row) -> Line | None:
        """Draw the row of a figure; None where there is no such figure."""
        figure = row.figure(self.figures)
        if figure is None:
            return None
        if figure.value is None:
            return self.absent(row.label, figure.why, row.end, row.stays(self.figures))
        number, unit = row.words(figure.value)
        return self.labelled(row.label, number, f"{unit}{self.approximately if row.counted else ''}", row.end)

    def labelled(self, label: str, number: str, unit: str, end: int = _LABEL + _NUMBER) -> Line:
        """Draw label, number and unit in fixed columns."""
        label = f"{label:<{_LABEL}}"
        return self.item(label, f"{number:>{end - len(label)}}", f" {unit}".rstrip())

    def absent(self, label: str, why: str, end: int = _LABEL + _NUMBER, stays: bool = False) -> Line:
        """Draw "n/a" and the reason, where it has room and is not that of most other rows.

        Empty once the figures are settled, unless the row `stays`.
        """
        if self.settled and not stays:
            return []
        label, why = f"{label:<{_LABEL}}", clean_line(why)
        drafting = self.figures.drafting
        common = (NO_ANSWER, NO_MODEL, self.figures.live_tok_s.why, drafting.acceptance_now.why)
        reasons = [] if why in common else [f"n/a · {why}", why]
        room = self.width - len(label)
        text = next((reason for reason in reasons if len(reason) <= room), f"{'n/a':>{end - len(label)}}")
        return [self.text("label", label), self.text("missing", text)]

    def gauge(
        self, fraction: float, label: str, head: str = "", peak: float | None = None, warns: bool = False
    ) -> Line:
        """Draw a bar between `head` and `label`, in the cells that they leave; `warns`: in the color of limits."""
        room = self.width - len(label) - 1 - (len(head) + 1 if head else 0)
        limits = ("peak", "fill") if warns else ("peak",)
        parts = [self.text("limit" if part in limits else part, text) for text, part in bar(fraction, room, peak)]
        return [*([self.text("label", head + " ")] if head else []), *parts, self.text("value", f" {label}")]

    def sentence(self, text: str, most: int, part: str = "label") -> list[Line]:
        """Draw a sentence over as many rows as it needs, at most so many."""
        rows = textwrap.wrap(clean_line(text), max(8, self.width), max_lines=most, placeholder=" …")
        return [[self.text(part, row)] for row in rows]


def fit(text: str, width: int) -> str:
    """Return `text`, cut to `width` characters."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _tok_s(value: float) -> tuple[str, str]:
    return units.rate(value), "tok/s"


def percent(value: float) -> str:
    return f"{100 * value:.0f}"


def byte_words(count: int) -> tuple[str, str]:
    """Return bytes as number and unit, decimal: ("312", "MB"), ("1.61", "GB")."""
    return (f"{count / 1e6:.0f}", "MB") if count < 999_500_000 else (f"{count / 1e9:.2f}", "GB")


def _levels(shares: Sequence[float | None]) -> str:
    """Draw one character for each share of 0-1; None: a blank."""
    return "".join(" " if one is None else LEVELS[min(len(LEVELS) - 1, int(one * len(LEVELS)))] for one in shares)


def _asked(now: Figures, figure: Metric[Any]) -> Metric[Any]:
    """Return a figure that has a value before it means anything, missing until an answer was asked for."""
    return figure if now.phase not in ("idle", "loading") else Metric(None, NO_ANSWER)


def state(frame: Frame) -> Line:
    """Draw the phase, with a progress bar where there is one."""
    figures = frame.figures
    if figures.phase == "loading" and figures.load_fraction is not None:
        return frame.gauge(figures.load_fraction, f"{int(100 * figures.load_fraction):3d} %", "loading")
    if figures.phase == "prefill" and figures.prefill_total:
        done, total = figures.prefill_processed, figures.prefill_total
        return frame.gauge(done / total, f"{done:>{len(str(total))}}/{total}", "prefill")
    text = "queued" if figures.ahead else str(figures.phase)
    if figures.phase == "done":
        reason = figures.stop_reason
        text = " · ".join(filter(None, (text, words.stop_reason(reason)))) if reason else "failed"
    elif figures.phase == "idle":
        text = "ready" if figures.n_ctx.value else clean_line(figures.n_ctx.why)
    return [frame.text("label", fit(text, frame.width))]


def shown_speed(frame: Frame) -> tuple[str, str]:
    """Return the live tok/s and its style, once the answer is done its average; "" without one."""
    figures = frame.figures
    if figures.live_tok_s.value is not None:
        return units.rate(figures.live_tok_s.value), "now"
    if figures.phase == "done" and figures.decode_tok_s.value is not None:
        return units.rate(figures.decode_tok_s.value), "value"
    return "", "missing"


def speed(frame: Frame) -> list[Line]:
    """Draw live tok/s in large digits and the phase; the average once the answer is done."""
    number, part = shown_speed(frame)
    if not number and frame.settled:
        return [state(frame)]
    if not frame.tall and not number:
        return [frame.absent("tok/s", frame.figures.live_tok_s.why), state(frame)]
    if not frame.tall:
        mark = [frame.text("label", "≈")] if frame.figures.approximate else []
        head = [frame.text("label", f"{'tok/s':<{_LABEL}}"), frame.text(part, f"{number:>{_NUMBER}}")]
        return [[*head, *speed_up(frame, part), *mark], state(frame)]
    left = max(0, _LABEL + _NUMBER - Digits.get_width(number or "-"))
    segments = Digits(number or "-", "bold").render(Style(bold=True))
    drawn = [segment.text for segment in segments if isinstance(segment, Segment) and segment.text != "\n"]
    rows = [[frame.text(part, " " * left + text)] for text in drawn]
    if number:
        rows[1] += speed_up(frame, part)
    rows[2].append(frame.text("label", f" tok/s{frame.approximately}"))
    return [*rows, state(frame)]


def speed_up(frame: Frame, part: str) -> Line:
    """Draw ` 1.64×` in six cells, in the style of `part` (slower than plain: as a limit); blank when unknown."""
    factor = frame.figures.drafting.speed_up.value
    if factor is None:
        return [frame.text("label", " " * 6)]
    return [frame.text(part if factor >= 1 else "limit", f"{units.factor(factor):>6}")]


def _waited(label: str, name: str) -> Row:
    """Return the row of a part of the time to the first token at a server."""

    def figure(now: Figures) -> Metric[float] | None:
        return None if now.server is None else getattr(now.server, name)

    def stays(now: Figures) -> bool:
        return now.server is not None and getattr(now.server, name).why != AT_THE_END

    return Row(label, figure, units.duration, stays=stays)


def _reused(frame: Frame) -> list[Line]:
    """Draw `reused 3,102 of 3,140 tokens`, without the unit where the numbers need its place."""
    figures, label = frame.figures, "reused"
    if figures.phase in ("idle", "loading") or not figures.reuse:
        cached = _asked(figures, figures.prefill_cached)
        if cached.value is None:
            return [frame.absent(label, cached.why)]
        return [frame.labelled(label, f"{cached.value:,}", "tokens")]
    total = f"{figures.prefill_cached.value or 0:,} of {figures.prefill_total:,}"
    unit = " tokens" if len(label) + 1 + len(total) + 7 <= frame.width else ""
    return [frame.item(label, f"{total:>{frame.width - len(label) - len(unit)}}", unit)]


WAITED = (_waited("  network", "network_s"), _waited("  queue", "queue_s"))
TIMING = (
    Row("average", lambda now: now.decode_tok_s, _tok_s, counted=True),
    Row("first token", lambda now: now.ttft_s, units.duration),
    *WAITED,
    Row("prefill", lambda now: now.prefill_tok_s, _tok_s),
    _reused,
    Row(
        "written",
        lambda now: _asked(now, Metric(now.predicted_n)),
        lambda count: (f"{count:,}", "token" if count == 1 else "tokens"),
        counted=True,
    ),
)
"""Averages and counts of this answer."""


def _spoken(label: str, value: Callable[[Speech], Any], how: Callable[[Any], tuple[str, str]]) -> Row:
    """Return the row of a figure of reading aloud."""
    return Row(label, lambda now: Metric.of(value(now.speech), NO_ANSWER), how, stays=lambda now: now.speech.reading)


SPEECH = (
    _spoken("first audio", lambda now: now.first_audio_s, units.duration),
    _spoken("after token", lambda now: now.after_token_s, units.duration),
    _spoken("RTF", lambda now: now.real_time_factor, lambda value: (real_time_factor(value), "")),
    _spoken("audio queued", lambda now: now.queued_s if now.reading else None, lambda value: (f"{value:.1f}", "s")),
)


def speech(frame: Frame) -> list[Line]:
    """Draw six rows, the most important first; none while nothing was read."""
    now = frame.figures.speech
    if not now.engine or not (now.reading or now.sound_s):
        return []
    rows = [frame.row(row) or [] for row in SPEECH]
    rows.append(frame.item(f"{'speech on':<{_LABEL}} ", fit(cores(now), frame.width - _LABEL - 1)))
    if now.decode_tok_s is not None and now.plain_tok_s is not None:
        rows.append(
            frame.labelled("with speech", f"{units.rate(now.decode_tok_s)} of {units.rate(now.plain_tok_s)}", "tok/s")
        )
    return rows


_DRAFTING_ROWS, _SENTENCE_ROWS = 7, 3
_BY_POSITION = "by position"
_PER_PASS = Row("per pass", lambda now: now.drafting.tokens_per_pass, lambda value: (f"{value:.1f}", "tokens"))
_PLAIN = Row("plain", lambda now: now.drafting.plain_tok_s, _tok_s)
_DRAFT_SHARE = Row("drafting", lambda now: now.drafting.draft_share, lambda value: (percent(value), "% time"))


def drafting(frame: Frame) -> list[Line]:
    """Draw seven rows, the most important first; one when no drafters are chosen. While drafting is off, the last three
    say why; if nothing was drafted, a single sentence.
    """
    now, on_server = frame.figures.drafting, frame.figures.server is not None
    per_pass = frame.row(_PER_PASS) or []
    if not now.wanted:
        return [[frame.text("label", f"{'drafting':<{_LABEL}}"), frame.text("missing", "off (F9 or F2)")]]
    if on_server and now.acceptance.value is None:
        why = now.reason or (now.acceptance.why if frame.settled and now.acceptance.why != NO_ANSWER else "")
        if why or frame.settled:
            return frame.sentence(f"acceptance n/a: {why}", 4) if why else []
    if now.reason and now.acceptance.value is None:
        return _off(frame, now.reason, _DRAFTING_ROWS)
    if on_server or now.counts.source == "server":  # it counts, and tells no times of its own
        source = frame.text("label", f"{'source':<{_LABEL}}{now.counts.source}")
        named = [] if now.counts.source == SERVER_WIDE else [[source] if now.counts.source else []]
        return [_acceptance(frame, now), per_pass, *named, _by_position(frame, now)]
    rest = [_depth(frame, now), _by_position(frame, now), _by_drafter(frame, now)]
    return [
        _acceptance(frame, now),
        per_pass,
        frame.row(_PLAIN) or [],
        frame.row(_DRAFT_SHARE) or [],
        *(_off(frame, now.reason, _SENTENCE_ROWS) if now.reason else rest),
    ]


def _off(frame: Frame, reason: str, height: int) -> list[Line]:
    """Draw why drafting is off, over `height` rows."""
    rows = frame.sentence(f"drafts off: {reason.removeprefix('off: ')}", height)
    return rows + [[] for _ in range(height - len(rows))]


def _acceptance(frame: Frame, now: Drafting) -> Line:
    if now.acceptance_now.value is None or now.acceptance.value is None:
        return frame.absent("acceptance", now.acceptance_now.why)
    if now.counts.source == SERVER_WIDE:  # what it drafted for others is in it
        return frame.item("acceptance", f"{percent(now.acceptance.value):>4}", f" % {SERVER_WIDE}")
    line = frame.item("acceptance", f"{percent(now.acceptance_now.value):>5}", " %")
    if now.reason and not frame.tall:  # the rows that say why may be left out
        return [*line, frame.text("label", " drafts off")]
    return [*line, *frame.item("  avg", f"{percent(now.acceptance.value):>4}", " %")]


def _by_position(frame: Frame, now: Drafting) -> Line:
    """Draw the acceptance of the first, second, ... drafted token, from zero to all."""
    if not now.counts.by_position:
        return []
    room = frame.width - len(_BY_POSITION) - 1
    levels = _levels([right / drafted if drafted else None for drafted, right in now.counts.by_position[:room]])
    return [frame.text("fill", f"{levels:<{room}} "), frame.text("label", _BY_POSITION)]


def _by_drafter(frame: Frame, now: Drafting) -> Line:
    """Draw the share of accepted tokens by drafter: the two largest, the active one in bold."""
    counts, drafter = now.counts.by_drafter, now.counts.drafter
    total = sum(count.draft_n_accepted for count in counts)
    if not total:
        return [frame.text("label", f"by {drafter}")] if drafter else []
    ranked = sorted(counts, key=lambda count: -count.draft_n_accepted)[:2]
    line = [frame.text("label", "by")]
    active = "now" if frame.figures.phase == "decoding" else "value"
    for number, count in enumerate(count for count in ranked if count.draft_n_accepted):
        line += [
            frame.text("label", ", " if number else " "),
            frame.text(active if count.name == drafter else "label", count.name),
            *frame.item("", f" {percent(count.draft_n_accepted / total):>2}", " %"),
        ]
    return line


def _depth(frame: Frame, now: Drafting) -> Line:
    label = "adaptive depth" if now.adaptive else "fixed depth"
    if now.depth is None:
        return frame.absent(f"{label:<{_LABEL + 2}}", NO_ANSWER)
    return frame.labelled(f"{label:<{_LABEL + 2}}", str(now.depth), "token" if now.depth == 1 else "tokens")


SCALE = 1.1
"""End of the bandwidth bar as a multiple of the peak: more than the peak is an error that must be visible."""
_REMARK_ROWS = 2
_LIMITS = {"memory": "memory-bound", "compute": "compute-bound", "overhead": "overhead-bound"}
_CACHED = "fits in L3: not memory-bound"
_WIDTH = 28  # of the rows that have no unit in a fixed place


def _limit_words(value: float) -> tuple[str, str]:
    """Format a limit in at most four characters, which is the room behind the label: `285`, `1.4k`, `16k`."""
    thousands = f"{value / 1e3:.1f}k" if value < 9_950 else f"{value / 1e3:.0f}k"
    return units.rate(value) if value < 999.5 else thousands, "tok/s"


_LIMIT_END = _LABEL + _NUMBER + 2  # the labels are long
_BY_COMPUTE = Row("limit by compute", lambda now: now.roofline.ceiling_compute, _limit_words, _LIMIT_END)
LIMITS = (
    Row("limit w/o drafts", lambda now: now.roofline.ceiling_plain, _limit_words, _LIMIT_END),
    Row("limit with drafts", lambda now: now.roofline.ceiling_accepted, _limit_words, _LIMIT_END),
    _BY_COMPUTE,
)


def roofline(frame: Frame) -> list[Line]:
    """Draw seven rows: bandwidth, its bar against the peak, its source and the bottleneck (or what is wrong with the
    figure), and the limits in tok/s; one more for the L3 groups and one for power, if known. Memory limits nothing
    where the model fits in L3.
    """
    if frame.figures.server is not None:  # its memory is not this machine's
        return []
    now = frame.figures.roofline
    power = [_power(frame, now.watts.value, now.joules_per_token.value)] if now.watts.value is not None else []
    if now.bandwidth.why == NO_ESTIMATE:  # of a llama-server on this machine
        return power
    limits = (_BY_COMPUTE,) if now.fits_cache else LIMITS
    return [
        _bandwidth(frame, now),
        _bandwidth_bar(frame, now),
        *_remarks(frame, now),
        *([_per_l3(frame, now)] if now.l3_groups else []),
        *(frame.row(row) or [] for row in limits),
        *power,
    ]


def _bandwidth(frame: Frame, now: Roofline) -> Line:
    if now.bandwidth.value is None:
        return frame.absent("bandwidth", now.bandwidth.why)
    used = units.bandwidth(now.bandwidth.value)
    if now.peak.value is None or now.fits_cache:
        return frame.labelled("bandwidth", used, "GB/s")
    rest = f" of {units.bandwidth(now.peak.value.bytes_per_s)} GB/s"
    return frame.item(f"{'bandwidth':<{_LABEL}}", f"{used:>{max(4, _WIDTH - _LABEL - len(rest))}}", rest)


def _bandwidth_bar(frame: Frame, now: Roofline) -> Line:
    share, why = now.utilization.value, now.utilization.why
    if share is not None:
        return frame.gauge(share / SCALE, f"{100 * share:3.0f} %", peak=1 / SCALE)
    if why in (NO_ANSWER, NO_MODEL):
        return [] if frame.settled else frame.gauge(0, "  n/a", peak=1 / SCALE)
    return [frame.text("missing", fit(_CACHED if now.fits_cache else why, frame.width))]


def _remarks(frame: Frame, now: Roofline) -> list[Line]:
    """Draw the source of the figure and the bottleneck, or what is wrong with it; a long remark takes both rows."""
    if now.bandwidth.value is None:
        return [[]] * _REMARK_ROWS
    of = "" if now.peak.value is None or now.fits_cache else f", of {now.peak.value.source.split(',')[0]} peak"
    shown = "estimated" if now.counted.value is None else f"{clean_line(now.source)}{of}"
    source = [frame.text("label", fit(shown, frame.width))]
    if wrong := now.off or now.remark:
        drawn = frame.sentence(wrong, _REMARK_ROWS, "limit")
        return drawn if len(drawn) == _REMARK_ROWS else [source, *drawn]
    text = now.advice or _LIMITS.get(now.limit, "")
    return [source, [frame.text("value" if now.advice else "label", fit(text, frame.width))]]


def _per_l3(frame: Frame, now: Roofline) -> Line:
    """Draw one bar per L3 group, from zero to the largest."""
    if now.counted.value is None or not now.counted.value.per_l3:
        return [frame.text("label", "L3 "), frame.text("missing", "n/a")]
    values = now.counted.value.per_l3
    most = max(values)
    label = f" ≤ {units.bandwidth(most)} GB/s"
    shown = values[: max(1, frame.width - 3 - len(label))]
    levels = _levels([value / most if most > 0 else None for value in shown])
    return [frame.text("label", "L3 "), frame.text("fill", levels), frame.text("label", label)]


def _power(frame: Frame, watts: float, joules: float | None) -> Line:
    each = "" if joules is None else f"{units.rate(joules):>6} J/tok"
    return [*frame.item(f"{'power':<{_LABEL - 4}}", f"{watts:>5,.0f}", " W "), frame.text("value", each)]


_HINTED = {
    "prefill_tok_s": "prefill", "prefill_cached": "reused", "queue_s": "queue", "running": "requests",
    "own_acceptance": "own acceptance",
}  # fmt: skip
"""Figures whose place in the panel is too narrow for how to switch them on; acceptance has rows of its own."""


def serving(frame: Frame) -> list[Line]:
    """Draw, while it answers, the requests that the server is at and those that wait and the share of its KV cache in
    use (all of them server-wide), and how to switch on what it does not report. Nothing for a model on this machine.
    """
    server = frame.figures.server
    if server is None:
        return []
    rows: list[Line] = []
    if server.load is not None and not frame.settled:
        load = server.load
        rows += [frame.labelled("running", f"{load.running:,}", "")] if load.running is not None else []
        rows += [frame.labelled("queued", f"{load.waiting:,}", "")] if load.waiting is not None else []
        rows += [frame.labelled("KV in use", percent(load.kv_used), "%")] if load.kv_used is not None else []
    hints: dict[str, list[str]] = {}
    for figure, reason in server.unreported:
        if figure == "own_acceptance" and frame.figures.drafting.counts.source != SERVER_WIDE:
            continue  # not known yet, or that of this answer
        if figure in _HINTED and "start " in reason:
            hints.setdefault(reason, []).append(_HINTED[figure])
    for reason, names in hints.items():
        rows += frame.sentence(f"{', '.join(names)} n/a: {reason}", 5)
    return rows


def context(frame: Frame) -> list[Line]:
    """Draw the tokens used and left in the context."""
    used, size = frame.figures.n_past.value, frame.figures.n_ctx.value
    if used and not size and frame.figures.server is not None:
        return [frame.labelled("context", f"{used:,}", "tokens")]
    if not size or used is None:
        return [frame.absent("context", (frame.figures.n_past if size else frame.figures.n_ctx).why)]
    total = f"{used:,} of {size:,}"
    left = f"{max(0, size - used):,} left"
    return [
        frame.item("context", f"{total:>{max(len(total) + 1, frame.width - 7)}}"),
        frame.gauge(used / size, f"{left:>{len(f'{size:,} left')}}", warns=used >= WARNING_SHARE * size),
    ]


def memory(frame: Frame) -> list[Line]:
    """Draw the memory of the worker: private, and shared with the page cache (the mapped model file)."""
    if frame.memory is None:
        return []
    return [
        frame.labelled("private mem", *byte_words(frame.memory.private)),
        frame.labelled("shared mem", *byte_words(frame.memory.shared)),
    ]


def reuse(frame: Frame) -> list[Line]:
    """Draw why not more of the prompt was reused, and from where what was reused came; nothing if that is not known."""
    if frame.figures.reuse is None:
        return []
    texts = filter(None, (*words.brief_reasons(frame.figures.reuse), words.restored(frame.figures.reuse)))
    shortest = (text if len(text) <= frame.width else re.sub("^(anew:|restored) ", "", text) for text in texts)
    return [[frame.text("label", fit(text, frame.width))] for text in shortest]


_MINUTE = 120  # samples of Figures.history, two per second


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


Section = Sequence[Row | Callable[[Frame], Sequence[Line]]]


def draw(section: Section, frame: Frame) -> list[Line]:
    """Draw a section; once the figures are settled without its empty rows."""
    rows: list[Line] = []
    for part in section:
        if not isinstance(part, Row):
            rows += part(frame)
        elif (row := frame.row(part)) is not None:
            rows.append(row)
    return [row for row in rows if any(part.text.strip() for part in row)] if frame.settled else rows


SECTIONS: dict[str, Section] = {
    "speed": (speed,),
    "timing": TIMING,
    "speech": (speech,),
    "drafting": (drafting,),
    "roofline": (roofline,),
    "serving": (serving,),
    "context": (context,),
    "memory": (memory,),
}
"""The sections of the panel, from top to bottom."""
