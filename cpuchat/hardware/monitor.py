"""Samples memory traffic and power while an answer is written; cheap enough for several samples a second.

Counters are tried in an order: the first that opens is used; when it fails later, the next takes over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from cpuchat.hardware.counters.base import ROOT, CannotCount, Counter, CounterRefusal
from cpuchat.hardware.counters.perf_events import Kernel
from cpuchat.telemetry.machine import Bandwidth, MachineSample, Power

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology

PROCESS = "core counters"
"""Name of the counters that cover the inference process alone."""

V = TypeVar("V", Bandwidth, Power)
Opener = tuple[str, Callable[[], Counter[V]]]


class Ladder(Generic[V]):
    """Tries openers in order, each at most once, and keeps the reasons of those that failed."""

    def __init__(self, openers: Sequence[Opener[V]]) -> None:
        self._left = list(openers)
        self.refusals: list[CounterRefusal] = []

    def next(self) -> Counter[V] | None:
        """Open the next source that works; None when none is left. Never raises."""
        while self._left:
            name, opener = self._left.pop(0)
            try:
                return opener()
            except Exception as error:  # a counter is never a reason to end the program
                self.refuse(name, error)
        return None

    def refuse(self, name: str, error: Exception) -> None:
        """Keep why a source failed."""
        how = error.how if isinstance(error, CannotCount) else ""
        match error:
            case CannotCount():
                why = error.why
            case OSError():
                why = (error.strerror or str(error) or type(error).__name__).lower()
            case _:
                why = f"unexpected {type(error).__name__}: {error}"
        self.refusals.append(CounterRefusal(name, why, how))


def theoretical_bandwidth(topology: Topology, root: Path = ROOT) -> float | None:
    """Return the theoretical bandwidth of all channels in bytes per second; None if unknown, as in virtual machines."""
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
) -> list[Opener[Bandwidth]]:
    """Return every counter of memory traffic, best first.

    The collector's file comes first: who installed it wants it, and counters are few and shared. HSMP needs no rights,
    but knows no read and write; `collecting` (the collector itself, with rights) prefers exact counters. `pid`: the
    inference process, for counters of one process; None leaves them out. `theoretical`: bytes per second of the whole
    machine, against counters of unclear unit.
    """
    from cpuchat.hardware.counters.collector_file import CollectorFile
    from cpuchat.hardware.counters.hsmp import HsmpFiles, HsmpMailbox
    from cpuchat.hardware.counters.perf_events import CoreCounters
    from cpuchat.hardware.counters.resctrl import MemoryBandwidthMonitoring
    from cpuchat.hardware.counters.uncore import AmdDataFabric, AmdMemoryControllers, IntelMemoryControllers

    calls = kernel or Kernel()
    file: list[Opener[Bandwidth]] = [("collector", lambda: CollectorFile(root, calls))]
    hsmp: list[Opener[Bandwidth]] = [
        ("HSMP files", lambda: HsmpFiles(topology, root, theoretical)),
        ("HSMP mailbox", lambda: HsmpMailbox(topology, root, calls, theoretical)),
    ]
    uncore: list[Opener[Bandwidth]] = [
        ("AMD memory controllers", lambda: AmdMemoryControllers(topology, root, calls)),
        ("AMD data fabric", lambda: AmdDataFabric(topology, root, calls)),
        ("Intel memory controllers", lambda: IntelMemoryControllers(topology, root, calls)),
    ]
    mbm: list[Opener[Bandwidth]] = [("resctrl", lambda: MemoryBandwidthMonitoring(topology, root))]
    if collecting:
        return [*uncore, *hsmp, *mbm]
    process: list[Opener[Bandwidth]] = [(PROCESS, lambda: CoreCounters(topology, pid, root, calls))]
    return [*file, *hsmp, *uncore, *mbm, *process]


def power_openers(
    topology: Topology, root: Path = ROOT, *, kernel: Kernel | None = None, collecting: bool = False
) -> list[Opener[Power]]:
    """Return every source of power, best first."""
    from cpuchat.hardware.counters.collector_file import CollectedPower
    from cpuchat.hardware.counters.hsmp import HsmpPower, HsmpSensor
    from cpuchat.hardware.counters.power import PackageEnergy, Rapl

    calls = kernel or Kernel()
    own: list[Opener[Power]] = [
        ("RAPL", lambda: Rapl(root, topology)),
        ("package energy", lambda: PackageEnergy(root, calls)),
        ("HSMP sensor", lambda: HsmpSensor(topology, root)),
        ("HSMP mailbox", lambda: HsmpPower(topology, root, calls)),
    ]
    return own if collecting else [("collector", lambda: CollectedPower(root, calls)), *own]


def open_best(openers: Sequence[Opener[V]]) -> tuple[Counter[V] | None, tuple[CounterRefusal, ...]]:
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
    """Return whether the advice of the refusal can help: a virtual machine has no counters outside its cores."""
    return bool(one.how) and (not topology.virtual or one.name == PROCESS)


RETRY_SECONDS = 60.0
"""Seconds until all counters are tried again if none opened: a module may have been loaded in the meantime."""
IMPOSSIBLE = 1.5
"""Multiple of the theoretical bandwidth above which a figure is a wrong unit or a broken counter."""
STALE_SECONDS = 3.0
"""Seconds after which a figure without a successor is no longer shown."""
PATIENCE = 3
"""Consecutive impossible figures before the next source is tried."""
SILENCE = 20
"""Consecutive samples without a figure before the next source is tried."""


class _Watched(Generic[V]):
    """One kind of figure: the source in use, its last value, and the ladder for when it fails.

    Whatever a source raises ends that source only: figures never end an answer.
    """

    def __init__(self, openers: Callable[[], list[Opener[V]]], check: Callable[[V], str]) -> None:
        self._openers = openers
        self._check = check
        self._ladder: Ladder[V] = Ladder([])
        self._source: Counter[V] | None = None
        self._value: V | None = None
        self._value_at = 0.0
        self._asked_at = 0.0
        self._tried_at: float | None = None
        self._impossible = 0
        self._silent = 0
        self.refusals: tuple[CounterRefusal, ...] = ()

    @property
    def name(self) -> str:
        """Return the source in use, "" without one."""
        return self._source.name if self._source is not None else ""

    @property
    def waiting(self) -> str:
        """Return why the source in use has no figure."""
        return "has no reading at the moment" if self._silent > 1 or self._impossible else "needs a second sample"

    def sample(self, now: float) -> V | None:
        if self._source is None and not self._open(now):
            return None
        source = self._source
        if source is None or 0 <= now - self._asked_at < source.least_seconds:
            return self._value
        try:
            value = source.sample(now)
            self._guard(value)
        except Exception as error:
            self._ladder.refuse(source.name, error)
            self._release()
            return self.sample(now)  # the ladder gets shorter each time
        self._asked_at = now
        if value is not None and not self._impossible:
            self._value, self._value_at = value, now
        elif now - self._value_at > max(STALE_SECONDS, 3 * source.least_seconds):
            self._value = None
        return self._value

    def _open(self, now: float) -> bool:
        if self._tried_at is None or not 0 <= now - self._tried_at < RETRY_SECONDS:
            try:
                self._ladder = Ladder(self._openers())
            except Exception as error:
                self._ladder = Ladder([])
                self._ladder.refuse("counters", error)
            self._tried_at = now
        self._source = self._ladder.next()
        self._value, self._value_at, self._asked_at = None, now, float("-inf")
        self._impossible = self._silent = 0
        self.refusals = tuple(self._ladder.refusals)
        return self._source is not None

    def _guard(self, value: V | None) -> None:
        if value is None:
            self._silent += 1
            if self._silent >= SILENCE:
                raise CannotCount("no readings; another program may be using the counters")
            return
        self._silent = 0
        why = self._check(value)
        self._impossible = self._impossible + 1 if why else 0
        if self._impossible >= PATIENCE:
            raise CannotCount(why)

    def close(self) -> None:
        self._release()
        self._tried_at = None

    def _release(self) -> None:
        source, self._source, self._value = self._source, None, None
        if source is not None:
            try:
                source.close()
            except Exception:  # closing what has failed may fail as well
                pass


def _check_power(value: Power) -> str:
    sensible = 0 <= value.watts < math.inf and 0 <= value.joules < math.inf
    return "" if sensible else "its readings are not valid numbers"


class Monitor:
    """Samples the machine's counters. `sample` may be called at any rate: each source is sampled at most as often as it
    allows, and its last figure is kept in between. Sources are opened at the first sample.

    Args:
        pid: the inference process, for counters of one process; None: no such counters.
        root: replaces `/` in tests.
        theoretical: bytes per second that all memory can carry; None: found out from the machine.
        collecting: only what is counted here, exact counters first (hardware.collector).
    """

    def __init__(
        self,
        topology: Topology,
        pid: int | None = None,
        root: Path = ROOT,
        *,
        kernel: Kernel | None = None,
        theoretical: float | None = None,
        collecting: bool = False,
    ) -> None:
        self._topology = topology
        self._theoretical = theoretical
        self._bandwidth: _Watched[Bandwidth] = _Watched(
            lambda: counter_openers(
                topology, pid, root, kernel=kernel, theoretical=self._most(root), collecting=collecting
            ),
            self._check,
        )
        self._power: _Watched[Power] = _Watched(
            lambda: power_openers(topology, root, kernel=kernel, collecting=collecting), _check_power
        )
        self._joules = self._earlier_joules = 0.0

    def _most(self, root: Path) -> float | None:
        if self._theoretical is None:
            self._theoretical = theoretical_bandwidth(self._topology, root)
        return self._theoretical

    def _check(self, value: Bandwidth) -> str:
        most = self._theoretical
        if not 0 <= value.total < math.inf:
            return "its readings are not valid numbers"
        if most is None or value.total <= IMPOSSIBLE * most:
            return ""
        return f"reads {value.total / 1e9:.0f} GB/s, above the theoretical peak of {most / 1e9:.0f}"

    @property
    def theoretical(self) -> float | None:
        """Return bytes per second that all memory can carry; None before the first sample and where it is not known."""
        return self._theoretical

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the sources in use, of bandwidth, then of power; () where none opened, and before the first sample."""
        return tuple(name for name in (self._bandwidth.name, self._power.name) if name)

    @property
    def refusals(self) -> tuple[CounterRefusal, ...]:
        """Return why better sources than the ones in use cannot be read; those of bandwidth first."""
        return self._bandwidth.refusals + self._power.refusals

    def sample(self, now: float | None = None) -> MachineSample:
        """Return the newest figures. Never raises. `now`: monotonic seconds, of the same clock in every call; None:
        time.monotonic().
        """
        when = time.monotonic() if now is None else now
        bandwidth, power = self._bandwidth.sample(when), self._counted_on(self._power.sample(when))
        return MachineSample(
            bandwidth=bandwidth,
            power=power,
            no_bandwidth="" if bandwidth is not None else self._why(self._bandwidth),
            no_power="" if power is not None else self._why(self._power),
        )

    def _why(self, watched: _Watched[Bandwidth] | _Watched[Power]) -> str:
        return f"{watched.name} {watched.waiting}" if watched.name else advice(watched.refusals, self._topology)

    def _counted_on(self, power: Power | None) -> Power | None:
        """Continue the joule count across sources, each of which starts at zero."""
        if power is None:
            return None
        if power.joules < self._joules:
            self._earlier_joules += self._joules
        self._joules = power.joules
        return replace(power, joules=power.joules + self._earlier_joules) if self._earlier_joules else power

    def close(self) -> None:
        """Release the counters; a later sample opens them again."""
        self._bandwidth.close()
        self._power.close()
