"""Runs a benchmark: one load per setup, its cells by the protocol, every measurement into the journal. Measures a draft
model with its target before it is used, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Final

import msgspec

from cpuchat.backend.loading import load_to_measure
from cpuchat.backend.local import LocalBackend
from cpuchat.base.errors import CpuchatError, Interrupted, MeasureFailed, UsageError, WorkerDied, from_code
from cpuchat.base.paths import shown
from cpuchat.bench.matrix import KINDS, OFF, BenchCell, BenchPrompt, BenchWorkload, Matrix, load, setups_of
from cpuchat.bench.results import (
    Finished,
    Header,
    Journal,
    Loaded,
    Measurement,
    Report,
    Result,
    benchmark_key,
    cached_journal,
    read_environment,
)
from cpuchat.bench.sample import BenchSpeech, Sample, measure_cell
from cpuchat.config.settings import Settings
from cpuchat.hardware.monitor import Monitor
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.hardware.topology import read_topology
from cpuchat.protocol.messages import LoadProgress
from cpuchat.protocol.reasons import DraftsOff
from cpuchat.telemetry.rounds import GROUP, Protocol

_CTX_STEP = 256
_TEMPLATE_TOKENS = 256


@dataclass
class BenchProgress:
    """How far a benchmark is. `what` is being measured, `note` a message to show once; `done` of `total` measurements,
    `seconds_left` from those of the same cell so far (None: not known yet)."""

    what: str = ""
    note: str = ""
    done: int = 0
    total: int = 0
    seconds_left: float | None = None
    took: dict[int, float] = field(default_factory=dict)


class Bench:
    """Measures `cells`. `failed` are the reasons of the cells that could not be measured.

    Args:
        file: the journal; None: one in `folder`, by what is measured.
        fresh: forget what an earlier run has measured.
        tell: called whenever something changed.
    """

    def __init__(
        self,
        cells: Sequence[BenchCell],
        rounds: int,
        chosen: Settings,
        *,
        folder: Path,
        file: Path | None = None,
        fresh: bool = False,
        prompts: Sequence[BenchPrompt] | None = None,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        self.cells, self.rounds, self.progress = list(cells), rounds, BenchProgress()
        self.failed: dict[int, str] = {}
        self.journal: Journal
        self._chosen = chosen
        self._folder, self._file, self._fresh = folder, file, fresh
        self._prompts = load() if prompts is None else list(prompts)
        self._tell = tell
        self._backend = LocalBackend()
        self._speech = BenchSpeech(chosen.speech) if any(cell.speech for cell in cells) else None
        self._stopped = False
        self._numbers = {cell: number for number, cell in enumerate(self.cells)}

    async def stop(self, *, kill: bool = False) -> None:
        """Stop as soon as possible; `run` raises Interrupted then."""
        self._stopped = True
        if kill:
            self._backend.kill()
        else:
            await self._backend.cancel()

    async def run(self) -> None:
        """Measure what the journal does not have yet. A setup that fails does not keep others from being measured.

        Raises:
            Interrupted: stopped; the journal has what was measured.
            UsageError: the journal belongs to another benchmark, or cannot be written.
            EngineMismatch, WorkerDied, ModelNotFound: nothing can be measured.
        """
        try:
            await self._open_journal()
            if not self.journal.finished:
                await self._run()
                if not self.failed:
                    self.journal.append(Finished())
        finally:
            if self._speech is not None:
                await self._speech.close()
            await self._backend.close()

    async def _open_journal(self) -> None:
        failure = await self._backend.start()
        if self._stopped:
            raise Interrupted("Stopped.")
        if failure is not None:
            raise from_code(failure.code, failure.message, failure.hint)
        if self._backend.engine is None:
            raise WorkerDied("The inference worker did not start.", "Run the command again.")
        models = [path for cell in self.cells for path in (cell.setup.model, cell.setup.draft)]
        environment = read_environment(self._backend.engine, models, self._chosen)
        key = benchmark_key(self.cells, self.rounds, self._prompts, environment)
        journal = self.journal = Journal(self._file or cached_journal(self._folder, key))
        header = Header(key=key, cells=tuple(self.cells), rounds=self.rounds, environment=environment)
        if self._file is not None and self._file.exists() and not self._fresh:
            if journal.header is None and self._file.stat().st_size:
                raise UsageError(f"{shown(self._file)} is not a benchmark's journal.", "Choose another file.")
            if journal.header is not None and journal.header.key != key:
                raise UsageError(
                    f"{shown(self._file)} belongs to another benchmark: its settings, files or engine differ.",
                    "Choose another file, or add --fresh to overwrite it.",
                )
        if self._fresh or journal.header is None or (journal.finished and self._file is None):
            journal.begin(header)
        elif journal.measurements:
            done = f"{len(journal.measurements)} of {len(self.cells) * self.rounds}"
            self.progress.note = f"Resuming: {done} measurements are in the journal."

    async def _run(self) -> None:
        monitor = Monitor(read_topology()) if self._chosen.hardware.counters else None
        setups = [list(cells) for _, cells in groupby(self.cells, lambda cell: cell.setup)]
        try:
            for cells in setups:
                if not self._open(cells):
                    continue
                try:
                    await self._measure_setup(cells, monitor)
                except Interrupted:
                    raise
                except CpuchatError as error:
                    if self._stopped:
                        raise Interrupted("Stopped.") from None
                    for cell in self._open(cells):
                        self.failed.setdefault(self._numbers[cell], str(error))
                    self._tell()
        finally:
            if monitor is not None:
                monitor.close()

    def _open(self, cells: Sequence[BenchCell]) -> list[BenchCell]:
        known = self.journal.measurements
        rounds = range(1, self.rounds + 1)
        return [cell for cell in cells if any((self._numbers[cell], number) not in known for number in rounds)]

    async def _measure_setup(self, cells: list[BenchCell], monitor: Monitor | None) -> None:
        """Measure the cells of one setup. One that fails is left out; after a crash the model is loaded again."""
        left, at = self._open(cells), cells[0]
        await self._load(cells)

        async def measure(cell: BenchCell) -> Sample:
            nonlocal at
            at = cell
            return await self._measure(cell, monitor)

        def keep(cell: BenchCell, number: int, sample: Sample, noisy: bool) -> None:
            self.journal.append(Measurement(cell=self._numbers[cell], round=number, sample=sample, noisy=noisy))
            self._tell()

        while left:
            done = {(self.cells[number], r) for number, r in self.journal.measurements}
            try:
                await Protocol(self.rounds, measure, lambda sample: sample.rate, keep).run(left, done)
                return
            except MeasureFailed as error:
                self.failed[self._numbers[at]] = str(error)
                left.remove(at)
                self._tell()
            if left and self._backend.model is None:
                await self._load(cells)

    async def _load(self, cells: list[BenchCell]) -> None:
        setup = cells[0].setup
        self.progress.what = f"loading {Path(setup.model).name}"
        self._tell()
        chosen = setup.settings(self._chosen)
        options = msgspec.structs.replace(
            chosen.load_options(setup.draft),
            n_ctx=max(chosen.engine.n_ctx, self._context(cells)),
            calibrate=any(cell.drafters != OFF for cell in cells),
        )

        def tell(event: LoadProgress) -> None:
            share = f" {100 * event.done // event.total} %" if event.total > 1 else ""
            self.progress.what = f"{event.phase} {Path(setup.model).name}{share}"
            self._tell()

        model = await load_to_measure(
            self._backend, Path(setup.model), options, PlacementSpec.of(chosen), lambda: self._stopped, tell
        )
        if self._speech is not None and any(cell.speech for cell in cells):
            await self._speech.prepare(model)
        self.journal.append(Loaded(cell=self._numbers[cells[0]], model=model))

    def _context(self, cells: Sequence[BenchCell]) -> int:
        """Return the tokens that the longest test needs; a token has two bytes of a prompt at least."""
        random = [cell.test.depth + cell.test.n_prompt + cell.test.n_gen for cell in cells]
        kinds = {cell.test.name for cell in cells if cell.test.kind == "prompts"}
        longest = max((len(one.text.encode()) // 2 for one in self._prompts if one.kind in kinds), default=0)
        needed = max([*random, longest + _TEMPLATE_TOKENS + max(cell.test.n_gen for cell in cells) if kinds else 0])
        return -(-needed // _CTX_STEP) * _CTX_STEP

    def _left(self) -> int:
        """Return about how many measurements are left: those of the rounds, the anchors, warm-ups of later setups."""
        pairs = len(self.cells) * self.rounds - len(self.journal.measurements)
        begun = {self.cells[number].setup for number in self.progress.took}
        later = sum(cell.setup not in begun for cell in self._open(self.cells))
        return max(0, pairs) + -(-max(0, pairs) // GROUP) + later

    async def _measure(self, cell: BenchCell, monitor: Monitor | None) -> Sample:
        if self._stopped:
            raise Interrupted("Stopped.")
        progress, number = self.progress, self._numbers[cell]
        progress.what = cell.words
        self._tell()
        start = time.monotonic()
        try:
            prompts = [one for one in self._prompts if one.kind == cell.test.name]
            sample = await measure_cell(self._backend, cell, prompts, monitor, self._speech)
        except MeasureFailed:
            if self._stopped:
                raise Interrupted("Stopped.") from None
            raise
        if self._stopped:  # it may have been cut short
            raise Interrupted("Stopped.")
        progress.took[number] = time.monotonic() - start
        progress.done += 1
        progress.total = progress.done + self._left()
        mean = sum(progress.took.values()) / len(progress.took)
        progress.seconds_left = mean * (progress.total - progress.done)
        self._tell()
        return sample


DEPTHS: Final = (2, 4, 8)
TOKENS: Final = 64
ROUNDS: Final = 3
WORTH: Final = 1.02
"""Speed-up from which on a draft model is worth keeping."""
_ADAPTS: Final = 1.05
"""A fixed depth must be faster than the adaptive one by this factor: the best depth changes with the text."""


class KindResult(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of prompts. `plain` in tok/s; `acceptance`, `tokens_per_pass` and `speed_up` are those of `depth`, the
    fastest (0: adaptive); `speed_ups` are those of all depths."""

    kind: str
    plain: float
    depth: int
    speed_up: float
    speed_ups: dict[int, float]
    acceptance: float | None
    tokens_per_pass: float | None


