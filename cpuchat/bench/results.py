"""The results of a benchmark: its environment, its report, and the comparison of two reports. The report has medians
and spreads of each cell's rounds, with llama-bench's field names.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from cpuchat import __version__
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import UsageError
from cpuchat.base.paths import shown
from cpuchat.bench.matrix import OFF, BenchCell, Setup
from cpuchat.bench.sample import Sample
from cpuchat.config.settings import Settings
from cpuchat.hardware.bandwidth.theoretical import theoretical
from cpuchat.hardware.memory import total_bytes
from cpuchat.hardware.topology import read_topology
from cpuchat.models.file_names import file_fingerprint
from cpuchat.models.gguf.header import model_size
from cpuchat.protocol.model_info import EngineInfo, ModelInfo
from cpuchat.protocol.options import FlashAttention
from cpuchat.protocol.reasons import DraftsOff
from cpuchat.telemetry import units
from cpuchat.telemetry.rounds import has_drifted


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """A model's file; `fingerprint` is the hash of a sample of its content (models.fingerprint), `size` in bytes."""

    path: str
    size: int
    fingerprint: str


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The reproducibility block. `load` is the load average of the minute before; `settings` are all that were in
    effect, without what cells vary."""

    date: str
    cpuchat: str
    python: str
    kernel: str
    cpu: str
    machine: str
    memory_bytes: int
    memory_modules: str
    engine: EngineInfo
    load: float
    files: tuple[ModelFile, ...] = ()
    settings: dict[str, Any] = {}

    @property
    def build(self) -> str:
        """Identify the engine's build: version, commit and CPU features."""
        engine = self.engine
        return f"{engine.version} {engine.llama_commit} {','.join(engine.features)}".strip()


def read_environment(engine: EngineInfo, models: Iterable[str], chosen: Settings) -> Environment:
    """Read what is known of this machine. Raises ModelNotFound for a model that cannot be read."""
    topology = read_topology()
    modules = theoretical(topology)
    tables = msgspec.to_builtins(chosen)
    return Environment(
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        cpuchat=__version__,
        python=platform.python_version(),
        kernel=platform.release(),
        cpu=topology.cpu_name,
        machine=topology.name,
        memory_bytes=total_bytes(),
        memory_modules="" if modules is None else f"{modules.bytes_per_s / 1e9:.1f} GB/s, {modules.source}",
        engine=msgspec.structs.replace(engine, pid=0),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        files=tuple(
            ModelFile(path=str(file), size=model_size(file), fingerprint=file_fingerprint(file))
            for file in (Path(path) for path in dict.fromkeys(models) if path)
        ),
        settings={name: tables[name] for name in ("engine", "speculation")},
    )


class Measurement(NamedTuple):
    """A sample of a cell in a round (from 1)."""

    cell: BenchCell
    round: int
    sample: Sample


