"""Measures what passes cost on this machine: synthetic layers of every usual tensor type, through the real engine.

Needs no model and no download: models of random weights are written into the cache folder, loaded by a worker of their
own, and deleted. For every type a few layers that caches do not hold tell its rate by tokens; many narrow layers tell
what a pass takes beside its products, and with a long context, attention.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TypeVar

from cpuchat.backend.loading import load_to_measure
from cpuchat.backend.local import LocalBackend
from cpuchat.base import paths
from cpuchat.base.errors import DoesNotFit, Interrupted, MeasureFailed, from_code
from cpuchat.base.processes import is_set_within
from cpuchat.costs.fit import Observation
from cpuchat.hardware.placement.placement import Placement, PlacementSpec
from cpuchat.models.costs import CostLog
from cpuchat.models.file_names import engine_replaced
from cpuchat.models.synthetic.model import Shape, header_of, write_model
from cpuchat.models.traffic import model_work
from cpuchat.protocol.messages import Failed, LoadOptions, Measure
from cpuchat.protocol.model_info import ModelWork

BUDGET_SECONDS = 16.0
_ROUNDS = 3
_SHORT_SECONDS = 0.5  # what takes less is measured after the warm-up in any case
_MUCH_WAIT = 0.05
"""Share of a pass for which threads waited for other programs, from which on it is disturbed."""
_STEPS = 8  # tokens decoded one by one
_LONG = 1536  # tokens of context in which attention is measured
_PREFIX = "probe."  # of the folder of its models, in the cache folder
_OLD_SECONDS = 3600
_SLICE_SECONDS, _PAUSE_SECONDS = 0.4, 0.5
"""Seconds of work from which on a slice ends, which take less than one with the last pass; and those after it."""
T = TypeVar("T")

Tell = Callable[[int, int, str], None]
"""(models done, models to do, what is measured next)"""


@dataclass(frozen=True)
class Pass:
    """`n` tokens at once after `depth` others; 1: one by one."""

    n: int
    depth: int = 0


@dataclass(frozen=True)
class Case:
    """A model, its passes by importance, and its share of the time."""

    what: str
    shape: Shape
    quantization: str
    passes: tuple[Pass, ...]
    share: float

    @property
    def work(self) -> ModelWork:
        return model_work(header_of(self.shape, self.quantization))


LAYERS = Shape(
    name="layers", architecture="qwen2", n_layer=5, n_embd=1536, n_head=12, n_head_kv=2, n_ff=4352, n_vocab=2048,
    tied=True,
)  # fmt: skip
"""Between the widths of models of 0.5B and of 3B: kernels that are not repacked depend on it by a quarter. No powers of
two, whose rows share few cache lines."""
_NARROW = Shape(
    name="narrow", architecture="llama", n_layer=12, n_embd=256, n_head=16, n_head_kv=2, n_ff=256, n_vocab=2048,
    tied=True, head=64,
)  # fmt: skip
_EXPERTS = Shape(
    name="experts", architecture="qwen3moe", n_layer=3, n_embd=1024, n_head=8, n_head_kv=2, n_ff=768, n_vocab=2048,
    tied=True, head=128, n_expert=24, n_expert_used=4,
)  # fmt: skip
TYPES = ("Q4_K", "Q6_K", "Q8_0", "F16", "Q5_0", "Q4_0", "Q5_K", "IQ4_XS", "IQ4_NL", "Q3_K", "Q2_K")
_OF_EXPERTS = ("Q4_K", "Q8_0", "MXFP4")
_PASSES = tuple(Pass(n) for n in (1, 8, 4, 2, 16, 128, 32))
_OTHERS = (Pass(1), Pass(128), Pass(1, _LONG), Pass(128, _LONG), Pass(8), Pass(8, _LONG))


def cases() -> list[Case]:
    """Return what is measured."""
    share = 0.93 / (len(TYPES) + len(_OF_EXPERTS))
    found = [Case("attention", _NARROW, "Q8_0", _OTHERS, 0.07)]
    found += [Case(kind, LAYERS, kind, _PASSES, share) for kind in TYPES]
    return found + [Case(f"{kind} experts", _EXPERTS, kind, _PASSES, share) for kind in _OF_EXPERTS]


class CostProbe:
    """Measures the cores of a placement once. After `stop`, `run` raises Interrupted. `beside`: in the background of an
    app, in slices of under a second with pauses, until other programs compute; every case is kept there."""

    def __init__(
        self, spec: PlacementSpec, tell: Tell = lambda done, of, what: None, *, beside: CostLog | None = None
    ) -> None:
        self._spec = spec
        self._tell = tell
        self._beside = beside
        self._spent = self._slice_began = 0.0  # seconds of work
        self._backend = LocalBackend()
        self._stopped, self._end = False, asyncio.Event()

    def stop(self) -> None:
        self._stopped = True
        self._end.set()
        self._backend.kill()

    async def run(self, budget: float = BUDGET_SECONDS, types: Collection[str] | None = None) -> list[Observation]:
        """Return the passes measured in about `budget` seconds, with fewer `types` of tensors in less; [] if it gave
        way to other programs. Raises Interrupted; MeasureFailed, WorkerDied: no engine, or no place for its models."""
        todo = [one for one in cases() if types is None or one.what in {"attention", *types}]
        found = [*self._beside.part] if self._beside is not None else []
        known = [one.work for one in found]
        try:
            with probe_folder() as folder:
                for done, case in enumerate(todo):
                    if case.work in known:
                        continue
                    self._tell(done, len(todo), case.what)
                    try:
                        now = await self._measure(case, folder, budget * case.share)
                    except DoesNotFit:
                        continue  # the others tell enough
                    if self._beside is not None and is_disturbed(now):
                        return []
                    found += now
                    if self._beside is not None:
                        await asyncio.to_thread(self._beside.probed, found, is_whole=False)
        except OSError as error:
            raise MeasureFailed(f"The probe's models cannot be written: {error.strerror}.") from None
        finally:
            self._stopped = True  # a file that is still being written
            await self._backend.close()
        return found

    async def _measure(self, case: Case, folder: Path, seconds: float) -> list[Observation]:
        until = self._spent + seconds
        file = folder / f"{case.shape.name}-{case.shape.n_layer}-{case.quantization}.gguf"
        try:
            writing = asyncio.to_thread(
                write_model, file, case.shape, case.quantization, cancelled=lambda: self._stopped
            )
            await self._spend(writing)
            n_ctx = max(one.depth + max(one.n, _STEPS) for one in case.passes)
            options = LoadOptions(n_ctx=-(-n_ctx // 256) * 256)
            await self._spend(load_to_measure(self._backend, file, options, self._spec, lambda: self._stopped))
            return await self._rounds(case, until, seconds)
        finally:
            file.unlink(missing_ok=True)

    async def _spend(self, work: Awaitable[T]) -> T:
        """Await what belongs to the budget, and pause in the background once that was most of a slice."""
        began = monotonic()
        found = await work
        self._spent += monotonic() - began
        if self._beside is not None and self._spent - self._slice_began > _SLICE_SECONDS:
            self._slice_began = self._spent
            await is_set_within(self._end, _PAUSE_SECONDS)
            if self._stopped:
                raise Interrupted("Stopped.")
        return found

    async def _rounds(self, case: Case, until: float, warm_up: float) -> list[Observation]:
        """Return the best time of each pass after a warm-up: what disturbs makes it slower. What takes long is measured
        once when time is short, or not at all on slow cores, and what other programs disturbed again: `warm_up` is the
        most seconds in which the warm-up begins passes, or what is measured again."""
        work = case.work
        found: dict[Pass, list[Observation]] = {}
        last = max(until, self._spent) + warm_up
        # The warm-up builds graphs and wakes threads.
        for one in sorted(case.passes, key=lambda one: one.depth + max(one.n, _STEPS)):
            if not found or self._spent < last:
                found[one] = [await self._time(one, work)]
        for number in range(1, _ROUNDS + 1):
            for one in (one for one in case.passes if one in found):
                expected = found[one][0].seconds * (_STEPS if one.n == 1 else 1)
                if self._spent + expected > until and (number > 1 or expected > _SHORT_SECONDS):
                    continue
                found[one].append(await self._time(one, work))
        for one, times in found.items():
            while _best(times).cpu_wait > _MUCH_WAIT and len(times) < 2 * _ROUNDS and self._spent < last:
                times.append(await self._time(one, work))
        return [_best(times) for times in found.values()]

    async def _time(self, one: Pass, work: ModelWork) -> Observation:
        alone, steps = one.n == 1, _STEPS if one.n == 1 else 1
        command = Measure(n_prompt=0 if alone else one.n, n_gen=_STEPS if alone else 0, depth=one.depth)
        found = await self._spend(self._backend.measure(command))
        if self._stopped:
            raise Interrupted("Stopped.")
        if isinstance(found, Failed):
            raise from_code(found.code, found.message, found.hint)
        return Observation(
            work=work,
            n_tokens=one.n,
            n_past=one.depth + _STEPS / 2 if alone else one.depth,
            n_outputs=None if alone else 1,
            seconds=found.seconds / steps,
            cpu_wait=found.cpu_wait or 0.0,
        )


def _best(times: Sequence[Observation]) -> Observation:
    return min(times[1:] or times, key=lambda one: one.seconds)


@contextlib.contextmanager
def probe_folder() -> Iterator[Path]:
    """Make a folder for the models of a probe, and delete it; those of probes that were killed too. Raises OSError."""
    cache = paths.cache_dir()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in cache.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _OLD_SECONDS:
                shutil.rmtree(old)
    with tempfile.TemporaryDirectory(dir=cache, prefix=_PREFIX) as folder:
        yield Path(folder)


def is_disturbed(found: Sequence[Observation]) -> bool:
    """Return whether other programs ran during most of the passes."""
    return statistics.median(one.cpu_wait for one in found) > _MUCH_WAIT


async def probe_costs(probe: CostProbe, placement: Placement) -> int:
    """Measure, and `save_passes`. Raises as `CostProbe.run` and `save_passes`."""
    found = await probe.run()
    return await asyncio.to_thread(save_passes, found, placement)


def save_passes(found: Sequence[Observation], placement: Placement) -> int:
    """Save what a probe measured with a placement; return the number of passes, 0 where other programs ran. Raises
    MeasureFailed: another build of the engine was installed meanwhile."""
    if not found or is_disturbed(found):
        return 0
    if engine_replaced():
        raise MeasureFailed("The engine was updated.", "Restart cpuchat.")
    CostLog(placement.cpus, placement.memory_policy.words).probed(found)
    return len(found)
