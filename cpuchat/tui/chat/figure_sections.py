"""The sections of all figures, with their sources and denominators.

A figure has its place on the panel as a `PanelRow` of a section in `SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cpuchat.base.text import clean_line
from cpuchat.present import answers as words
from cpuchat.present.drafts_off import off_words
from cpuchat.protocol.reasons import DraftsOff
from cpuchat.telemetry import units
from cpuchat.telemetry.meter import ChatFigures
from cpuchat.telemetry.metric import NO_ANSWER, NO_MODEL, Metric
from cpuchat.telemetry.roofline import NO_ESTIMATE, Roofline
from cpuchat.telemetry.speculation import DraftingFigures
from cpuchat.tui.chat.figures import SCALE, TALL, Frame, Line, fit, large, percent, shape
from cpuchat.tui.chat.status import WARNING_SHARE
from cpuchat.tui.widgets.charts import LEVELS

_LABEL, _NUMBER = 12, 8
"""Cells of a label, and of the number behind it."""
_SPACED = 38
"""Rows from which on there are empty rows between the sections."""


@dataclass(frozen=True)
class PanelRow:
    """The place of a figure on the panel.

    `figure` returns the figure, `words` its value as number and unit. The number ends at cell `end`. `counted`: from
    tokens, which a server may not report; then ≈ stands behind the unit.
    """

    label: str
    figure: Callable[[ChatFigures], Metric[Any]]
    words: Callable[[Any], tuple[str, str]]
    end: int = _LABEL + _NUMBER
    counted: bool = False


def _row(frame: Frame, row: PanelRow) -> Line:
    value = row.figure(frame.figures).value
    if value is None:
        return []
    number, unit = row.words(value)
    return _labelled(frame, row.label, number, f"{unit}{frame.approximately if row.counted else ''}", row.end)


def _labelled(frame: Frame, label: str, number: str, unit: str, end: int = _LABEL + _NUMBER) -> Line:
    label = f"{label:<{_LABEL}}"
    return frame.item(label, f"{number:>{end - len(label)}}", f" {unit}".rstrip())


def _tok_s(value: float) -> tuple[str, str]:
    return units.rate(value), "tok/s"


def _reused(frame: Frame) -> list[Line]:
    """Draw `reused 3,102 of 3,140 tokens`."""
    figures = frame.figures
    if figures.phase in ("idle", "loading") or figures.prefill_cached.value is None:
        return [[]]
    if not figures.reuse:
        return [_labelled(frame, "reused", f"{figures.prefill_cached.value:,}", "tokens")]
    both = f"{figures.prefill_cached.value:,} of {figures.prefill_total:,}"
    return [frame.item("reused", f"{both:>{frame.width - 13}}", " tokens")]


TIMING = (
    PanelRow("average", lambda now: now.decode_tok_s, _tok_s, counted=True),
    PanelRow("first token", lambda now: now.ttft_s, units.duration),
    PanelRow("prefill", lambda now: now.prefill_tok_s, _tok_s),
    _reused,
    PanelRow(
        "written",
        lambda now: Metric.of(now.predicted_n or None, NO_ANSWER),
        lambda count: (f"{count:,}", "token" if count == 1 else "tokens"),
        counted=True,
    ),
)
"""Averages and counts of this answer."""


_DRAFTING_ROWS, _SENTENCE_ROWS = 7, 3
_BY_POSITION = "by position"
_PER_PASS = PanelRow("per pass", lambda now: now.drafting.tokens_per_pass, lambda value: (f"{value:.1f}", "tokens"))
_PLAIN = PanelRow("plain", lambda now: now.drafting.plain_tok_s, _tok_s)
_DRAFT_SHARE = PanelRow("drafting", lambda now: now.drafting.draft_share, lambda value: (percent(value), "% time"))


def drafting(frame: Frame) -> list[Line]:
    """Draw seven rows, the most important first; one when no drafters are chosen. While drafting is off, the last three
    say why; if nothing was drafted, a single sentence.
    """
    now, on_server = frame.figures.drafting, frame.figures.on_server
    if not now.wanted:
        return [frame.item(f"{'drafts':<{_LABEL}}", "", "off (F9 or F2)")]
    if now.acceptance.value is None and now.off:
        return [] if on_server else _off(frame, now.off, _DRAFTING_ROWS)
    head = [_acceptance(frame, now), _row(frame, _PER_PASS)]
    if on_server or now.counts.source == "server":  # it counts, and tells no times of its own
        source = [] if not now.counts.source else [frame.item(f"{'source':<{_LABEL}}", "server")]
        return [*head, *source, _by_position(frame, now)]
    rest = [_depth(frame, now), _by_position(frame, now), _by_drafter(frame, now)]
    rest = _off(frame, now.off, _SENTENCE_ROWS) if now.off else rest
    return [*head, _row(frame, _PLAIN), _row(frame, _DRAFT_SHARE), *rest]


def _off(frame: Frame, off: DraftsOff, height: int) -> list[Line]:
    rows = frame.sentence(f"drafts off: {off_words(off)}", height)
    return rows + [[] for _ in range(height - len(rows))]


def _acceptance(frame: Frame, now: DraftingFigures) -> Line:
    if now.acceptance_now.value is None or now.acceptance.value is None:
        return []
    line = frame.item("acceptance", f"{percent(now.acceptance_now.value):>5}", " %")
    return [*line, *frame.item("  avg", f"{percent(now.acceptance.value):>4}", " %")]


def _by_position(frame: Frame, now: DraftingFigures) -> Line:
    if not now.counts.by_position:
        return []
    room = frame.width - len(_BY_POSITION) - 1
    shares = [right / drafted if drafted else None for drafted, right in now.counts.by_position[:room]]
    levels = "".join(" " if one is None else LEVELS[min(len(LEVELS) - 1, int(one * len(LEVELS)))] for one in shares)
    return [frame.text("fill", f"{levels:<{room}} "), frame.text("label", _BY_POSITION)]


def _by_drafter(frame: Frame, now: DraftingFigures) -> Line:
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


def _depth(frame: Frame, now: DraftingFigures) -> Line:
    if now.depth is None:
        return []
    label = f"{'adaptive depth' if now.adaptive else 'fixed depth':<{_LABEL + 2}}"
    return _labelled(frame, label, str(now.depth), "token" if now.depth == 1 else "tokens")


_REMARK_ROWS = 2
_LIMITED = {"memory": "memory-bound", "compute": "compute-bound", "overhead": "overhead-bound"}


_LIMIT_END = 26  # the labels are long
LIMITS = (
    PanelRow("limit without drafts", lambda now: now.roofline.ceiling_plain, _tok_s, _LIMIT_END),
    PanelRow("limit with drafts", lambda now: now.roofline.ceiling_accepted, _tok_s, _LIMIT_END),
    PanelRow("limit by compute", lambda now: now.roofline.ceiling_compute, _tok_s, _LIMIT_END),
)


def roofline(frame: Frame) -> list[Line]:
    """Draw seven rows: bandwidth, its bar against the peak, its source and the bottleneck (or what is wrong with the
    figure), and the limits in tok/s; one more for power, if known. Memory limits nothing where the model fits in L3.
    """
    if frame.figures.on_server:  # its memory is not this machine's
        return []
    now = frame.figures.roofline
    power = [_power(frame, now.watts.value, now.joules_per_token.value)] if now.watts.value is not None else []
    if now.bandwidth.why == NO_ESTIMATE:  # of a llama-server on this machine
        return power
    limits = LIMITS[-1:] if now.fits_cache else LIMITS
    return [
        _bandwidth(frame, now),
        _bandwidth_bar(frame, now),
        *_remarks(frame, now),
        *(_row(frame, row) for row in limits),
        *power,
    ]


def _bandwidth(frame: Frame, now: Roofline) -> Line:
    if now.bandwidth.value is None:
        return []
    used = units.bandwidth(now.bandwidth.value)
    if now.peak.value is None or now.fits_cache:
        return _labelled(frame, "bandwidth", used, "GB/s")
    rest = f" of {units.bandwidth(now.peak.value.bytes_per_s)} GB/s"
    return frame.item(f"{'bandwidth':<{_LABEL}}", f"{used:>{max(4, 16 - len(rest))}}", rest)


def _bandwidth_bar(frame: Frame, now: Roofline) -> Line:
    share, why = now.utilization.value, now.utilization.why
    if share is not None:
        return frame.gauge(share / SCALE, f"{100 * share:3.0f} %", 1 / SCALE)
    if why in (NO_ANSWER, NO_MODEL):
        return []
    return [frame.text("label", fit("fits in L3: not memory-bound" if now.fits_cache else why, frame.width))]


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
    return [source, [frame.text("label", fit(_LIMITED.get(now.limit, ""), frame.width))]]


def _power(frame: Frame, watts: float, joules: float | None) -> Line:
    each = "" if joules is None else f"{units.rate(joules):>6} J/tok"
    return [*frame.item(f"{'power':<{_LABEL - 4}}", f"{watts:>5,.0f}", " W "), frame.text("value", each)]


_HINTED = {"prefill_tok_s": "prefill", "prefill_cached": "reused", "acceptance": "acceptance"}
"""Figures that a server does not report unless it is started with an option."""


def serving(frame: Frame) -> list[Line]:
    """Draw how to switch on what a server does not report. Nothing for a model on this machine."""
    rows: list[Line] = []
    hints: dict[str, list[str]] = {}
    for figure, reason in frame.figures.unreported.items():
        if figure in _HINTED and "start " in reason:
            hints.setdefault(reason, []).append(_HINTED[figure])
    for reason, names in hints.items():
        rows += frame.sentence(f"For {', '.join(names)}: {reason}", 5)
    return rows


def context(frame: Frame) -> list[Line]:
    used, size = frame.figures.n_past.value, frame.figures.n_ctx.value
    if not size or used is None:
        return [_labelled(frame, "context", f"{used:,}", "tokens")] if used else []
    total, left = f"{used:,} of {size:,}", f"{max(0, size - used):,} left"
    return [
        frame.item("context", f"{total:>{max(len(total) + 1, frame.width - 7)}}"),
        frame.gauge(used / size, f"{left:>{len(f'{size:,} left')}}", warns=used >= WARNING_SHARE * size),
    ]


def memory(frame: Frame) -> list[Line]:
    """Draw the memory of the worker: private, and shared with the page cache (the mapped model file)."""
    if frame.memory is None:
        return []
    rows = ("private mem", frame.memory.private), ("shared mem", frame.memory.shared)
    return [frame.item(f"{label:<{_LABEL}}", f"{units.size(n_bytes):>{_NUMBER}}") for label, n_bytes in rows]


def reuse(frame: Frame) -> list[Line]:
    """Draw why not more of the prompt was reused, and from where what was reused came; nothing if that is not known."""
    if frame.figures.reuse is None:
        return []
    texts = filter(None, (*words.brief_reasons(frame.figures.reuse), words.restored(frame.figures.reuse)))
    shortest = (text if len(text) <= frame.width else text.removeprefix("restored ") for text in texts)
    return [[frame.text("label", fit(text, frame.width))] for text in shortest]


Section = Sequence[PanelRow | Callable[[Frame], Sequence[Line]]]
SECTIONS: dict[str, Section] = {
    "timing": TIMING,
    "drafting": (drafting,),
    "roofline": (roofline,),
    "context": (context,),
    "serving": (serving,),
    "memory": (memory,),
    "reuse": (reuse,),
}
"""The sections of the panel, from top to bottom."""


def draw(section: Section, frame: Frame) -> list[Line]:
    """Draw a section, once the figures are settled without its empty rows."""
    rows: list[Line] = []
    for part in section:
        if not isinstance(part, PanelRow):
            rows += part(frame)
        else:
            rows.append(_row(frame, part))
    return [row for row in rows if any(part.text.strip() for part in row)] if frame.settled else rows


def all_figures(frame: Frame) -> list[Line]:
    """Draw the figure that matters now, its timeline, and every figure that is known; more rows than fit, perhaps."""
    gap: list[Line] = [[]] if frame.height >= _SPACED else []
    rows = [*large(frame), *(shape(frame, 4 if gap else 3) if frame.height >= TALL else [])]
    for section in SECTIONS.values():
        if drawn := draw(section, frame):
            rows += [*gap, *drawn]
    return rows
