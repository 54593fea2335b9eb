"""The sections of all figures, with their sources and denominators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from cpuchat.base.text import clean_line
from cpuchat.present import answers as words
from cpuchat.present.drafts_off import off_words
from cpuchat.protocol.reasons import DraftsOff
from cpuchat.telemetry import units
from cpuchat.telemetry.meter import DraftingFigures
from cpuchat.telemetry.metric import NO_ANSWER, NO_MODEL, Metric
from cpuchat.telemetry.roofline import NO_ESTIMATE, NO_LIMIT, NO_PEAK, Roofline
from cpuchat.tui.chat.figures import SCALE, Frame, Line, fit, large, percent, shape
from cpuchat.tui.chat.status import WARNING_SHARE
from cpuchat.tui.widgets.charts import LEVELS

_LABEL, _END = 12, 20
"""Cells of a label, and the one at which the number behind it ends."""
_SPACED = 38
"""Rows from which on there are empty rows between the sections."""
_DRAFTING_ROWS, _SENTENCE_ROWS, _SHAPE_ROWS = 7, 3, 3
_BY_POSITION = "by position"
_REMARK_ROWS = 2
_HINTED = {"prefill_tok_s": "prefill", "prefill_cached": "reused", "acceptance": "acceptance"}
"""Figures that a server does not report unless it is started with an option."""
T = TypeVar("T")


def _row(frame: Frame, label: str, number: str, unit: str) -> Line:
    label = f"{label:<{_LABEL}}"
    return frame.item(label, f"{number:>{_END - len(label)}}", f" {unit}".rstrip())


def _figure(frame: Frame, label: str, figure: Metric[T], words: Callable[[T], tuple[str, str]]) -> Line:
    """Draw a figure; `words` returns its number and unit. The row stays empty while it is not known."""
    return [] if figure.value is None else _row(frame, label, *words(figure.value))


def _tok_s(value: float) -> tuple[str, str]:
    return units.rate(value), "tok/s"


def timing(frame: Frame) -> list[Line]:
    """Draw averages and counts of this answer."""
    now, written = frame.figures, Metric.of(frame.figures.predicted_n or None, NO_ANSWER)
    about = frame.approximately  # of what is counted from tokens, which a server may not report
    if now.phase in ("idle", "loading") or now.prefill_cached.value is None:
        reused: Line = []
    elif now.reuse:
        both = f"{now.prefill_cached.value:,} of {now.prefill_total:,}"
        reused = frame.item("reused", f"{both:>{frame.width - 13}}", " tokens")
    else:
        reused = _row(frame, "reused", f"{now.prefill_cached.value:,}", "tokens")
    return [
        _figure(frame, "answer", now.decode_tok_s, lambda value: (units.rate(value), f"tok/s{about}")),
        _figure(frame, "first token", now.ttft_s, units.duration),
        *([_row(frame, "queued", *units.duration(now.queued_s))] if now.queued_s is not None else []),
        _figure(frame, "prefill", now.prefill_tok_s, _tok_s),
        reused,
        _figure(frame, "written", written, lambda count: (f"{count:,}", f"token{'s' * (count != 1)}{about}")),
        _figure(frame, "cores", Metric.of(now.cores_share, NO_ANSWER), lambda share: (percent(share), "% yours")),
    ]


def drafting(frame: Frame) -> list[Line]:
    """Draw seven rows, the most important first; one when no drafters are chosen. While drafting is off, the last three
    say why; if nothing was drafted, a single sentence."""
    now, on_server = frame.figures.drafting, frame.figures.on_server
    if not now.wanted:
        return [frame.item(f"{'drafts':<{_LABEL}}", "", "off (F9 or F2)")]
    if now.acceptance.value is None and now.off:
        return [] if on_server else _off(frame, now.off, _DRAFTING_ROWS)
    accepted = _figure(frame, "acceptance", now.acceptance, lambda share: (percent(share), "%"))
    head = [accepted, _figure(frame, "per pass", now.tokens_per_pass, lambda value: (f"{value:.1f}", "tokens"))]
    if on_server or now.counts.source == "server":  # it counts, and tells no times of its own
        source = [] if not now.counts.source else [frame.item(f"{'source':<{_LABEL}}", "server")]
        return [*head, *source, _by_position(frame, now)]
    head.append(_figure(frame, "plain", now.plain_tok_s, _tok_s))
    head.append(_figure(frame, "drafting", now.draft_share, lambda value: (percent(value), "% time")))
    if now.off:
        return [*head, *_off(frame, now.off, _SENTENCE_ROWS)]
    drafted = Metric.of(now.counts.draft_n / now.counts.passes if now.counts.passes else None, NO_ANSWER)
    depth = _figure(frame, "drafted", drafted, lambda value: (f"{value:.1f}", "a pass"))
    return [*head, depth, _by_position(frame, now), _by_drafter(frame, now)]


def _off(frame: Frame, off: DraftsOff, height: int) -> list[Line]:
    rows = frame.sentence(f"drafts off: {off_words(off)}", height)
    return rows + [[] for _ in range(height - len(rows))]


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


def roofline(frame: Frame) -> list[Line]:
    """Draw five rows: bandwidth, its bar against the peak, its source and the bottleneck (or what is wrong with the
    figure), and the limit in tok/s; one more for power, if known. Memory limits nothing where the model fits in L3."""
    if frame.figures.on_server:  # its memory is not this machine's
        return []
    now, power = frame.figures.roofline, list[Line]()
    if now.watts.value is not None:
        joules = now.joules_per_token.value
        each = "" if joules is None else f"{units.rate(joules):>6} J/tok"
        watts = frame.item(f"{'power':<{_LABEL - 4}}", f"{now.watts.value:>5,.0f}", " W ")
        power = [[*watts, frame.text("value", each)]]
    if now.bandwidth.why == NO_ESTIMATE:  # of a llama-server on this machine
        return power
    limit = [] if now.fits_cache else [_figure(frame, "limit", now.ceiling_plain, _tok_s)]
    share, why, drawn = now.utilization.value, now.utilization.why, list[Line]([[], []])
    if now.bandwidth.value is not None:
        used = units.bandwidth(now.bandwidth.value)
        if now.peak.value is None or now.fits_cache:
            drawn[0] = _row(frame, "bandwidth", used, "GB/s")
        else:
            rest = f" of {'≈' * now.peak.value.estimated}{units.bandwidth(now.peak.value.bytes_per_s)} GB/s"
            drawn[0] = frame.item(f"{'bandwidth':<{_LABEL}}", f"{used:>{max(4, 16 - len(rest))}}", rest)
    if share is not None:
        drawn[1] = frame.gauge(share / SCALE, f"{100 * share:3.0f} %", 1 / SCALE)
    elif why not in (NO_ANSWER, NO_MODEL):
        here = {NO_PEAK: "peak not measured: F12, m", NO_LIMIT: "fits in L3: not memory-bound"}
        drawn[1] = [frame.text("label", fit(here.get(why, why), frame.width))]
    return [*drawn, *_remarks(frame, now), *limit, *power]


def _remarks(frame: Frame, now: Roofline) -> list[Line]:
    """Draw the source of the figure and the bottleneck, or what is wrong with it; a long remark takes both rows."""
    if now.bandwidth.value is None:
        return [[]] * _REMARK_ROWS
    of = "" if now.peak.value is None or now.fits_cache else f", of {now.peak.value.source.split()[0].rstrip(',')} peak"
    shown = "estimated" if now.counted.value is None else f"{clean_line(now.source)}{of}"
    source = [frame.text("label", fit(shown, frame.width))]
    if wrong := now.off or now.remark:
        drawn = frame.sentence(wrong, _REMARK_ROWS, "limit")
        return drawn if len(drawn) == _REMARK_ROWS else [source, *drawn]
    is_estimated = now.peak.value is not None and now.peak.value.estimated
    limit = "peak estimated: F12, m" if is_estimated and not now.fits_cache else "memory-bound" if now.limit else ""
    return [source, [frame.text("label", fit(limit, frame.width))]]


def serving(frame: Frame) -> list[Line]:
    """Draw how to switch on what a server does not report. Nothing for a model on this machine."""
    hints: dict[str, list[str]] = {}
    for figure, reason in frame.figures.unreported.items():
        if figure in _HINTED and "start " in reason:
            hints.setdefault(reason, []).append(_HINTED[figure])
    return [row for reason, names in hints.items() for row in frame.sentence(f"For {', '.join(names)}: {reason}", 5)]


def context(frame: Frame) -> list[Line]:
    used, size = frame.figures.n_past.value, frame.figures.n_ctx.value
    if not size or used is None:
        return [_row(frame, "context", f"{used:,}", "tokens")] if used else []
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
    return [frame.item(f"{label:<{_LABEL}}", f"{units.size(n_bytes):>{_END - _LABEL}}") for label, n_bytes in rows]


def reuse(frame: Frame) -> list[Line]:
    """Draw why not more of the prompt was reused, and from where what was reused came; nothing if that is not known."""
    if frame.figures.reuse is None:
        return []
    texts = filter(None, (*words.brief_reasons(frame.figures.reuse), words.restored(frame.figures.reuse)))
    shortest = (text if len(text) <= frame.width else text.removeprefix("restored ") for text in texts)
    return [[frame.text("label", fit(text, frame.width))] for text in shortest]


SECTIONS: tuple[Callable[[Frame], Sequence[Line]], ...] = (
    timing, roofline, context, memory, drafting, serving, reuse,
)  # fmt: skip
"""The sections of the panel, from top to bottom; a low terminal cuts off the last ones."""


def all_figures(frame: Frame) -> list[Line]:
    """Draw the figure that matters now, its timeline if there is room, and every known figure; perhaps too much.
    Once the figures are settled, empty rows are left out."""
    gap: list[Line] = [[]] if frame.height >= _SPACED else []
    head, rows = large(frame), list[Line]()
    for section in SECTIONS:
        drawn = [row for row in section(frame) if not frame.settled or any(part.text.strip() for part in row)]
        if drawn:
            rows += [*gap, *drawn]
    n_rows = frame.height - len(head) - len(rows)
    return [*head, *(shape(frame, n_rows) if n_rows >= _SHAPE_ROWS else []), *rows]
