"""How a quality measurement is worded, for the app and the command line alike."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import msgspec

from cpuchat.base.text import clean_line
from cpuchat.models.gguf.header import known_as
from cpuchat.present.table import table
from cpuchat.quality.measure import QualityLoss, QualityMeasurement, QualityProgress
from cpuchat.quality.messages import Disagreement
from cpuchat.quality.statistics import MIN_POSITIONS, Estimate, Interval, Summary
from cpuchat.telemetry import units

HEADINGS = ("", "same next token", "KLD mean", "KLD median", "KLD 99 %", "KLD 99.9 %", "ln PPL ratio", "RMS Δp")
_CONTEXT_COLUMNS = 48


_WORDS = ((0.975, "indistinguishable"), (0.91, "slight"), (0.8, "noticeable"), (0.0, "clear"))
"""From which share of equal next tokens on a loss is called so. Against F16, Q8_0 files of 7B and 8B models have 97.7
to 98.8 %, and among such near-lossless files no figure follows benchmark scores (arXiv 2606.19558). Q6_K and Q4_K_M
have 91.9 to 97.5 %, and their perplexity rises by 0.18 at most. Q2_K has 85.6 % (+0.63) of Llama 2 7B, and 71.1 %
(+3.5) of Llama 3 8B (llama.cpp, tools/perplexity/README.md)."""


def in_words(summary: Summary) -> str:
    """`about 1 token in 7 would differ (1 in 6 to 1 in 9): noticeable`: the next token, with the 95 % interval."""
    same = summary.same_top
    if same.value == 1:
        return f"none of {units.plural(summary.n, 'token')} would differ: {_word(1)}"
    low, high = _one_in(same.low), _one_in(same.high)
    interval = f" ({low} to {high})" if same.high - same.low < 1 and low != high else ""
    words = dict.fromkeys((_word(same.low), _word(same.value), _word(same.high)) if interval else (_word(same.value),))
    first, *rest = words
    word = f"{first} to {rest[-1]}" if rest else first
    return f"about {one_in(same)} would differ{interval}: {word}"


def one_in(same: Interval) -> str:
    """`1 token in 7`: those that differ."""
    return "no token" if same.value == 1 else f"1 token in {round(1 / (1 - same.value)):,}"


def _one_in(same: float) -> str:
    return f"1 in {round(1 / (1 - same)):,}" if same < 1 else "none"


def _word(same: float) -> str:
    return next(word for min_share, word in _WORDS if same >= min_share)


def _measured(measurement: QualityMeasurement) -> list[tuple[QualityLoss, Summary]]:
    """Return the files that have a figure."""
    return [(one, summary) for one in measurement.comparisons if (summary := one.summary()) is not None]


def label(comparison: QualityLoss) -> str:
    """Name one of the compared files."""
    return comparison.header.quantization or known_as(comparison.path)


def cells(name: str, summary: Summary) -> tuple[str, ...]:
    """Return a row under `HEADINGS`."""
    return (
        name,
        share(summary.same_top),
        kld(summary.kld),
        f"{summary.kld_median:.4f}",
        f"{summary.kld_99:.3f}",
        f"{summary.kld_999:.3f}" if summary.n >= MIN_POSITIONS else "n/a",
        f"{summary.ln_ppl_ratio.value:+.4f}{_error(summary.ln_ppl_ratio)}".replace("-", "−"),
        f"{100 * summary.rms_dp.value:.2f} %",
    )


def share(found: Interval) -> str:
    """`94.1 % (93.6–94.6)`: a share with its 95 % interval, where that is known."""
    interval = f" ({100 * found.low:.1f}–{100 * found.high:.1f})" if found.high - found.low < 1 else ""
    return f"{100 * found.value:.1f} %{interval}"


def kld(estimate: Estimate) -> str:
    """`0.0213 ± 0.0004`: nats with the standard error, where more than one window tells it."""
    return f"{estimate.value:.4f}{_error(estimate)}"


def _error(estimate: Estimate) -> str:
    return f" ± {estimate.error:.4f}" if math.isfinite(estimate.error) else ""


def rows(measurement: QualityMeasurement) -> list[tuple[str, ...]]:
    """Return the table: a row for each file that has a figure, below it one for each kind of text."""
    found: list[tuple[str, ...]] = []
    for comparison, summary in _measured(measurement):
        kinds = measurement.by_kind(comparison)
        shown = [(label(comparison), summary), *((f"  {kind}", one) for kind, one in kinds if len(kinds) > 1)]
        found += [cells(name, one) for name, one in shown]
    return found


def verdicts(measurement: QualityMeasurement) -> list[str]:
    """Return sentences: what was measured, and which files must not be ranked."""
    found = _measured(measurement)
    if not found:
        return ["No windows measured yet."]
    fewest = min(summary.n for _, summary in found)
    base = measurement.header.quantization or known_as(measurement.base)
    sentences = [f"{units.plural(fewest, 'position')} scored; base {base}, perplexity {found[0][1].ppl_base:,.2f}."]
    if fewest < MIN_POSITIONS:
        sentences.append("Too few positions for a reliable estimate: use a longer text.")
    for (first, _), (second, _) in combinations(found, 2):
        if first.is_like(second):
            sentences.append(f"{label(first)} and {label(second)} are indistinguishable on this text.")
    for one, summary in found:
        if summary.kld.interval.low <= 0:
            sentences.append(f"{label(one)} is indistinguishable from the base on this text.")
    return sentences


def report(measurement: QualityMeasurement) -> list[str]:
    """Return all that was measured as lines: what each file loses in words, the table, and where most."""
    lines, found = list[str](), rows(measurement)
    if found:
        # `Q4_K_M: about 1 token in 7 would differ …`
        headlines = [f"{label(one)}: {in_words(summary)}." for one, summary in _measured(measurement)]
        lines = [*headlines, "", *table([HEADINGS, *found]), ""]
    lines += verdicts(measurement)
    for comparison in measurement.comparisons:
        if comparison.worst:
            lines.append(f"\nLargest disagreements of {label(comparison)} (text ▸ next token):")
            lines += [f"  {disagreement(one)}" for one in comparison.worst]
    return lines


def disagreement(place: Disagreement) -> str:
    """`…matrix × matrix product: each ▸ weight · base “weight” 93 %, other “row” 41 % · KLD 2.31`."""
    before = clean_line(place.context.replace("\n", "⏎"))
    if len(before) > _CONTEXT_COLUMNS:
        before = "…" + before[1 - _CONTEXT_COLUMNS :]
    return (
        f"{before} ▸ {token(place.token)} · base {token(place.base_top)} {100 * place.base_p:.0f} %, "
        f"other {token(place.other_top)} {100 * place.other_p:.0f} % · KLD {place.kld:.2f}"
    )


def token(text: str) -> str:
    """Quote the text of a token so that white space is seen: `“⏎”`, `“␣␣”`."""
    shown = clean_line(text.replace(chr(10), "⏎")) or "␣" * len(text)  # of a token of spaces, nothing would be seen
    return f"“{shown}”"


def status(measurement: QualityMeasurement) -> str:
    """One line about a running measurement: `12 of 32 windows · same next token 94.1 % · KLD 0.0213 · 47 s left`."""
    progress: QualityProgress = measurement.progress
    if progress.loading or not progress.total:
        return f"Loading {progress.loading or 'the models'} {100 * progress.share:.0f} %"
    parts = [f"{progress.done} of {units.plural(progress.total, 'window')}"]
    summary = measurement.comparisons[0].summary()
    if summary is not None:
        name = f"{label(measurement.comparisons[0])}: " if len(measurement.comparisons) > 1 else ""
        parts.append(f"{name}same next token {100 * summary.same_top.value:.1f} %")
        parts.append(f"KLD {summary.kld.value:.4f}")
    if progress.seconds_left is not None:
        parts.append(units.time_left(progress.seconds_left))
    return " · ".join(parts)


def as_json(measurement: QualityMeasurement) -> dict[str, Any]:
    """Return everything that is measured, with full precision."""
    return {
        "base": str(measurement.base),
        "n_ctx": measurement.n_ctx,
        "windows": measurement.progress.total,
        "complete": bool(measurement.progress.total) and measurement.progress.done == measurement.progress.total,
        "others": [
            {
                "path": str(one.path),
                "quantization": one.header.quantization,
                **(msgspec.to_builtins(summary) if (summary := one.summary()) is not None else {}),
                "kinds": {kind: msgspec.to_builtins(found) for kind, found in measurement.by_kind(one)},
                "worst": msgspec.to_builtins(one.worst),
            }
            for one in measurement.comparisons
        ],
    }
