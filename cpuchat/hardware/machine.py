"""What the hardware screen shows of the machine, and the reader of it. Blocks: call it in threads."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cpuchat.base.errors import UsageError
from cpuchat.hardware.bandwidth.read_bandwidth import Survey, cached_survey, known_peak
from cpuchat.hardware.bandwidth.theoretical import Theoretical, theoretical
from cpuchat.hardware.knobs import huge_pages
from cpuchat.hardware.numa.residency import Residency, read_residency
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import ROOT, Topology, read_topology
from cpuchat.telemetry.machine import Peak


@dataclass(frozen=True)
class MachineFacts:
    """The machine. `theoretical`, `survey` and `peak` (read bandwidth of all cores) None: unknown; `huge_pages` the
    kernel's setting for transparent huge pages, "" where unknown."""

    topology: Topology
    theoretical: Theoretical | None = None
    survey: Survey | None = None
    huge_pages: str = ""
    peak: Peak | None = None


class MachineReader:
    """Reads the machine below `root`."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root

    def facts(self, spec: PlacementSpec | None = None) -> MachineFacts:
        """Read the machine; never raises for what is unknown. The survey is that under the memory policy of `spec`."""
        topology = read_topology(self.root)
        usual = meant = place(topology, PlacementSpec())
        if spec is not None:
            with suppress(UsageError):
                meant = place(topology, spec, with_draft=spec.names_draft_cores)
        known = cached_survey(topology, policy=meant.memory_policy.words, root=self.root)
        peak = known_peak(usual.cpus, usual.memory_policy.words, root=self.root)
        return MachineFacts(topology, theoretical(topology), known, huge_pages(self.root), peak)

    def placement(self, pid: int, files: Collection[Path]) -> Residency | None:
        """Return where the worker's memory is; None where the kernel does not report it."""
        return read_residency(pid, files, self.root)
