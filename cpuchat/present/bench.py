"""Benchmarks in words: the table of results, where they were measured, what changed between two."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from cpuchat.base.text import clean_line
from cpuchat.bench.matrix import OFF, BenchCell, Setup
from cpuchat.bench.results import GAIN, Diff, Environment, Report, Resolution, Result
from cpuchat.models.file_names import shortened
from cpuchat.models.gguf.header import known_as
from cpuchat.models.ollama import file_name
from cpuchat.present.drafts_off import off_words
from cpuchat.present.table import markdown_table, table
from cpuchat.telemetry import units

HEADINGS = (
    "model", "settings", "drafters", "test", "first token", "prefill tok/s", "decode tok/s", "speed-up", "accepted",
    "tokens/pass", "memory", "GB/s", "utilization", "",
)  # fmt: skip
RIGHT = tuple(range(4, len(HEADINGS) - 1))
_SETTINGS = {
    "threads": lambda setup: f"threads {setup.threads or 'auto'}",
    "cores": lambda setup: f"cores {setup.cores}",
    "memory_policy": lambda setup: f"memory policy {setup.memory_policy}",
    "cache_type_k": lambda setup: f"K {setup.cache_type_k}",
    "cache_type_v": lambda setup: f"V {setup.cache_type_v}",
    "flash_attn": lambda setup: f"FA {setup.flash_attn}",
    "ubatch": lambda setup: f"micro-batch {setup.ubatch}" if setup.ubatch else "",
    "draft": lambda setup: f"draft {shortened([known_as(Path(setup.draft))])[0]}" if setup.draft else "",
}
_BAR = 20
_DISTURBED = "the rounds differ by over 10 %, or threads waited for a core, probably because other programs ran."


def varying(results: Sequence[Result]) -> set[str]:
    """Return the names of what differs between the setups."""
    setups = [msgspec.structs.asdict(one.cell.setup) for one in results]
    return {name for name in ("model", *_SETTINGS) if len({setup[name] for setup in setups}) > 1}


def setting_words(setup: Setup, names: set[str]) -> str:
    """Return those settings in words."""
    return ", ".join(filter(None, (words(setup) for name, words in _SETTINGS.items() if name in names)))


def _row(result: Result, names: set[str], of_one: float | None) -> tuple[str, ...]:
    """Return the row of a cell; what all cells share is empty (see `common`). `of_one`: decode tok/s of one user."""
    together, each = result.median("decode"), result.median("each")
    remarks = [
        f"{units.factor(together / of_one)} one user" if each and together and of_one else "",
        "failed" if result.failure else "",
        "noisy" if result.noisy else "",
        "staggered" if result.staggered else "",
        "text differs" if result.same_text is False else "",
    ]
    return (
        *_cell_names(result, names),
        result.cell.test.words,
        _words(result.median("ttft_ms"), lambda ms: " ".join(units.duration(ms / 1e3))),
        _rate(result.rates("prefill")),
        _rate(result.rates("decode")) + (f" ({units.rate(each)} each)" if each else ""),
        _words(result.speed_up, lambda ratio: f"{'' if result.sure else '≈'}{units.factor(ratio)}"),
        _words(result.acceptance, "{:.0%}".format).replace("%", " %"),
        _words(result.tokens_per_pass, "{:.2f}".format),
        _words(result.median("memory"), lambda n_bytes: units.size(round(n_bytes))),
        _words(result.median("bandwidth"), units.bandwidth),
        _words(result.median("utilization"), "{:.0%}".format).replace("%", " %"),
        ", ".join(filter(None, remarks)),
    )


def _of_one_user(cell: BenchCell) -> BenchCell:
    return msgspec.structs.replace(cell, test=msgspec.structs.replace(cell.test, users=1))


def _cell_names(result: Result, names: set[str]) -> tuple[str, str, str]:
    """Return model, settings and drafters of a cell; "" for those that all cells share."""
    cell = result.cell
    model = known_as(Path(cell.setup.model)) if "model" in names else ""
    return model, setting_words(cell.setup, names), cell.drafting if cell.test.kind == "prompts" else ""


def _with_short_names(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    models = shortened([row[0] for row in rows])
    return [(model, *row[1:]) for model, row in zip(models, rows, strict=True)]


def _words(value: float | None, words: Callable[[float], str]) -> str:
    return words(value) if value is not None else ""


def _rate(rates: Sequence[float]) -> str:
    """Return a median with half of the range of its rounds: `41.3 ± 0.4`."""
    if not rates:
        return ""
    value = units.rate(statistics.median(rates))
    half, digits = (max(rates) - min(rates)) / 2, len(value.partition(".")[2])
    return f"{value} ± {half:,.{digits}f}" if len(rates) > 1 else value


def common(report: Report) -> str:
    """Return what all cells share."""
    results = report.results
    if not results:
        return "Nothing was measured."
    setup, names = results[0].cell.setup, {"model", *_SETTINGS} - varying(results)
    kind = f" ({results[0].model_type})" if results[0].model_type else ""
    words = [f"{file_name(Path(setup.model))}{kind}" if "model" in names else "", setting_words(setup, names)]
    return ", ".join(filter(None, words))


def notes(report: Report) -> list[str]:
    """Return what is to be known beside the table, each in a sentence."""
    found: list[str] = []
    results = report.results
    if any(one.noisy for one in results):
        found.append(f"noisy: {_DISTURBED}")
    if any(one.staggered for one in results):
        found.append(
            "staggered: some users had their whole answer before others got a first token; decode tok/s are from "
            "the first token of any to the last one, prompts included. Measure with more --tokens."
        )
    if any(one.same_text is False for one in results):
        found.append(
            "text differs from plain decoding: a batch over several tokens rounds differently, which decides between "
            "tokens of almost equal probability."
        )
    if any(one.cell.drafters == OFF and one.cell.setup.draft for one in results):
        found.append("Memory includes the draft model even where it is not used.")
    if any(one.rates("decode") for one in results) and all(one.peak is None for one in results):
        found.append("No utilization: read bandwidth not measured; run `cpuchat probe`.")
    drafted = [one for one in results if one.drafts_off is not None]
    reasons = dict.fromkeys(f"{one.cell.drafting}: nothing was drafted: {off_words(one.drafts_off)}" for one in drafted)
    failures = dict.fromkeys(f"{one.name}: {one.failure}" for one in results if one.failure)
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
            ("model", f"{file_name(Path(one.path))}, {one.size:,} bytes, SHA-256 {one.sha256}")
            for one in environment.files
        ),
        *settings,
    ]  # fmt: skip


def markdown(report: Report) -> list[str]:
    """Return the whole report as Markdown."""
    block = [(name, clean_line(value)) for name, value in environment_lines(report.environment)]
    return [*summary(report), "", "```", *table(block), "```"]


def summary(report: Report) -> list[str]:
    """Return the table of a report with its notes as Markdown."""
    lines = [f"{common(report)}; {units.plural(report.rounds, 'round')}: median ± half of the range.", ""]
    names = varying(report.results)
    decoded = {one.cell: one.median("decode") for one in report.results}
    rows = [_row(one, names, decoded.get(_of_one_user(one.cell))) for one in report.results]
    lines += markdown_table([HEADINGS, *_with_short_names(rows)], RIGHT)
    found = notes(report)
    return [*lines, "", *(f"- {clean_line(note)}" for note in found)] if found else lines


def progress_bar(done: int, total: int, seconds_left: float | None, what: str) -> str:
    """Return `[█████░░░] 12 of 48 · 3 min left · what`."""
    filled = _BAR * done // total if total else 0
    left = f" · {units.time_left(seconds_left)}" if seconds_left is not None else ""
    return f"[{'█' * filled}{'░' * (_BAR - filled)}] {done} of {total}{left} · {clean_line(what)}"


def resolution(told: Resolution) -> str:
    """`such runs show differences from 12 % on; to find 5 %, run both with --rounds 11`."""
    shown = f"such runs show differences from {math.ceil(100 * told.smallest)} % on"
    if told.smallest <= GAIN:
        return shown
    again = f"run both with --rounds {told.rounds}" if told.rounds else "measure both sides in one run"
    return f"{shown}; to find {100 * GAIN:.0f} %, {again}"


DIFF_HEADINGS = (
    "model", "settings", "drafters", "test", "figure", "before tok/s", "now tok/s", "change", "±", "",
)  # fmt: skip


def diff_lines(diff: Diff, old: Environment, new: Environment) -> list[str]:
    """Return the comparison as Markdown, a row for each figure, with a verdict."""
    names = varying([one.old for one in diff.differences])
    rows = [
        (
            *_cell_names(one.old, names),
            one.old.cell.test.words,
            one.figure,
            units.rate(one.before),
            units.rate(one.after),
            units.change(one.difference.gain),
            f"{100 * math.expm1(one.difference.needed):.1f} %",
            one.verdict,
        )
        for one in diff.differences
    ]
    lines = markdown_table([DIFF_HEADINGS, *_with_short_names(rows)], right=(5, 6, 7, 8)) if rows else []
    counts = {word: sum(one.verdict == word for one in diff.differences) for word in ("slower", "faster")}
    if not diff.differences:
        verdict = "Nothing to compare: the two benchmarks have no cell in common."
    elif not any(counts.values()):
        verdict = f"No figure is known to differ ({units.plural(len(diff.differences), 'figure')})."
    else:
        found = [f"{n} {'is' if n == 1 else 'are'} {word}" for word, n in counts.items() if n]
        total = units.plural(len(diff.differences), "figure")
        verdict = f"Of {total}, {' and '.join(found)} by more than the rounds scatter."
    lines += ["", verdict]
    disturbed = sum(one.disturbed for one in diff.differences)
    n_open = sum(one.verdict == "noisy" for one in diff.differences) - disturbed
    if n_open and (told := diff.resolution) is not None:
        lines.append(f"Too noisy to tell: {resolution(told)}.")
    if disturbed:
        figures = units.plural(disturbed, "figure")
        lines.append(f"Too noisy to tell of {figures}: {_DISTURBED} Measure both again on an idle machine.")
    if old.build != new.build:
        lines.append(f"Engine before: {old.build}; now: {new.build}.")
    if old.cpu != new.cpu:
        lines.append(f"Measured on different CPUs: {old.cpu} and {new.cpu}.")
    for words, cells in (("before", diff.only_old), ("now", diff.only_new)):
        if cells:
            lines.append(f"Measured only {words}: {units.plural(len(cells), 'cell')}.")
    return lines
