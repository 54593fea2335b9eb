"""Benchmarks as SVG: a bar for each cell, with the spread of its rounds and what memory bandwidth allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from cpuchat.bench.results import Report, Result
from cpuchat.present.bench import common, setting_words, varying
from cpuchat.telemetry import units
from cpuchat.text import clean_line

_INK, _FAINT, _GRID, _PAPER, _BAR, _DRAFTED, _ROOF = (
    "#1f2328", "#59636e", "#d8dee4", "#ffffff", "#0b5cad", "#1a7f37", "#a8480b",
)  # fmt: skip
_FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
_LABEL, _WIDTH, _VALUE, _MARGIN = 330, 460, 90, 20
_ROW, _THICK, _HEAD = 26, 14, 44
_TICKS = 5


@dataclass(frozen=True, slots=True)
class _Bar:
    label: str
    value: float
    low: float
    high: float
    drafted: bool = False
    roof: float | None = None


def plots(report: Report) -> str:
    """Return the SVG file: decode and prefill rates."""
    names = varying(report.results)
    done = [one for one in report.results if not one.failure]
    decode = [_decode_bar(one, names) for one in done if one.decode_ts is not None]
    prefill = [
        _Bar(_label(one, names), one.prefill_ts, min(one.prefill_samples_ts), max(one.prefill_samples_ts))
        for one in done
        if one.prefill_ts is not None
    ]
    y, parts = float(_MARGIN), [_text(_MARGIN, _MARGIN + 12, common(report), size=11, fill=_FAINT)]
    y += 2 * _MARGIN
    for title, bars in (("Decode, tok/s", decode), ("Prefill, tok/s", prefill)):
        if bars:
            parts += _section(title, bars, y)
            y += _HEAD + len(bars) * _ROW + 2 * _MARGIN
    if any(bar.roof for bar in decode):
        parts.append(_text(_MARGIN, y, "┃ what the measured read bandwidth allows", size=11, fill=_ROOF))
        y += _MARGIN
    parts.append(_text(_MARGIN, y, f"{report.environment.machine} · {report.environment.date}", size=11, fill=_FAINT))
    width, height = _LABEL + _WIDTH + _VALUE + 2 * _MARGIN, y + _MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" '
        f'height="{height:.0f}" font-family="{_FONT}" font-size="12">'
    )
    paper = f'<rect width="{width}" height="{height:.0f}" fill="{_PAPER}"/>'
    return "\n".join([head, "<title>cpuchat bench</title>", paper, *parts, "</svg>", ""])


def _decode_bar(one: Result, names: set[str]) -> _Bar:
    assert one.decode_ts is not None
    roof = one.decode_ts / one.utilization if one.utilization else None
    drafted = one.tokens_per_pass is not None
    return _Bar(_label(one, names), one.decode_ts, min(one.samples_ts), max(one.samples_ts), drafted, roof)


def _label(one: Result, names: set[str]) -> str:
    setup = one.cell.setup
    parts = [
        Path(one.model_filename).stem if "model" in names else "",
        setting_words(setup, names),
        one.drafters if one.cell.test.kind == "prompts" else "",
        one.test,
    ]
    return " · ".join(filter(None, parts))


def _section(title: str, bars: Sequence[_Bar], y: float) -> list[str]:
    step, n_ticks = _scale(max(max(bar.high, bar.roof or 0.0) for bar in bars))
    top = step * n_ticks
    left, bottom = _MARGIN + _LABEL, y + _HEAD + len(bars) * _ROW
    parts = [_text(_MARGIN, y + 16, title, size=15, bold=True)]
    for tick in range(n_ticks + 1):
        x = left + _WIDTH * tick / n_ticks
        parts.append(_line(x, y + _HEAD - 6, x, bottom, _GRID))
        parts.append(_text(x, y + _HEAD - 10, f"{step * tick:,g}", size=10, fill=_FAINT, anchor="middle"))
    for number, bar in enumerate(bars):
        parts += _drawn(bar, left, y + _HEAD + number * _ROW, _WIDTH / top)
    return parts


def _scale(most: float) -> tuple[float, int]:
    """Return a round step and how many of them hold `most`."""
    rough = max(most, 1e-9) / _TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 2.5, 5, 10) if power * n >= rough)
    return step, max(1, math.ceil(most / step))


def _drawn(bar: _Bar, left: float, y: float, scale: float) -> list[str]:
    middle, fill = y + _ROW / 2, _DRAFTED if bar.drafted else _BAR
    low, high, end = left + bar.low * scale, left + bar.high * scale, left + bar.value * scale
    parts = [
        _text(left - 8, middle + 4, bar.label, anchor="end"),
        f'<rect x="{left}" y="{middle - _THICK / 2:.1f}" width="{bar.value * scale:.1f}" height="{_THICK}" '
        f'fill="{fill}" fill-opacity="0.75"/>',
        _line(low, middle, high, middle, _INK),
        *(_line(x, middle - 4, x, middle + 4, _INK) for x in (low, high)),
    ]
    right = max(end, high)
    if bar.roof is not None:
        x = left + bar.roof * scale
        parts.append(_line(x, y + 3, x, y + _ROW - 3, _ROOF, width=3))
        right = max(right, x)
    return [*parts, _text(right + 8, middle + 4, units.rate(bar.value), bold=True)]


def _line(x: float, y: float, to_x: float, to_y: float, colour: str, width: float = 1) -> str:
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" stroke="{colour}" stroke-width="{width}"/>'


def _text(
    x: float, y: float, text: str, *, size: int = 12, fill: str = _INK, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"{weight}>'
        f"{escape(clean_line(text))}</text>"
    )
