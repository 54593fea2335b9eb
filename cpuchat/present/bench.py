"""Benchmarks in words and as SVG: the table of results, where they were measured, what changed between two; a bar for
each cell, with the spread of its rounds and what memory bandwidth allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import msgspec

from cpuchat.base.text import clean_line
from cpuchat.bench.matrix import OFF, Setup
from cpuchat.bench.results import Diff, Environment, Report, Result
from cpuchat.bench.run import PairResult
from cpuchat.present.drafts_off import off_words
from cpuchat.present.table import markdown_table, table
from cpuchat.telemetry import units
from cpuchat.telemetry.answer import percent

HEADINGS = (
    "model", "settings", "drafters", "test", "first token", "prefill tok/s", "decode tok/s", "speed-up", "accepted",
    "tokens/pass", "memory", "GB/s", "utilization", "J/token", "",
)  # fmt: skip
RIGHT = tuple(range(4, len(HEADINGS) - 1))
_SETTINGS = {
    "threads": lambda setup: f"threads {setup.threads or 'auto'}",
    "cores": lambda setup: f"cores {setup.cores}",
    "memory": lambda setup: f"memory {setup.memory}",
    "cache_type_k": lambda setup: f"K {setup.cache_type_k}",
    "cache_type_v": lambda setup: f"V {setup.cache_type_v}",
    "flash_attn": lambda setup: f"FA {setup.flash_attn}",
    "ubatch": lambda setup: f"micro-batch {setup.ubatch}" if setup.ubatch else "",
    "draft": lambda setup: f"draft {Path(setup.draft).stem}" if setup.draft else "",
}
_BAR = 20


def rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return a row for each cell; cells that are the same everywhere are empty (see `common`)."""
    names = varying(results)
    return [_row(one, names) for one in results]


def varying(results: Sequence[Result]) -> set[str]:
    """Return the names of what differs between the setups."""
    setups = [msgspec.structs.asdict(one.cell.setup) for one in results]
    return {name for name in ("model", *_SETTINGS) if len({setup[name] for setup in setups}) > 1}


def setting_words(setup: Setup, names: set[str]) -> str:
    """Return those settings in words."""
    return ", ".join(filter(None, (words(setup) for name, words in _SETTINGS.items() if name in names)))


def _row(result: Result, names: set[str]) -> tuple[str, ...]:
    return (
        *_cell_names(result, names),
        result.test,
        " ".join(units.duration(result.ttft_ms / 1e3)) if result.ttft_ms is not None else "",
        _rate(result.prefill_ts, result.prefill_samples_ts),
        _rate(result.decode_ts, result.samples_ts if result.decode_ts is not None else ()),
        units.factor(result.speed_up) if result.speed_up is not None else "",
        f"{100 * result.acceptance:.0f} %" if result.acceptance is not None else "",
        f"{result.tokens_per_pass:.2f}" if result.tokens_per_pass is not None else "",
        units.size(result.memory_bytes) if result.memory_bytes is not None else "",
        units.bandwidth(result.bandwidth) if result.bandwidth is not None else "",
        f"{100 * result.utilization:.0f} %" if result.utilization is not None else "",
        f"{result.joules_per_token:.2f}" if result.joules_per_token is not None else "",
        _remark(result),
    )


def _cell_names(result: Result, names: set[str]) -> tuple[str, str, str]:
    """Return model, settings and drafters of a cell; "" for those that all cells share."""
    model = Path(result.model_filename).stem if "model" in names else ""
    return model, setting_words(result.cell.setup, names), result.drafters if result.cell.test.kind == "prompts" else ""


def _rate(value: float | None, samples: Sequence[float]) -> str:
    """Return a median with half of the range of its rounds: `41.3 ± 0.4`."""
    if value is None or len(samples) < 2:
        return "" if value is None else units.rate(value)
    half = (max(samples) - min(samples)) / 2
    digits = len(units.rate(value).partition(".")[2])
    return f"{units.rate(value)} ± {half:,.{digits}f}"


def _remark(result: Result) -> str:
    remarks = [
        "failed" if result.failure else "",
        "noisy" if result.noisy else "",
        "text differs" if result.same_text is False else "",
        "ended early" if result.short else "",
    ]
    return ", ".join(filter(None, remarks))


