"""Reads the machine for the hardware screen. Blocks: call it in threads.

Samples memory traffic and power while an answer is written; cheap enough for several samples a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from cpuchat.hardware.counters.base import CannotCount, CounterRefusal, CounterSource
from cpuchat.hardware.counters.ladder import (
    Ladder,
    Opener,
    advice,
    counter_openers,
    power_openers,
    theoretical_bandwidth,
)
from cpuchat.hardware.counters.perf_events import Kernel
from cpuchat.telemetry.machine import Bandwidth, MachineSample, Power

if TYPE_CHECKING:
    from cpuchat.hardware.bandwidth.memory_modules import Theoretical
    from cpuchat.hardware.bandwidth.peaks import Survey
    from cpuchat.hardware.numa.residency import Residency
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

    def facts(self) -> MachineFacts:
        """Read the machine; never raises for what is unknown."""
        from cpuchat.hardware.bandwidth.memory_modules import theoretical
        from cpuchat.hardware.bandwidth.peaks import cached_survey, known_peak
        from cpuchat.hardware.placement.placement import PlacementSpec, place
        from cpuchat.hardware.topology import read_topology
        from cpuchat.hardware.tuning.knobs import THP, value_of

        topology = read_topology(self.root)
        huge = value_of(self.root, f"{THP}/enabled")
        survey = cached_survey(topology, root=self.root)
        usual = place(topology, PlacementSpec())
        peak = known_peak(usual.cpus, usual.memory.words, root=self.root)
        return MachineFacts(topology, theoretical(topology, self.root), survey, huge, peak)

    def placement(self, pid: int, files: Collection[Path]) -> Residency | None:
        """Return where the worker's memory is; None where the kernel does not report it."""
        from cpuchat.hardware.numa.residency import read_residency

        return read_residency(pid, files, self.root)

    def survey(
        self, topology: Topology, memory: str, progress: Callable[[int, int, str], None], cancelled: Callable[[], bool]
    ) -> Survey:
        """Measure the read bandwidth under the memory policy `memory` (in words), about 12 seconds.

        Raises:
            ProbeFailed: it could not be measured.
            Interrupted: `cancelled` said so.
        """
        from cpuchat.hardware.bandwidth.peaks import survey

        return survey(topology, progress, memory=memory, cancelled=cancelled, root=self.root)


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

V = TypeVar("V", Bandwidth, Power)
V_co = TypeVar("V_co", Bandwidth, Power, covariant=True)


class _Asked(CounterSource, Protocol[V_co]):
    def sample(self, now: float) -> V_co | None: ...


class _Watched(Generic[V]):
    """One kind of figure: the source in use, its last value, and the ladder for when it fails.

    Whatever a source raises ends that source only: figures never end an answer.
    """

    def __init__(self, openers: Callable[[], list[Opener[_Asked[V]]]], check: Callable[[V], str]) -> None:
        self._openers = openers
        self._check = check
        self._ladder: Ladder[_Asked[V]] = Ladder([])
        self._source: _Asked[V] | None = None
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
            self._drop(error)
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

    def _drop(self, error: Exception) -> None:
        assert self._source is not None
        self._ladder.refuse(self._source.name, error)
        self._release()

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
            lambda: list(
                counter_openers(topology, pid, root, kernel=kernel, theoretical=self._most(root), collecting=collecting)
            ),
            self._check,
        )
        self._power: _Watched[Power] = _Watched(
            lambda: list(power_openers(topology, root, kernel=kernel, collecting=collecting)), _check_power
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
        """Return the sources in use: of bandwidth, then of power. Empty where none opened, and before the first
        sample.
        """
        return tuple(name for name in (self._bandwidth.name, self._power.name) if name)

    @property
    def refusals(self) -> tuple[CounterRefusal, ...]:
        """Return why better sources than the ones in use cannot be read; those of bandwidth first."""
        return self._bandwidth.refusals + self._power.refusals

    def sample(self, now: float | None = None) -> MachineSample:
        """Return the newest figures. Never raises.

        Args:
            now: monotonic seconds, of the same clock in every call; None: time.monotonic().
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
