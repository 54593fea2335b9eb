"""Draws bandwidth and ceilings: sections of the panel, and a part of the one-line display."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from cpuchat.base.text import clean_line
from cpuchat.telemetry import units
from cpuchat.tui.chat.frame import LABEL, NUMBER, Frame, Line, fit, rate
from cpuchat.tui.widgets.charts import LEVELS

if TYPE_CHECKING:
    from cpuchat.telemetry.roofline import Roofline

SCALE = 1.1
"""End of the bar as a multiple of the peak: more than the peak is an error that must be visible."""
REMARK_ROWS = 2
BAR = 8
_LIMITS = {
    "memory": "memory-bound",
    "compute": "compute-bound",
    "overhead": "overhead-bound",
}
_CACHED = "fits in L3: not memory-bound"
_WIDTH = 28  # of the rows that have no unit in a fixed place


def roofline(frame: Frame) -> list[Line]:
    """Draw seven rows: bandwidth, its bar against the peak, its source and the bottleneck (or what is wrong with the
    figure), and the ceilings in tok/s; one more for the L3 groups and one for power, if known.
    """
    if frame.figures.server is not None:  # its memory is not this machine's
        return []
    now = frame.figures.roofline
    if now.has_model and not now.has_traffic and now.bandwidth is None:  # of a llama-server on this machine
        return [_power(frame, now)] if now.watts is not None else []
    rows: list[Line] = [_figure(frame, now), _bar(frame, now), *_remarks(frame, now)]
    if now.l3_groups:
        rows.append(_per_l3(frame, now))
    rows += _ceilings(frame, now)
    if now.watts is not None:
        rows.append(_power(frame, now))
    return rows


def bandwidth_in_line(frame: Frame, bar: bool = True) -> Line:
    """Draw `44/51 GB/s ████──╎ 86 % ≈` for one line; nothing before the first token."""
    now = frame.figures.roofline
    if now.bandwidth is None:
        return []
    used = units.bandwidth(now.bandwidth)
    if now.peak is None or now.utilization is None:
        return [frame.text("value", f"{used:>3}"), frame.text("label", f" GB/s {_mark(now)}")]
    peak = units.bandwidth(now.peak.bytes_per_s)
    line = [frame.text("value", f"{used:>{len(peak)}}"), frame.text("label", f"/{peak} GB/s ")]
    share = f"{100 * now.utilization:3.0f} %"
    if bar:
        drawn = frame.narrow(BAR + len(share) + 1).gauge(now.utilization / SCALE, share, peak=1 / SCALE)
    else:
        drawn = [frame.text("value", share)]
    return [*line, *drawn, frame.text("limit" if now.off else "label", f" {'peak too low' if now.off else _mark(now)}")]


def _mark(now: Roofline) -> str:
    return "≈" if now.counted is None else now.source


def _figure(frame: Frame, now: Roofline) -> Line:
    head = frame.text("label", f"{'bandwidth':<{LABEL}}")
    if now.bandwidth is None:
        return _missing(frame, now, "bandwidth", "bandwidth")
    used = units.bandwidth(now.bandwidth)
    if now.peak is None or now.fits_cache:
        return frame.row("bandwidth", "", used, "GB/s")
    rest = f" of {units.bandwidth(now.peak.bytes_per_s)} GB/s"
    return [head, frame.text("value", f"{used:>{max(4, _WIDTH - LABEL - len(rest))}}"), frame.text("label", rest)]


def _missing(frame: Frame, now: Roofline, label: str, field: str) -> Line:
    """Draw `label` with "n/a", and the reason where no other row gives it."""
    why = now.why_missing(field) if field == "bandwidth" else ""
    head = frame.text("label", f"{label:<{LABEL}}")
    if why in ("", "no answer yet", "no model loaded"):
        if frame.settled:
            return []
        return [head, frame.text("missing", f"{'n/a':>{NUMBER}}")]
    return [head, frame.text("missing", fit(why, frame.width - LABEL))]


def _bar(frame: Frame, now: Roofline) -> Line:
    if now.utilization is None:
        why = _CACHED if now.fits_cache else now.why_missing("utilization")
        known = now.has_model and why != "no answer yet"
        if frame.settled and not known:
            return []
        return [frame.text("missing", fit(why, frame.width))] if known else frame.gauge(0, "  n/a", peak=1 / SCALE)
    return frame.gauge(now.utilization / SCALE, f"{100 * now.utilization:3.0f} %", peak=1 / SCALE)


def _remarks(frame: Frame, now: Roofline) -> list[Line]:
    """Draw the source of the figure and the bottleneck, or what is wrong with it; a long remark takes both rows."""
    if now.bandwidth is None:
        return [[]] * REMARK_ROWS
    of = "" if now.peak is None or now.fits_cache else f", of {now.peak.source.split(',')[0]} peak"
    shown = "estimated" if now.counted is None else f"{clean_line(now.source)}{of}"
    source = [frame.text("label", fit(shown, frame.width))]
    if wrong := now.off or now.remark:
        rows = textwrap.wrap(wrong, max(8, frame.width), max_lines=REMARK_ROWS, placeholder=" …")
        drawn: list[Line] = [[frame.text("limit", row)] for row in rows]
        return drawn if len(drawn) == REMARK_ROWS else [source, *drawn]
    words = now.advice or _LIMITS.get(now.limit, "")
    return [source, [frame.text("value" if now.advice else "label", fit(words, frame.width))]]


def _ceilings(frame: Frame, now: Roofline) -> list[Line]:
    """Draw the ceilings without drafts, at this acceptance, and of compute; memory sets none where the model fits in
    L3.
    """
    if now.fits_cache:
        return [_ceiling(frame, now, "limit by compute", "ceiling_compute")]
    return [
        _ceiling(frame, now, "limit w/o drafts", "ceiling_plain"),
        _ceiling(frame, now, "limit with drafts", "ceiling_accepted"),
        _ceiling(frame, now, "limit by compute", "ceiling_compute"),
    ]


def _ceiling(frame: Frame, now: Roofline, label: str, field: str) -> Line:
    number = rate(getattr(now, field))
    if number is None:
        return _missing(frame, now, label, field)
    width = LABEL + NUMBER + 2  # the labels are long
    head = frame.text("label", label)
    return [head, frame.text("value", f"{number:>{width - len(label)}}"), frame.text("label", " tok/s")]


def _per_l3(frame: Frame, now: Roofline) -> Line:
    """Draw one bar per L3 group, from zero to the largest."""
    if now.counted is None or not now.counted.per_l3:
        return [frame.text("label", "L3 "), frame.text("missing", "n/a")]
    values = now.counted.per_l3
    most = max(values)
    label = f" ≤ {units.bandwidth(most)} GB/s"
    shown = values[: max(1, frame.width - 3 - len(label))]
    levels = [LEVELS[min(len(LEVELS) - 1, int(v / most * len(LEVELS)))] if most > 0 else " " for v in shown]
    return [frame.text("label", "L3 "), frame.text("fill", "".join(levels)), frame.text("label", label)]


def _power(frame: Frame, now: Roofline) -> Line:
    each = "" if now.joules_per_token is None else f"{units.rate(now.joules_per_token):>6} J/tok"
    return [
        frame.text("label", f"{'power':<{LABEL - 4}}"),
        frame.text("value", f"{now.watts:>5,.0f}"),
        frame.text("label", " W "),
        frame.text("value", each),
    ]