def common(report: Report) -> str:
    """Return what all cells share."""
    results = report.results
    if not results:
        return "Nothing was measured."
    setup, names = results[0].cell.setup, {"model", *_SETTINGS} - varying(results)
    model = f"{Path(setup.model).name} ({results[0].model_type})" if "model" in names and results[0].model_type else ""
    words = [model or (Path(setup.model).name if "model" in names else ""), setting_words(setup, names)]
    return ", ".join(filter(None, words))


def notes(report: Report) -> list[str]:
    """Return what is to be known beside the table, each in a sentence."""
    found: list[str] = []
    results = report.results
    if any(one.noisy for one in results):
        found.append("noisy: the rounds differ by over 10 %, probably because other programs ran.")
    if any(one.same_text is False for one in results):
        found.append(
            "text differs from plain decoding: a batch over several tokens rounds differently, which decides between "
            "tokens of almost equal probability."
        )
    if any(one.drafters == OFF and one.cell.setup.draft for one in results):
        found.append("Memory includes the draft model even where it is not used.")
    if any(one.joules_per_token is not None for one in results):
        found.append("J/token: CPU packages, prefill included.")
    drafted = [one for one in results if one.drafts_off is not None]
    reasons = dict.fromkeys(f"{one.drafters}: nothing was drafted: {off_words(one.drafts_off)}" for one in drafted)
    failures = dict.fromkeys(f"{Path(one.model_filename).name}: {one.failure}" for one in results if one.failure)
    return [*found, *reasons, *failures]


def environment_lines(environment: Environment) -> list[tuple[str, str]]:
    """Return the reproducibility block as names and values."""
    engine = environment.engine
    settings = [
        (f"{name} settings", ", ".join(f"{key} {value}" for key, value in values.items() if value != ""))
        for name, values in environment.settings.items()
    ]
    memory = units.size(environment.memory_bytes)
    if environment.memory_modules:
        memory += f", theoretical peak {environment.memory_modules}"
    return [
        ("date", environment.date),
        ("machine", environment.machine),
        ("memory", memory),
        ("kernel", environment.kernel),
        ("load average", f"{environment.load:.2f} before the first measurement"),
        ("cpuchat", f"{environment.cpuchat}, Python {environment.python}"),
        ("engine", f"llama-cpp-python {engine.version}, llama.cpp {engine.llama_commit}, {' '.join(engine.features)}"),
        *(
            ("model", f"{Path(one.path).name}, {one.size:,} bytes, fingerprint {one.fingerprint}")
            for one in environment.files
        ),
        *settings,
    ]  # fmt: skip


def markdown(report: Report) -> list[str]:
    """Return the whole report as Markdown."""
    lines = [f"{common(report)}; {report.rounds} rounds: median ± half of the range.", ""]
    lines += markdown_table([HEADINGS, *rows(report.results)], RIGHT)
    found = notes(report)
    if found:
        lines += ["", *(f"- {clean_line(note)}" for note in found)]
    block = [(name, clean_line(value)) for name, value in environment_lines(report.environment)]
    return [*lines, "", "```", *table(block), "```"]


def progress_bar(done: int, total: int, seconds_left: float | None, what: str) -> str:
    """Return `[█████░░░] 12 of 48 · 3 min left · what`."""
    filled = _BAR * done // total if total else 0
    left = f" · {units.time_left(seconds_left)}" if seconds_left is not None else ""
    return f"[{'█' * filled}{'░' * (_BAR - filled)}] {done} of {total}{left} · {clean_line(what)}"


PAIR_HEADINGS = ("prompts", "plain tok/s", "accepted", "tokens/pass", "speed-up")


def pair_rows(pair: PairResult) -> list[tuple[str, ...]]:
    """Return a row for each kind of prompts, for a table with `PAIR_HEADINGS`."""
    return [
        (
            one.kind,
            units.rate(one.plain),
            f"{100 * one.acceptance:.0f} %" if one.acceptance is not None else "n/a",
            f"{one.tokens_per_pass:.2f}" if one.tokens_per_pass is not None else "n/a",
            units.factor(one.speed_up),
        )
        for one in pair.kinds
    ]


