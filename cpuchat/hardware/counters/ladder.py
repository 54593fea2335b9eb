"""The order in which counters are tried: the first that opens is used; when it fails later, the next takes over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from cpuchat.hardware.counters.base import ROOT, CannotCount, Counter, CounterRefusal, CounterSource, PowerMeter
from cpuchat.hardware.counters.kernel import Kernel

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology

PROCESS = "core counters"
"""Name of the counters that cover the inference process alone."""

S = TypeVar("S", bound=CounterSource)
Opener = tuple[str, Callable[[], S]]


class Ladder(Generic[S]):
    """Tries openers in order, each at most once, and keeps the reasons of those that failed."""

    def __init__(self, openers: Sequence[Opener[S]]) -> None:
        self._left = list(openers)
        self.refusals: list[CounterRefusal] = []

    def next(self) -> S | None:
        """Open the next source that works; None when none is left. Never raises."""
        while self._left:
            name, opener = self._left.pop(0)
            try:
                return opener()
            except Exception as error:  # a counter is never a reason to end the program
                self.refuse(name, error)
        return None

    def refuse(self, name: str, error: Exception) -> None:
        self.refusals.append(refusal(name, error))


def refusal(name: str, error: Exception) -> CounterRefusal:
    """Describe why a source failed."""
    if isinstance(error, CannotCount):
        return CounterRefusal(name, error.why, error.how)
    if isinstance(error, OSError):
        return CounterRefusal(name, (error.strerror or str(error) or type(error).__name__).lower())
    return CounterRefusal(name, f"unexpected {type(error).__name__}: {error}")


def theoretical_bandwidth(topology: Topology, root: Path = ROOT) -> float | None:
    """Return the theoretical bandwidth of all memory channels in bytes per second, to detect wrong units; None if
    unknown.

    A virtual machine's memory modules are not real.
    """
    if topology.virtual:
        return None
    from cpuchat.hardware.bandwidth.memory_modules import theoretical

    found = theoretical(topology, root)
    return found.bytes_per_s if found is not None else None


def counter_openers(
    topology: Topology,
    pid: int | None,
    root: Path = ROOT,
    *,
    kernel: Kernel | None = None,
    theoretical: float | None = None,
    collecting: bool = False,
) -> list[Opener[Counter]]:
    """Return every counter of memory traffic, best first.

    The collector's file comes first: who installed it wants it, and counters are few and shared. HSMP needs no
    rights, but knows no read and write; `collecting` (the collector itself, with rights) prefers exact counters.

    Args:
        pid: the inference process, for counters of one process; None leaves them out.
        theoretical: bytes per second of the whole machine, against counters of unclear unit.
    """
    from cpuchat.hardware.counters.amd_uncore import AmdDataFabric, AmdMemoryControllers
    from cpuchat.hardware.counters.collector_file import CollectorFile
    from cpuchat.hardware.counters.core_counters import CoreCounters
    from cpuchat.hardware.counters.hsmp import HsmpFiles, HsmpMailbox
    from cpuchat.hardware.counters.intel_uncore import IntelMemoryControllers
    from cpuchat.hardware.counters.resctrl import MemoryBandwidthMonitoring

    calls = kernel or Kernel()
    file: list[Opener[Counter]] = [("collector", lambda: CollectorFile(root, calls))]
    hsmp: list[Opener[Counter]] = [
        ("HSMP files", lambda: HsmpFiles(topology, root, theoretical)),
        ("HSMP mailbox", lambda: HsmpMailbox(topology, root, calls, theoretical)),
    ]
    uncore: list[Opener[Counter]] = [
        ("AMD memory controllers", lambda: AmdMemoryControllers(topology, root, calls)),
        ("AMD data fabric", lambda: AmdDataFabric(topology, root, calls)),
        ("Intel memory controllers", lambda: IntelMemoryControllers(topology, root, calls)),
    ]
    mbm: list[Opener[Counter]] = [("resctrl", lambda: MemoryBandwidthMonitoring(topology, root))]
    if collecting:
        return [*uncore, *hsmp, *mbm]
    process: list[Opener[Counter]] = [(PROCESS, lambda: CoreCounters(topology, pid, root, calls))]
    return [*file, *hsmp, *uncore, *mbm, *process]


def power_openers(
    topology: Topology, root: Path = ROOT, *, kernel: Kernel | None = None, collecting: bool = False
) -> list[Opener[PowerMeter]]:
    """Return every source of power, best first."""
    from cpuchat.hardware.counters.collector_file import CollectedPower
    from cpuchat.hardware.counters.power import HsmpPower, HsmpSensor, PackageEnergy, Rapl

    calls = kernel or Kernel()
    own: list[Opener[PowerMeter]] = [
        ("RAPL", lambda: Rapl(root, topology)),
        ("package energy", lambda: PackageEnergy(root, calls)),
        ("HSMP sensor", lambda: HsmpSensor(topology, root)),
        ("HSMP mailbox", lambda: HsmpPower(topology, root, calls)),
    ]
    return own if collecting else [("collector", lambda: CollectedPower(root, calls)), *own]


def open_best(openers: Sequence[Opener[S]]) -> tuple[S | None, tuple[CounterRefusal, ...]]:
    """Return the first source that opens, and why those before it do not. Never raises."""
    ladder = Ladder(openers)
    return ladder.next(), tuple(ladder.refusals)


def advice(refusals: Sequence[CounterRefusal], topology: Topology) -> str:
    """Return why there is no figure, in one sentence: the most useful of the refusals."""
    for one in refusals:
        if worth_trying(one, topology) and one.name != "collector":
            return f"{one.name}: {one.why}; {one.how}"
    if topology.virtual:
        return "virtual machines expose no such counters"
    return "no counter can be opened; see `cpuchat counters`" if refusals else "not opened yet"


def worth_trying(one: CounterRefusal, topology: Topology) -> bool:
    """Return whether the advice of the refusal can help. A virtual machine has no counters outside its cores, whatever
    is loaded or installed in it.
    """
    return bool(one.how) and (not topology.virtual or one.name == PROCESS)
