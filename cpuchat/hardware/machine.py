"""What the hardware screen shows of the machine, and the reader of it. Blocks: call it in threads."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.base.errors import UsageError

if TYPE_CHECKING:
    from cpuchat.hardware.bandwidth.read_bandwidth import Survey
    from cpuchat.hardware.bandwidth.theoretical import Theoretical
    from cpuchat.hardware.numa.residency import Residency
    from cpuchat.hardware.placement.placement import PlacementSpec
    from cpuchat.hardware.topology import Topology
    from cpuchat.telemetry.machine import Peak

ROOT = Path("/")


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
        from cpuchat.hardware.bandwidth.read_bandwidth import cached_survey, known_peak
        from cpuchat.hardware.bandwidth.theoretical import theoretical
        from cpuchat.hardware.knobs import THP, value_of
        from cpuchat.hardware.placement.placement import PlacementSpec, place
        from cpuchat.hardware.topology import read_topology

        topology = read_topology(self.root)
        huge = value_of(self.root, f"{THP}/enabled")
        usual = place(topology, PlacementSpec())
        meant = usual
        if spec is not None:
            with suppress(UsageError):
                meant = place(topology, spec, with_draft=spec.names_draft_cores)
        survey = cached_survey(topology, memory=meant.memory.words, root=self.root)
        peak = known_peak(usual.cpus, usual.memory.words, root=self.root)
        return MachineFacts(topology, theoretical(topology), survey, huge, peak)

    def placement(self, pid: int, files: Collection[Path]) -> Residency | None:
        """Return where the worker's memory is; None where the kernel does not report it."""
        from cpuchat.hardware.numa.residency import read_residency

        return read_residency(pid, files, self.root)