def pair_verdict(pair: PairResult) -> str:
    """Return whether the draft model is worth keeping, in a sentence or two."""
    if not pair.kinds:
        return "Nothing was measured."
    reason = f" Nothing was drafted: {off_words(pair.off)}." if pair.off else ""
    words = f"{units.factor(pair.speed_up)} vs plain (geometric mean of the prompts)."
    return ("Worth keeping: " if pair.worth_keeping else "Not worth keeping: ") + words + reason


DIFF_HEADINGS = (
    "model", "settings", "drafters", "test", "figure", "before tok/s", "now tok/s", "change", "threshold", "",
)  # fmt: skip


def diff_rows(diff: Diff) -> list[tuple[str, ...]]:
    """Return a row for each figure that was compared."""
    names = varying([one.old for one in diff.differences])
    return [
        (
            *_cell_names(one.old, names),
            one.old.test,
            one.figure,
            units.rate(one.before),
            units.rate(one.after),
            percent(one.change),
            f"{100 * one.needed:.1f} %",
            "" if one.verdict == "same" else one.verdict,
        )
        for one in diff.differences
    ]


def diff_lines(diff: Diff, old: Environment, new: Environment) -> list[str]:
    """Return the comparison as Markdown, with a verdict."""
    lines = markdown_table([DIFF_HEADINGS, *diff_rows(diff)], right=(5, 6, 7, 8)) if diff.differences else []
    counts = {word: sum(one.verdict == word for one in diff.differences) for word in ("slower", "faster")}
    if not diff.differences:
        verdict = "Nothing to compare: the two benchmarks have no cell in common."
    elif not any(counts.values()):
        verdict = f"No difference exceeds the spread of the rounds ({units.plural(len(diff.differences), 'figure')})."
    else:
        found = [f"{n} {'is' if n == 1 else 'are'} {word}" for word, n in counts.items() if n]
        total = units.plural(len(diff.differences), "figure")
        verdict = f"Of {total}, {' and '.join(found)} by more than the spread of the rounds."
    lines += ["", verdict]
    if old.build != new.build:
        lines.append(f"Engine before: {old.build}; now: {new.build}.")
    if old.cpu != new.cpu:
        lines.append(f"Measured on different CPUs: {old.cpu} and {new.cpu}.")
    for words, cells in (("before", diff.only_old), ("now", diff.only_new)):
        if cells:
            lines.append(f"Measured only {words}: {units.plural(len(cells), 'cell')}.")
    return lines


_INK, _FAINT, _GRID, _PAPER, _PLOT_BAR, _DRAFTED, _ROOF = (
    "#1f2328", "#59636e", "#d8dee4", "#ffffff", "#0b5cad", "#1a7f37", "#a8480b",
)  # fmt: skip
_FONT = "DejaVu Sans, Verdana, Helvetica, Arial, sans-serif"
_LABEL, _WIDTH, _VALUE, _MARGIN = 330, 460, 90, 20
_ROW, _THICK, _HEAD = 26, 14, 44
_TICKS = 5


@dataclass(frozen=True, slots=True)
class _Bar:
    """A bar of a plot in tok/s: the median of the rounds, their range, and what memory bandwidth allows (`roof`)."""

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


def _decode_bar(result: Result, names: set[str]) -> _Bar:
    assert result.decode_ts is not None
    roof = result.decode_ts / result.utilization if result.utilization else None
    drafted = result.tokens_per_pass is not None
    return _Bar(_label(result, names), result.decode_ts, min(result.samples_ts), max(result.samples_ts), drafted, roof)


def _label(result: Result, names: set[str]) -> str:
    return " · ".join(filter(None, (*_cell_names(result, names), result.test)))


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


def _scale(max_value: float) -> tuple[float, int]:
    """Return a round step and how many of them hold `max_value`."""
    rough = max(max_value, 1e-9) / _TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 2.5, 5, 10) if power * n >= rough)
    return step, max(1, math.ceil(max_value / step))


def _drawn(bar: _Bar, left: float, y: float, scale: float) -> list[str]:
    middle, fill = y + _ROW / 2, _DRAFTED if bar.drafted else _PLOT_BAR
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
