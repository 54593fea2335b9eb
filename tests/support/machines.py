"""Machines for the hardware screen: simulated topologies with figures that somebody could have measured there."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from cpuchat.backend.base import DEFAULT_PLACEMENT
from cpuchat.base.errors import Interrupted
from cpuchat.config.servers import Source
from cpuchat.hardware.diagnostics import DiagnosticFacts
from cpuchat.hardware.numa.residency import Residency
from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.hardware.topology import Topology
from cpuchat.models.kernels import MeasuredProducts
from cpuchat.protocol.messages import AnyEvent, Failed, LoadOptions
from cpuchat.protocol.model_info import EngineInfo, ModelInfo
from cpuchat.telemetry.machine import NO_PEAKS, Bandwidth, MachineSample, Peak, Peaks, Power
from cpuchat.tui.hardware.screen import Computing, MachineReader
from tests.support import scripted_backend
from tests.support.scripted_backend import MODEL, ScriptedBackend

ON_8_CORES = msgspec.structs.replace(MODEL, cpus=tuple(range(8)), peak_read=0.0)
WITH_DRAFT = msgspec.structs.replace(scripted_backend.WITH_DRAFT, cpus=ON_8_CORES.cpus, peak_read=0.0, pass_ms=())


def on(topology: Topology, model: ModelInfo = ON_8_CORES) -> ModelInfo:
    """Return `model` on one thread of every allowed core."""
    cpus = choose_cores(topology).cpus
    return msgspec.structs.replace(model, cpus=cpus, n_threads=len(cpus))


def surveyed(topology: Topology, one: float = 25.3, group: float = 49.9, socket: float = 367.0) -> Peaks:
    """Return what a survey of such a server measures, in GB/s."""

    def read(gb: float, cpus: Collection[int]) -> Peak:
        return Peak(gb * 1e9, tuple(cpus))

    cpus, groups = choose_cores(topology).cpus, list(topology.l3_groups)
    return Peaks(
        one_core=read(one, cpus[:1]),
        all_cores=read(min(one * len(cpus), socket * len(topology.packages)), cpus),
        l3_group=read(group, groups[0].cpus) if len(groups) > 1 else None,
    )


class OnMachine(ScriptedBackend):
    """A worker under a memory policy; its process is this one. A load with `bad_cores` fails."""

    bad_cores = "l3:1"

    def __init__(self, model: ModelInfo, memory: str = "local", refused: str = "", **more: Any) -> None:
        super().__init__(model=model, **more)
        self._engine = EngineInfo(version="scripted", memory_policy=memory, policy_refused=refused)

    @property
    def pid(self) -> int | None:
        return os.getpid()

    async def load(
        self, path: Source, options: LoadOptions, spec: PlacementSpec = DEFAULT_PLACEMENT
    ) -> AsyncGenerator[AnyEvent, None]:
        if spec.cores == self.bad_cores:
            self.loads.append((path, options))
            self.specs.append(spec)
            self._model = None
            yield Failed(code="usage", message="These cores cannot be used.", hint="Choose others.")
            return
        async for event in super().load(path, options, spec):
            yield event

    @property
    def engine(self) -> EngineInfo | None:
        return self._engine


class Counters:
    """A monitor with figures that stay the same."""

    def __init__(self, sample: MachineSample) -> None:
        self._sample = sample
        self.closed = False

    def sample(self) -> MachineSample:
        return self._sample

    def close(self) -> None:
        self.closed = True


SERVER_COUNTERS = MachineSample(bandwidth=Bandwidth(288e9, "umc"), power=Power(214.5, 90_000.0, "rapl"))
NO_COUNTERS = MachineSample(
    no_bandwidth="no counter opens here; cpuchat doctor says why", no_power="energy is counted for root only"
)


class FixtureReader(MachineReader):
    """Reads the tree below `root`; what cannot come from files is given here: `measured` is what a survey finds (an
    exception: how it fails), `known`: it was found before."""

    def __init__(
        self,
        root: Path,
        measured: Callable[[Topology], Peaks] = surveyed,
        known: bool = False,
        placed: Residency | None = None,
        sample: MachineSample = NO_COUNTERS,
    ) -> None:
        super().__init__(root)
        self._measured = measured
        self._known = known
        self.gate = threading.Semaphore(0)
        """Lets a measurement take one step for each release."""
        self._placed = placed
        self.counters = Counters(sample)
        self.products: dict[str, MeasuredProducts] = {}

    def facts(self, spec: PlacementSpec, loaded: Computing | None = None) -> DiagnosticFacts:
        found = super().facts(spec, loaded)
        return replace(found, peaks=self._measured(found.topology) if self._known else NO_PEAKS)

    def now(self, facts: DiagnosticFacts, on: Computing, seen: object) -> tuple[DiagnosticFacts, object]:
        return replace(facts, peaks=self._measured(facts.topology) if self._known else NO_PEAKS), seen

    def measure(self, topology: Topology, on: Computing, cancelled: Callable[[], bool]) -> Iterator[str]:
        for step in ("1 core", "all cores"):
            yield f"measuring {step}"
            self.gate.acquire()
            if cancelled():
                raise Interrupted("Measurement cancelled.")
        self._known = True

    def kernels(self, on: Computing | None, module: str) -> tuple[str, dict[str, MeasuredProducts]]:
        return "AVX2", self.products

    def placement(self, pid: int, files: Collection[Path]) -> Residency | None:
        return self._placed
