"""The order in which counters are tried: the first that opens is used; when it fails later, the next takes over.

Memory bandwidth monitoring through resctrl: bytes of each L3 group since boot.

Files: Documentation/filesystems/resctrl.rst. They count for the whole machine; DMA by devices is not
included. On AMD the hardware has fewer counters than groups may want, and then files say words instead of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from cpuchat.hardware.counters.base import (
    ROOT,
    CannotCount,
    Counter,
    CounterRefusal,
    CounterSource,
    Deltas,
    Patience,
    PowerMeter,
)
from cpuchat.hardware.counters.perf_events import Kernel
from cpuchat.hardware.sysfs import read_text
from cpuchat.telemetry.machine import Bandwidth, Scope

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
    from cpuchat.hardware.counters.collector_file import CollectorFile
    from cpuchat.hardware.counters.perf_events import CoreCounters
    from cpuchat.hardware.counters.uncore import (
        AmdDataFabric,
        AmdMemoryControllers,
        HsmpFiles,
        HsmpMailbox,
        IntelMemoryControllers,
    )

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


MOUNT = "sys/fs/resctrl"
_MOUNT_IT = "`sudo mount -t resctrl resctrl /sys/fs/resctrl`"
_WORDS = ("Unavailable", "Unassigned", "Error")
_FAILURES = 10


class MemoryBandwidthMonitoring:
    """Reads `mbm_total_bytes` of every L3 group, over all control groups."""

    name = "mbm"
    scope: Scope = "machine"
    least_seconds = 0.5

    def __init__(self, topology: Topology, root: Path = ROOT) -> None:
        mount = root / MOUNT
        flags = topology.flags
        if flags and "cqm_mbm_total" not in flags:
            raise CannotCount("this CPU or virtual machine has no memory bandwidth monitoring")
        if not (mount / "info").is_dir():
            raise CannotCount("resctrl is not mounted", _MOUNT_IT)
        self._mount = mount
        numbers = _files(mount).keys()
        if not numbers:
            raise CannotCount("resctrl has no monitoring groups")
        # resctrl numbers L3 groups as the caches do; without those numbers only the sum can be told.
        order = [group.id for group in topology.l3_groups]
        self._order = [number for number in order if number is not None] if set(order) == numbers else []
        self._grown = Deltas()
        self._patience = Patience(_FAILURES)
        self._counts()

    def _counts(self) -> dict[int, int]:
        """Return bytes by L3 group number, ascending.

        Raises:
            CannotCount: a file holds no number.
        """
        sums: dict[int, int] = {}
        for number, files in sorted(_files(self._mount).items()):  # control groups come and go
            texts = [read_text(file) for file in files]
            wrong = next((text for text in texts if not text.isdigit() or len(text) > 20), None)
            if wrong is not None:
                raise _explained(wrong)
            sums[number] = sum(map(int, texts))
        if not sums:
            raise CannotCount("resctrl was unmounted", _MOUNT_IT)
        return sums

    def sample(self, now: float) -> Bandwidth | None:
        counts = self._patience.read(self._counts, CannotCount)
        if counts is None:  # a counter that was lent to another group comes back, from zero
            self._grown = Deltas()
            return None
        step = self._grown.step(now, counts.values())
        if step is None:
            return None
        seconds, grown = step
        by_number = dict(zip(counts, grown, strict=True))
        per_l3 = tuple(by_number[number] / seconds for number in self._order)
        return Bandwidth(sum(grown) / seconds, self.name, self.scope, per_l3=per_l3)

    def close(self) -> None:
        pass


def _files(mount: Path) -> dict[int, list[Path]]:
    """Return the files of each L3 group. A control group's count has its monitoring groups in it, but not other
    groups.
    """
    files: dict[int, list[Path]] = {}
    try:
        found = [*mount.glob("mon_data/mon_L3_*"), *mount.glob("*/mon_data/mon_L3_*")]
    except OSError:
        return {}
    for folder in sorted(found):
        number = folder.name.rpartition("_")[2]
        if number.isdigit() and (folder / "mbm_total_bytes").exists():
            files.setdefault(int(number), []).append(folder / "mbm_total_bytes")
    return files


def _explained(text: str) -> CannotCount:
    if not text:
        return CannotCount("its files are not readable", "`sudo chmod -R a+rX /sys/fs/resctrl/mon_data`")
    word = text if text in _WORDS else "an unknown value"
    how = {
        "Unavailable": "stop other monitoring such as pqos; the CPU has few counters",
        "Unassigned": "`echo default | sudo tee /sys/fs/resctrl/info/L3_MON/mbm_assign_mode`",
    }.get(word, "")
    return CannotCount(f"the counter reports {word}", how)