class PairResult(msgspec.Struct, frozen=True, kw_only=True):
    """All kinds. `off` is why the adaptive depth drafted nothing, None when it did."""

    kinds: tuple[KindResult, ...]
    off: DraftsOff | None = None

    @property
    def depth(self) -> int:
        """Return the depth to use for all kinds (0: adaptive)."""
        depths = set.intersection(*(set(one.speed_ups) for one in self.kinds)) if self.kinds else {0}
        best = max(sorted(depths), key=self.speed_up_with)
        return 0 if self.speed_up_with(0) * _ADAPTS >= self.speed_up_with(best) else best

    @property
    def speed_up(self) -> float:
        """Return that with `depth`."""
        return self.speed_up_with(self.depth)

    def speed_up_with(self, depth: int) -> float:
        """Return the geometric mean of the kinds' speed-ups with a depth; 0 when it was not measured."""
        found = [one.speed_ups.get(depth, 0.0) for one in self.kinds]
        return statistics.geometric_mean(found) if found and all(found) else 0.0

    @property
    def worth_keeping(self) -> bool:
        return self.speed_up >= WORTH


def pair_bench(
    target: Path, draft: Path, chosen: Settings, folder: Path, tell: Callable[[], None] = lambda: None
) -> Bench:
    """Return the benchmark of a pair: plain, adaptive and fixed depths, a prompt of each kind.

    The engine runs as the settings say, with what tuning found for the target.
    """
    [setup] = setups_of(target, Matrix(), chosen)
    setup = msgspec.structs.replace(setup, draft=str(draft))
    cells: list[BenchCell] = []
    for kind in KINDS:
        test = BenchWorkload.of_prompts(kind, TOKENS)
        cells.append(BenchCell(setup=setup, test=test, drafters=OFF))
        cells += [BenchCell(setup=setup, test=test, drafters="draft", draft_depth=depth) for depth in (0, *DEPTHS)]
    one_of_each = {prompt.kind: prompt for prompt in reversed(load())}
    prompts = [one_of_each[kind] for kind in KINDS]
    return Bench(cells, ROUNDS, chosen, folder=folder, prompts=prompts, tell=tell)


def pair_result(report: Report) -> PairResult:
    """Return what a finished `pair_bench` says."""
    kinds: list[KindResult] = []
    for kind in KINDS:
        rows = [one for one in report.results if one.test == kind and not one.failure]
        plain = next((one for one in rows if one.drafters == OFF), None)
        drafted = [one for one in rows if one.speed_up is not None]
        if plain is not None and plain.decode_ts and drafted:
            kinds.append(_kind_result(kind, plain.decode_ts, drafted))
    reasons = (one.drafts_off for one in report.results if one.drafts_off is not None)
    return PairResult(kinds=tuple(kinds), off=next(reasons, None))


def _kind_result(kind: str, plain: float, drafted: list[Result]) -> KindResult:
    best = max(drafted, key=lambda one: one.speed_up or 0.0)
    return KindResult(
        kind=kind,
        plain=plain,
        depth=best.cell.draft_depth,
        speed_up=best.speed_up or 0.0,
        speed_ups={one.cell.draft_depth: one.speed_up or 0.0 for one in drafted},
        acceptance=best.acceptance,
        tokens_per_pass=best.tokens_per_pass,
    )
