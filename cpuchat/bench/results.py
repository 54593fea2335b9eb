"""The results of a benchmark: its environment, its report, and the comparison of two reports. The report has medians
and spreads of each cell's rounds, with llama-bench's field names.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from cpuchat import __version__
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import UsageError
from cpuchat.base.paths import shown
from cpuchat.bench.matrix import BenchCell, Setup
from cpuchat.bench.sample import Sample
from cpuchat.config.settings import Settings
from cpuchat.hardware.bandwidth.theoretical import theoretical
from cpuchat.hardware.memory import total_bytes
from cpuchat.hardware.topology import read_topology
from cpuchat.measure.difference import Difference, Verdict, compare, rounds_for
from cpuchat.measure.turns import has_scattered
from cpuchat.models.gguf.header import model_files
from cpuchat.models.library.deleting import content_sha256
from cpuchat.models.ollama import file_name
from cpuchat.protocol.model_info import EngineInfo, ModelInfo
from cpuchat.protocol.reasons import DraftsOff
from cpuchat.telemetry import units


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a model, by the name that its content has everywhere; `size` in bytes."""

    path: str
    size: int
    sha256: str


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
            ModelFile(path=str(part), size=part.stat().st_size, sha256=content_sha256(part))
            for path in dict.fromkeys(models)
            if path
            for part in model_files(Path(path))
        ),
        settings={name: tables[name] for name in ("engine", "speculation")},
    )


class Measurement(NamedTuple):
    """A sample of a cell."""

    cell: BenchCell
    sample: Sample


