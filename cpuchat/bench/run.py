"""Runs a benchmark: one load per setup, its cells in rounds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import msgspec

from cpuchat.backend.loading import load_to_measure
from cpuchat.backend.local import LocalBackend
from cpuchat.base.errors import CpuchatError, Interrupted, MeasureFailed, WorkerDied, from_code
from cpuchat.bench.matrix import OFF, BenchCell, BenchPrompt, Setup, load
from cpuchat.bench.results import Environment, Measurement, Report, read_environment, report_of
from cpuchat.bench.sample import Sample, measure_cell
from cpuchat.config.settings import Settings
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.measure.turns import in_order
from cpuchat.models.ollama import file_name
from cpuchat.protocol.messages import LoadProgress
from cpuchat.protocol.model_info import ModelInfo

_CTX_STEP = 256
_TEMPLATE_TOKENS = 256


@dataclass
class BenchProgress:
    """How far a benchmark is. `what` is being measured; `done` of `total` measurements, `seconds_left` from what cells
    `took` so far (None: not known yet)."""

    what: str = ""
    done: int = 0
    total: int = 0
    seconds_left: float | None = None
    took: dict[BenchCell, float] = field(default_factory=dict)


class Bench:
    """Measures `cells`. `measured` are the measurements that count, `failed` the reasons of the cells that could not
    be measured. `tell` is called whenever something changed."""

    def __init__(
        self, cells: Sequence[BenchCell], rounds: int, chosen: Settings, *, prompts: Sequence[BenchPrompt] | None = None
    ) -> None:
        self.cells, self.rounds, self.progress = list(cells), rounds, BenchProgress()
        self.measured: list[Measurement] = []
        self.failed: dict[BenchCell, str] = {}
        self._models: dict[Setup, ModelInfo] = {}
        self._environment: Environment | None = None
        self._chosen = chosen
        self._prompts = load() if prompts is None else list(prompts)
        self.tell: Callable[[], None] = lambda: None
        self._backend = LocalBackend()
        self._stopped = False

    def report(self) -> Report:
        """Return what was measured so far, once `run` has begun to measure."""
        assert self._environment is not None
        measured = Counter(one.cell for one in self.measured if one.cell not in self.failed)
        rounds = min(measured.values(), default=self.rounds)  # fewer when it was stopped
        return report_of(self._environment, rounds, self.cells, self.measured, self._models, self.failed)

    async def stop(self, *, kill: bool = False) -> None:
        """Stop as soon as possible; `run` raises Interrupted then."""
        self._stopped = True
        if kill:
            self._backend.kill()
        else:
            await self._backend.cancel()

    async def run(self) -> None:
        """Measure all cells. A setup that fails does not keep others from being measured. Raises Interrupted:
        stopped; `measured` has what was measured; EngineMismatch, WorkerDied, ModelNotFound: nothing can be
        measured."""
        try:
            failure = await self._backend.start()
            if self._stopped:
                raise Interrupted("Stopped.")
            if failure is not None:
                raise from_code(failure.code, failure.message, failure.hint)
            if self._backend.engine is None:
                raise WorkerDied("The inference worker did not start.", "Run the command again.")
            models = [path for cell in self.cells for path in (cell.setup.model, cell.setup.draft)]
            self._environment = read_environment(self._backend.engine, models, self._chosen)
            for _, cells in groupby(self.cells, lambda cell: cell.setup):
                await self._measure_setup(list(cells))
        finally:
            await self._backend.close()

    async def _measure_setup(self, cells: list[BenchCell]) -> None:
        """Measure the cells of one setup in rounds, after one that only warms up, every other one backwards. A cell
        that fails is left out of the next; after a crash the model is loaded again."""
        try:
            await self._load(cells)
            for number in range(self.rounds + 1):
                for cell in in_order(cells, number):
                    if cell in self.failed:
                        continue
                    if self._backend.model is None:
                        await self._load(cells)
                    sample = await self._measure(cell)
                    if sample is not None and number:
                        self.measured.append(Measurement(cell, sample))
                    self.tell()
        except Interrupted:
            raise
        except CpuchatError as error:
            if self._stopped:
                raise Interrupted("Stopped.") from None
            self.failed = {cell: str(error) for cell in cells} | self.failed
            self.tell()

    async def _load(self, cells: list[BenchCell]) -> None:
        setup = cells[0].setup
        self.progress.what = f"loading {file_name(Path(setup.model))}"
        self.tell()
        chosen = setup.settings(self._chosen)
        options = msgspec.structs.replace(
            chosen.load_options(setup.draft),
            n_ctx=max(chosen.engine.n_ctx, self._context(cells)),
            parallel=max(cell.test.users for cell in cells),
            calibrate=any(cell.drafters != OFF for cell in cells),
        )

        def tell(event: LoadProgress) -> None:
            share = f" {100 * event.done // event.total} %" if event.total > 1 else ""
            self.progress.what = f"{event.phase} {file_name(Path(setup.model))}{share}"
            self.tell()

        self._models[setup] = await load_to_measure(
            self._backend, Path(setup.model), options, PlacementSpec.of(chosen), lambda: self._stopped, tell
        )

    def _context(self, cells: Sequence[BenchCell]) -> int:
        """Return the tokens that the longest test needs; a token has two bytes of a prompt at least."""
        random = [cell.test.depth + cell.test.n_prompt + cell.test.n_gen for cell in cells]
        kinds = {cell.test.name for cell in cells if cell.test.kind == "prompts"}
        longest = max((len(one.text.encode()) // 2 for one in self._prompts if one.kind in kinds), default=0)
        needed = max([*random, longest + _TEMPLATE_TOKENS + max(cell.test.n_gen for cell in cells) if kinds else 0])
        return -(-needed // _CTX_STEP) * _CTX_STEP

    async def _measure(self, cell: BenchCell) -> Sample | None:
        """Measure a cell once; None if it failed. Raises Interrupted."""
        progress, sample = self.progress, None
        progress.what = cell.words
        self.tell()
        start = time.monotonic()
        try:
            prompts = [one for one in self._prompts if one.kind == cell.test.name]
            sample = await measure_cell(self._backend, cell, prompts)
        except MeasureFailed as error:
            if not self._stopped:
                self.failed[cell] = str(error)
        if self._stopped:  # it may have been cut short
            raise Interrupted("Stopped.")
        progress.took[cell] = time.monotonic() - start
        progress.done += 1
        progress.total = len(self.cells) * (self.rounds + 1)
        mean = sum(progress.took.values()) / len(progress.took)
        progress.seconds_left = mean * (progress.total - progress.done)
        return sample
