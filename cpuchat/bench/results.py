"""Holds the results of a benchmark: for each cell medians and spreads of its rounds, with llama-bench's field names."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from cpuchat.bench.environment import Environment
from cpuchat.bench.journal import Journal, Measurement
from cpuchat.bench.matrix import OFF, Cell
from cpuchat.bench.sample import Sample
from cpuchat.errors import UsageError
from cpuchat.model_info import ModelInfo
from cpuchat.paths import shown
from cpuchat.protocol import FlashAttention
from cpuchat.telemetry import units

VERSION = 1
_FLASH: dict[FlashAttention, int] = {"auto": -1, "off": 0, "on": 1}
_MAX_BYTES = 256 << 20
_MEDIANS = ("ttft_ms", "bandwidth", "utilization", "first_audio_ms", "real_time_factor")
_NOT_IN_CSV = ("cell", "samples_ns", "samples_ts", "prefill_samples_ts")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One cell. Up to `samples_ts` the names and units are llama-bench's; its `_ts` are decode tok/s, of a test without
    decoding prefill tok/s. Without any sample, `failure` says why.

    `ttft_ms`, `prefill_ts` and what follows are medians of the rounds. `speed_up`: decode ÷ that of the plain cell
    in the same rounds; of a cell with `speech` ÷ that of the same without. `same_text`: as the plain cell's,
    greedily (None: nothing to compare). `peak`: measured read bandwidth in bytes per second. `noisy`: the machine
    was not steady.
    """

    build_commit: str
    cpu_info: str
    model_filename: str
    model_type: str = ""
    model_size: int = 0
    model_n_params: int = 0
    n_batch: int = 0
    n_ubatch: int = 0
    n_threads: int = 0
    poll: int = 0
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: int = -1
    load_mode: str = ""
    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0
    test_time: str = ""
    avg_ns: float = 0.0
    stddev_ns: float = 0.0
    avg_ts: float = 0.0
    stddev_ts: float = 0.0
    samples_ns: tuple[float, ...] = ()
    samples_ts: tuple[float, ...] = ()
    test: str
    quantization: str = ""
    drafters: str = OFF
    draft_filename: str = ""
    cores: str = "auto"
    memory_policy: str = "auto"
    cpus: tuple[int, ...] = ()
    ttft_ms: float | None = None
    prefill_ts: float | None = None
    prefill_samples_ts: tuple[float, ...] = ()
    decode_ts: float | None = None
    speed_up: float | None = None
    acceptance: float | None = None
    tokens_per_pass: float | None = None
    memory_bytes: int | None = None
    bandwidth: float | None = None
    utilization: float | None = None
    peak: float | None = None
    joules_per_token: float | None = None
    speech: bool = False
    first_audio_ms: float | None = None
    real_time_factor: float | None = None
    speech_memory_bytes: float | None = None
    same_text: bool | None = None
    short: bool = False
    noisy: bool = False
    no_drafts: str = ""
    failure: str = ""
    cell: Cell

    def cost(self, price_per_hour: float) -> float | None:
        """Return what a million decoded tokens cost at a price of the machine per hour."""
        return price_per_hour / (3600 * self.decode_ts) * 1e6 if self.decode_ts else None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of a benchmark."""

    version: int = VERSION
    environment: Environment
    rounds: int
    results: tuple[Result, ...]


def report_of(journal: Journal, failed: Mapping[int, str]) -> Report:
    """Return what the journal has of the cells that were measured, at least once, or failed."""
    header = journal.header
    assert header is not None
    by_cell: dict[Cell, list[Measurement]] = {cell: [] for cell in header.cells}
    for _, line in sorted(journal.measurements.items(), key=lambda item: item[0][1]):
        by_cell[header.cells[line.cell]].append(line)
    models = {header.cells[number].setup: model for number, model in journal.loaded.items()}
    results: list[Result] = []
    for number, cell in enumerate(header.cells):
        if by_cell[cell] or number in failed:
            figures: dict[str, Any] = {"n_prompt": cell.test.n_prompt, "n_gen": cell.test.n_gen}
            figures |= _model_figures(models.get(cell.setup))
            figures |= _figures(cell, by_cell[cell], by_cell.get(cell.plain, []))
            if number in failed:
                figures["failure"] = failed[number]
            results.append(_result(cell, header.environment, figures))
    return Report(environment=header.environment, rounds=header.rounds, results=tuple(results))


def _result(cell: Cell, environment: Environment, figures: Mapping[str, Any]) -> Result:
    setup, engine = cell.setup, environment.settings.get("engine", {})
    return Result(
        build_commit=environment.engine.llama_commit,
        cpu_info=environment.cpu,
        model_filename=setup.model,
        n_batch=engine.get("batch", 0),
        n_ubatch=min(engine.get("ubatch", 0), engine.get("batch", 0)),
        poll=engine.get("poll", 0),
        load_mode=engine.get("load_mode", ""),
        type_k=setup.cache_type_k,
        type_v=setup.cache_type_v,
        flash_attn=_FLASH[setup.flash_attn],
        n_depth=cell.test.depth,
        test_time=environment.date,
        test=cell.test.name,
        drafters=cell.drafting,
        speech=cell.speech,
        draft_filename=setup.draft if cell.drafters in ("auto", "draft") else "",
        cores=setup.cores,
        memory_policy=setup.memory,
        cell=cell,
        **figures,
    )


def _model_figures(model: ModelInfo | None) -> dict[str, Any]:
    if model is None:
        return {}
    return {
        "model_type": f"{model.architecture} {units.parameters(model.n_params)} {model.quantization}",
        "model_size": model.size,
        "model_n_params": model.n_params,
        "n_threads": model.n_threads,
        "quantization": model.quantization,
        "cpus": model.cpus,
        "peak": model.peak_read or None,
    }


def _figures(cell: Cell, lines: Sequence[Measurement], plain: Sequence[Measurement]) -> dict[str, Any]:
    samples = [line.sample for line in lines]
    if not samples:
        return {}
    seconds, rates = [1e9 * one.seconds for one in samples], [one.rate for one in samples]
    drafted, accepted = sum(one.draft_n for one in samples), sum(one.draft_n_accepted for one in samples)
    passes, steps = sum(one.passes for one in samples), sum(_steps(one, cell.test.n_gen) for one in samples)
    return {
        "n_prompt": samples[0].prompt_n,
        "n_gen": samples[0].predicted_n,
        "avg_ns": statistics.mean(seconds),
        "stddev_ns": _deviation(seconds),
        "avg_ts": statistics.mean(rates),
        "stddev_ts": _deviation(rates),
        "samples_ns": tuple(seconds),
        "samples_ts": tuple(rates),
        **{name: _median(samples, attrgetter(name)) for name in _MEDIANS},
        "prefill_ts": _median(samples, lambda one: one.prefill),
        "prefill_samples_ts": tuple(one.prefill for one in samples if one.prefill is not None),
        "decode_ts": _median(samples, lambda one: one.decode),
        "speed_up": _speed_up(lines, plain) if cell != cell.plain else None,
        "acceptance": accepted / drafted if drafted else None,
        "tokens_per_pass": steps / passes if passes else None,
        "memory_bytes": max((one.memory or 0 for one in samples), default=0) or None,
        "joules_per_token": _median(samples, _joules_per_token),
        "speech_memory_bytes": max((one.speech_memory or 0 for one in samples), default=0) or None,
        "same_text": _same_text(samples, plain) if cell != cell.plain else None,
        "short": any(one.short for one in samples),
        "noisy": any(line.noisy for line in lines),
        "no_drafts": samples[-1].no_drafts,
    }


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _median(samples: Sequence[Sample], figure: Callable[[Sample], float | None]) -> float | None:
    known = [value for one in samples if (value := figure(one)) is not None]
    return statistics.median(known) if known else None


def _steps(sample: Sample, n_gen: int) -> int:
    """Return the tokens that decoding wrote: the prompt gives the first one of each answer."""
    return sample.predicted_n - sample.predicted_n // max(n_gen, 1)


def _joules_per_token(sample: Sample) -> float | None:
    tokens = sample.predicted_n or sample.prompt_n
    return sample.joules / tokens if sample.joules is not None and tokens else None


def _speed_up(lines: Sequence[Measurement], plain: Sequence[Measurement]) -> float | None:
    """Return the median ratio of the rounds that both have."""
    before = {line.round: line.sample.rate for line in plain}
    ratios = [line.sample.rate / before[line.round] for line in lines if before.get(line.round)]
    return statistics.median(ratios) if ratios else None


def _same_text(samples: Sequence[Sample], plain: Sequence[Measurement]) -> bool | None:
    texts = {line.sample.text for line in plain}
    return {one.text for one in samples} == texts if texts else None


def read_report(file: Path) -> Report:
    """Read what `as_json` wrote. Raises UsageError."""
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{shown(file)} is too large.", "Give the JSON file of an earlier run.")
        found = msgspec.json.decode(file.read_bytes(), type=Report)
    except OSError as error:
        raise UsageError(
            f"Cannot read {shown(file)}: {error.strerror}.", "Give the JSON file of an earlier run."
        ) from None
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"{shown(file)} is not a result of `cpuchat bench --json`: {error}.",
            "Give the JSON file of an earlier run.",
        ) from None
    if found.version != VERSION:
        raise UsageError(f"{shown(file)} was written by another version of cpuchat.", "Measure again.")
    return found


def as_json(report: Report, price_per_hour: float | None) -> dict[str, Any]:
    """Return all of it as plain values, with the cost at that price."""
    content = msgspec.to_builtins(report)
    if price_per_hour is not None:
        content["price_per_hour"] = price_per_hour
        for row, result in zip(content["results"], report.results, strict=True):
            row["cost_per_million_tokens"] = result.cost(price_per_hour)
    return content


def as_csv(report: Report, price_per_hour: float | None) -> str:
    """Return one line for each cell, llama-bench's fields first."""
    rows = as_json(report, price_per_hour)["results"]
    names = [name for name in Result.__struct_fields__ if name not in _NOT_IN_CSV]
    names += ["cost_per_million_tokens"] if price_per_hour is not None else []
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(row | {"cpus": " ".join(map(str, row["cpus"]))})
    return text.getvalue()