VERSION = 1
_FLASH: dict[FlashAttention, int] = {"auto": -1, "off": 0, "on": 1}
_MAX_BYTES = 256 << 20
_MEDIANS = ("ttft_ms", "bandwidth", "utilization")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One cell. Up to `samples_ts` the names and units are llama-bench's; its `_ts` are decode tok/s, of a test without
    decoding prefill tok/s. Without any sample, `failure` says why.

    `ttft_ms`, `prefill_ts` and what follows are medians of the rounds. `speed_up`: decode ÷ that of the plain cell
    in the same rounds. `same_text`: as the plain cell's, greedily (None: nothing to compare). `peak`: measured read
    bandwidth in bytes per second. `noisy`: the rounds differ by more than 10 %.
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
    same_text: bool | None = None
    short: bool = False
    noisy: bool = False
    drafts_off: DraftsOff | None = None
    failure: str = ""
    cell: BenchCell


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All of a benchmark."""

    version: int = VERSION
    environment: Environment
    rounds: int
    results: tuple[Result, ...]


def report_of(
    environment: Environment,
    rounds: int,
    cells: Sequence[BenchCell],
    measured: Sequence[Measurement],
    models: Mapping[Setup, ModelInfo],
    failed: Mapping[BenchCell, str],
) -> Report:
    """Return the figures of the `cells` that were measured, at least once, or `failed` (why). `models`: as loaded."""
    by_cell: dict[BenchCell, list[Measurement]] = {cell: [] for cell in cells}
    for one in sorted(measured, key=attrgetter("round")):
        by_cell[one.cell].append(one)
    results: list[Result] = []
    for cell, its in by_cell.items():
        if its or cell in failed:
            figures: dict[str, Any] = {"n_prompt": cell.test.n_prompt, "n_gen": cell.test.n_gen}
            figures |= _model_figures(models.get(cell.setup))
            figures |= _figures(cell, its, by_cell.get(cell.plain, []))
            results.append(_result(cell, environment, figures | {"failure": failed.get(cell, "")}))
    return Report(environment=environment, rounds=rounds, results=tuple(results))


def _result(cell: BenchCell, environment: Environment, figures: Mapping[str, Any]) -> Result:
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
        draft_filename=setup.draft if cell.drafters in ("auto", "draft") else "",
        cores=setup.cores,
        memory_policy=setup.memory_policy,
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


def _figures(cell: BenchCell, lines: Sequence[Measurement], plain: Sequence[Measurement]) -> dict[str, Any]:
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
        "same_text": _same_text(samples, plain) if cell != cell.plain else None,
        "short": any(one.short for one in samples),
        "noisy": has_drifted(min(rates), max(rates)),
        "drafts_off": samples[-1].drafts_off,
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
    """Read what `cpuchat bench --json` printed. Raises UsageError."""
    hint = "Give the JSON file of an earlier run."
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise UsageError(f"{shown(file)} is too large.", hint)
        found = msgspec.json.decode(file.read_bytes(), type=prepared(Report))
    except OSError as error:
        raise UsageError(f"Cannot read {shown(file)}: {error.strerror}.", hint) from None
    except msgspec.MsgspecError as error:
        raise UsageError(f"{shown(file)} is not a result of `cpuchat bench --json`: {error}.", hint) from None
    if found.version != VERSION:
        raise UsageError(f"{shown(file)} was written by another version of cpuchat.", "Measure again.")
    return found


REGRESSION: int = 1
"""Exit code of `cpuchat bench --diff` when a figure is slower."""
MIN = 0.02
"""Share below which a difference never counts."""

Figure = Literal["decode", "prefill"]
Verdict = Literal["faster", "slower", "same"]


class SpeedDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of one figure of one cell in tok/s. `change` as a share of the old one (−0.05: 5 % slower); `needed` is
    what it must exceed to be believed."""

    old: Result
    new: Result
    figure: Figure
    before: float
    after: float
    needed: float

    @property
    def change(self) -> float:
        return self.after / self.before - 1

    @property
    def verdict(self) -> Verdict:
        if abs(self.change) <= self.needed:
            return "same"
        return "faster" if self.change > 0 else "slower"


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """All differences, and the cells that only one of the benchmarks has measured."""

    differences: tuple[SpeedDifference, ...]
    only_old: tuple[Result, ...]
    only_new: tuple[Result, ...]

    @property
    def regressed(self) -> bool:
        return any(one.verdict == "slower" for one in self.differences)


def compare_reports(old: Report, new: Report) -> Diff:
    """Compare the cells that both have. A difference counts when it exceeds 2 % and the spread (largest less smallest
    round) of both."""
    before = {_key(one): one for one in old.results if not one.failure}
    after = {_key(one): one for one in new.results if not one.failure}
    differences: list[SpeedDifference] = []
    for key, one in before.items():
        if (other := after.get(key)) is not None:
            differences += _differences(one, other)
    return Diff(
        differences=tuple(differences),
        only_old=tuple(one for key, one in before.items() if key not in after),
        only_new=tuple(one for key, one in after.items() if key not in before),
    )


def _key(result: Result) -> tuple[object, ...]:
    """Identify a cell on any machine: paths differ, the files' names do not."""
    setup = msgspec.structs.replace(
        result.cell.setup, model=Path(result.model_filename).name, draft=Path(result.draft_filename).name
    )
    return (setup, result.drafters, result.test, result.cell.test.n_gen)


def _differences(old: Result, new: Result) -> list[SpeedDifference]:
    decodes = old.decode_ts is not None and new.decode_ts is not None
    figures: tuple[tuple[Figure, Sequence[float], Sequence[float]], ...] = (
        ("decode", old.samples_ts if decodes else (), new.samples_ts if decodes else ()),
        ("prefill", old.prefill_samples_ts, new.prefill_samples_ts),
    )
    found: list[SpeedDifference] = []
    for figure, before, after in figures:
        if before and after and min(before) > 0:
            middle, last = statistics.median(before), statistics.median(after)
            spread = max(max(before) - min(before), max(after) - min(after))
            needed = max(MIN, spread / middle)
            found.append(SpeedDifference(old=old, new=new, figure=figure, before=middle, after=last, needed=needed))
    return found
