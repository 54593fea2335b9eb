"""What the hardware screen shows of the machine, and the reader of it. Blocks: call it in threads."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cpuchat.base.errors import UsageError
from cpuchat.hardware.bandwidth.theoretical import Theoretical, theoretical
from cpuchat.hardware.knobs import huge_pages
from cpuchat.hardware.numa.residency import Residency, read_residency
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import ROOT, Topology, read_topology
from cpuchat.telemetry.machine import NO_PEAKS, Peaks


@dataclass(frozen=True)
class MachineFacts:
    """The machine. `theoretical` None: unknown; `huge_pages` the kernel's setting for transparent huge pages, "" where
    unknown."""

    topology: Topology
    theoretical: Theoretical | None = None
    peaks: Peaks = NO_PEAKS
    huge_pages: str = ""


class MachineReader:
    """Reads the machine below `root`; `known` tells the peaks, as `measure.peak.known_of`."""

    def __init__(self, root: Path = ROOT, known: Callable[..., Peaks] = lambda *_, **__: NO_PEAKS) -> None:
        self.root = root
        self._peaks = known

    def facts(self, spec: PlacementSpec | None = None) -> MachineFacts:
        """Read the machine; never raises for what is unknown. The peaks are those under the memory policy of `spec`."""
        topology = read_topology(self.root)
        meant = place(topology, PlacementSpec())
        if spec is not None:
            with suppress(UsageError):
                meant = place(topology, spec, with_draft=spec.names_draft_cores)
        peaks = self._peaks(topology, policy=meant.memory_policy.words, root=self.root)
        return MachineFacts(topology, theoretical(topology), peaks, huge_pages(self.root))

    def placement(self, pid: int, files: Collection[Path]) -> Residency | None:
        """Return where the worker's memory is; None where the kernel does not report it."""
        return read_residency(pid, files, self.root)