VERSION = 1
_MAX_BYTES = 256 << 20


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One cell with its samples, a round each; without any, `failure` says why.

    Of the model as loaded: `model_type` (`qwen2 1.5B Q8_0`), size in bytes and parameters, CPUs, and `peak`, the
    measured read bandwidth in bytes per second. `speed_up`: decode ÷ that of the plain cell in the same rounds, and
    whether it is `sure` which is faster. `same_text`: as the plain cell's, greedily (None: nothing to compare)."""

    cell: BenchCell
    samples: tuple[Sample, ...] = ()
    model_type: str = ""
    model_size: int = 0
    model_n_params: int = 0
    n_threads: int = 0
    cpus: tuple[int, ...] = ()
    peak: float | None = None
    speed_up: float | None = None
    sure: bool = False
    same_text: bool | None = None
    failure: str = ""

    @property
    def name(self) -> str:
        return file_name(Path(self.cell.setup.model))

    def rates(self, figure: Figure) -> list[float]:
        """Return tok/s of each round that has any; [] where the test is not about that."""
        return [rate for one in self.samples if (rate := getattr(one, figure))]

    def median(self, figure: str) -> float | None:
        """Return the median of a figure of the samples; None where none has it."""
        known = [value for one in self.samples if (value := getattr(one, figure)) is not None]
        return statistics.median(known) if known else None

    @property
    def noisy(self) -> bool:
        """The rounds scatter by more than 10 %, or other programs used the cores."""
        return has_scattered([one.rate for one in self.samples]) or any(one.disturbed for one in self.samples)

    @property
    def staggered(self) -> bool:
        """At no moment of a round all of its users were answered."""
        return any(one.staggered for one in self.samples)

    @property
    def drafts_off(self) -> DraftsOff | None:
        return self.samples[-1].drafts_off if self.samples else None

    @property
    def acceptance(self) -> float | None:
        drafted = sum(one.draft_n for one in self.samples)
        return sum(one.draft_n_accepted for one in self.samples) / drafted if drafted else None

    @property
    def tokens_per_pass(self) -> float | None:
        passes = sum(one.passes for one in self.samples)
        n_gen = max(self.cell.test.n_gen, 1)  # the prompt gives the first one of each answer
        return sum(one.predicted_n - one.predicted_n // n_gen for one in self.samples) / passes if passes else None


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
    by_cell: dict[BenchCell, list[Sample]] = {cell: [] for cell in cells}
    for one in measured:
        by_cell[one.cell].append(one.sample)
    results: list[Result] = []
    for cell, samples in by_cell.items():
        if not samples and cell not in failed:
            continue
        plain = by_cell.get(cell.plain, []) if cell != cell.plain else []
        both = [(a, b) for a, b in zip(plain, samples, strict=False) if a.rate > 0 and b.rate > 0]
        gain = compare([a.rate for a, _ in both], [b.rate for _, b in both], asked=len(cells)) if both else None
        result = Result(
            cell=cell,
            samples=tuple(samples),
            speed_up=gain.ratio if gain is not None else None,
            sure=gain is not None and gain.verdict in ("faster", "slower"),
            same_text={one.text for one in samples} == {one.text for one in plain} if plain and samples else None,
            failure=failed.get(cell, ""),
        )
        if (model := models.get(cell.setup)) is not None:
            result = msgspec.structs.replace(
                result,
                model_type=f"{model.architecture} {units.parameters(model.n_params)} {model.quantization}",
                model_size=model.size,
                model_n_params=model.n_params,
                n_threads=model.n_threads,
                cpus=model.cpus,
                peak=None if model.peak_estimated else model.peak_read or None,
            )
        results.append(result)
    return Report(environment=environment, rounds=rounds, results=tuple(results))


def as_json(report: Report) -> dict[str, Any]:
    """Return the report, of a test and its rates with llama-bench's names and units, too; `_ts` are decode tok/s, of a
    test without decoding prefill tok/s."""
    found: dict[str, Any] = msgspec.to_builtins(report)
    for facts, one in zip(found["results"], report.results, strict=True):
        test = one.cell.test
        ns, rates = [1e9 * sample.seconds for sample in one.samples], [sample.rate for sample in one.samples]
        facts |= {
            "model_filename": one.cell.setup.model,
            "n_prompt": one.samples[0].prompt_n if one.samples else test.n_prompt,
            "n_gen": one.samples[0].predicted_n if one.samples else test.n_gen,
            "n_depth": test.depth,
            "samples_ns": ns,
            "samples_ts": rates,
            "noisy": one.noisy,
            "staggered": one.staggered,
            "acceptance": one.acceptance,
            "tokens_per_pass": one.tokens_per_pass,
            **{name: one.median(name) for name in _MEDIANS},
        }
        for name, values in (("ns", ns), ("ts", rates)):
            facts[f"avg_{name}"] = statistics.fmean(values) if values else 0.0
            facts[f"stddev_{name}"] = statistics.stdev(values) if len(values) > 1 else 0.0
    return found


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


ASKED: Final = 1.25
"""Questions that a figure counts as: some more, as many rounds of a machine that scatters by 3 % outweigh what is
assumed of the noise but slowly."""
GAIN, MOST_ROUNDS = 0.05, 30
"""The difference, as a share, that users look for, and the most rounds that are asked for to find it."""
REGRESSION: int = 1
"""Exit code of `cpuchat bench --diff` when a figure is slower."""
Figure = Literal["decode", "prefill"]
_FIGURES: Final[tuple[Figure, ...]] = ("decode", "prefill")
_MEDIANS: Final = (*_FIGURES, "ttft_ms", "each", "bandwidth", "utilization", "memory")


class SpeedDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of one figure of one cell in tok/s, and what their rounds tell."""

    old: Result
    new: Result
    figure: Figure
    before: float
    after: float
    difference: Difference

    @property
    def disturbed(self) -> bool:
        return self.old.noisy or self.new.noisy

    @property
    def verdict(self) -> Verdict:
        """Nothing can be told of rounds that other programs disturbed."""
        return "noisy" if self.disturbed else self.difference.verdict


class Resolution(NamedTuple):
    """What runs of so many rounds tell of most figures: the `smallest` difference, as a share, that nine of ten runs
    show, and how many `rounds` of both show `GAIN`: those that were run, or more (None: over `MOST_ROUNDS`)."""

    smallest: float
    rounds: int | None


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """All differences, and the cells that only one of the benchmarks has measured."""

    differences: tuple[SpeedDifference, ...]
    only_old: tuple[Result, ...]
    only_new: tuple[Result, ...]

    @property
    def regressed(self) -> bool:
        return any(one.verdict == "slower" for one in self.differences)

    @property
    def resolution(self) -> Resolution | None:
        """Return what these runs can tell; None where other programs ran."""
        found = [one for one in self.differences if not one.disturbed]
        if not found:
            return None
        rounds = [(len(one.old.rates(one.figure)), len(one.new.rates(one.figure))) for one in found]
        smallest, most = statistics.median(one.difference.smallest for one in found), max(map(max, rounds))
        if smallest <= GAIN:
            return Resolution(smallest, most)
        errors = zip((one.difference.error for one in found), rounds, strict=True)
        scatter = statistics.median(error / math.sqrt(1 / n + 1 / m) for error, (n, m) in errors)
        return Resolution(smallest, rounds_for(GAIN, scatter, ASKED * len(found), MOST_ROUNDS, most + 1))


def compare_reports(old: Report, new: Report) -> Diff:
    """Compare the cells that both have."""
    before = {_key(one): one for one in old.results if not one.failure}
    after = {_key(one): one for one in new.results if not one.failure}
    both = [(one, after[key]) for key, one in before.items() if key in after]
    pairs: list[tuple[Result, Result, Figure]] = [
        (one, other, name) for one, other in both for name in _FIGURES if one.rates(name) and other.rates(name)
    ]
    return Diff(
        differences=tuple(
            SpeedDifference(
                old=one,
                new=other,
                figure=name,
                before=statistics.median(one.rates(name)),
                after=statistics.median(other.rates(name)),
                difference=compare(one.rates(name), other.rates(name), asked=ASKED * len(pairs), apart=True),
            )
            for one, other, name in pairs
        ),
        only_old=tuple(one for key, one in before.items() if key not in after),
        only_new=tuple(one for key, one in after.items() if key not in before),
    )


def _key(result: Result) -> BenchCell:
    """Identify a cell on any machine: paths differ, the files' names do not."""
    setup = result.cell.setup
    named = msgspec.structs.replace(setup, model=Path(setup.model).name, draft=Path(setup.draft).name)
    return msgspec.structs.replace(result.cell, setup=named)
