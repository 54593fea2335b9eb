"""Samples memory traffic and power while an answer is written; cheap enough for several samples a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from cpuchat.hardware.counters import CannotCount, Counter, Kernel, open_power, open_traffic
from cpuchat.hardware.sysfs import ROOT
from cpuchat.telemetry.machine import Bandwidth, MachineSample, Power
from cpuchat.telemetry.metric import Metric, missing

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology

MIN_SECONDS = 0.25
"""Minimum interval between two readings; in between the last figure stays."""
RETRY_SECONDS = 60.0
"""Seconds until a counter that did not open is tried again: a module may have been loaded in the meantime."""
_MAX_BYTES_PER_S, _MAX_WATTS = 2e12, 2000.0
"""Maximum plausible traffic of a machine, and watts of a package: above, a reading is wrong."""

V = TypeVar("V", Bandwidth, Power)


def counter_states(topology: Topology, root: Path = ROOT, kernel: Kernel | None = None) -> tuple[Metric[str], ...]:
    """Try the counters of traffic and power; return the name of each, or why it does not open. Never raises."""
    found: list[Metric[str]] = []
    for opener in (open_traffic, open_power):
        try:
            counter = opener(topology, root, kernel)
            counter.close()
            found.append(Metric(counter.name))
        except Exception as error:
            found.append(missing(_problem(error)))
    return tuple(found)


def _problem(error: Exception) -> str:
    return str(error) if isinstance(error, CannotCount) else f"unexpected {type(error).__name__}: {error}"


class _Watched(Generic[V]):
    """One counter: open, or to be opened again later, with its last figure, or `why` there is none; it never raises.
    `figure`: computes the figure from the counter's name, seconds and amounts; None: it is impossible."""

    def __init__(
        self, opener: Callable[[], Counter], figure: Callable[[str, float, tuple[float, ...]], V | None]
    ) -> None:
        self.why = "not opened yet"
        self._opener = opener
        self._figure = figure
        self._counter: Counter | None = None
        self._value: V | None = None
        self._read_at = 0.0
        self._tried_at: float | None = None

    def sample(self, now: float) -> V | None:
        try:
            if (counter := self._counter) is None:
                if self._tried_at is None or not 0 <= now - self._tried_at < RETRY_SECONDS:
                    self._tried_at = now
                    self._counter = self._opener()
                    self._counter.growth()  # what it counted until now is of no interval
                    self._read_at, self.why = now, f"{self._counter.name} needs a second sample"
            elif not 0 <= now - self._read_at < MIN_SECONDS:
                seconds, self._read_at = now - self._read_at, now
                amounts = tuple(amount for amount in counter.growth() if amount is not None)
                is_known = seconds > 0 and len(amounts) == len(counter.groups)
                self._value = self._figure(counter.name, seconds, amounts) if is_known else None
                self.why = "" if self._value is not None else f"{counter.name} has no reading at the moment"
        except Exception as error:
            self._release()
            self.why = _problem(error)
        return self._value

    def close(self) -> None:
        self._release()
        self._tried_at = None

    def _release(self) -> None:
        counter, self._counter, self._value = self._counter, None, None
        if counter is not None:
            counter.close()


class Monitor:
    """Samples the machine's counters, which are opened at the first sample. `sample` may be called at any rate."""

    def __init__(self, topology: Topology, root: Path = ROOT, *, kernel: Kernel | None = None) -> None:
        self._max_watts = _MAX_WATTS * max(len(topology.packages), 1)
        self._bandwidth = _Watched(lambda: open_traffic(topology, root, kernel), self._traffic)
        self._power = _Watched(lambda: open_power(topology, root, kernel), self._watts)
        self._joules = 0.0

    def _traffic(self, name: str, seconds: float, amounts: tuple[float, ...]) -> Bandwidth | None:
        total, *each = (amount / seconds for amount in (sum(amounts), *amounts))
        if total > _MAX_BYTES_PER_S:
            return None
        return Bandwidth(total, name, *each) if len(each) == 2 else Bandwidth(total, name)

    def _watts(self, name: str, seconds: float, amounts: tuple[float, ...]) -> Power | None:
        [joules] = amounts
        if joules > self._max_watts * seconds:
            return None
        self._joules += joules
        return Power(joules / seconds, self._joules, name)

    def sample(self, now: float | None = None) -> MachineSample:
        """Return the newest figures; never raises. `now`: monotonic seconds of one clock; None: time.monotonic()."""
        when = time.monotonic() if now is None else now
        bandwidth, power = self._bandwidth.sample(when), self._power.sample(when)
        return MachineSample(
            bandwidth=bandwidth, power=power, no_bandwidth=self._bandwidth.why, no_power=self._power.why
        )

    def close(self) -> None:
        """Release the counters; a later sample opens them again."""
        self._bandwidth.close()
        self._power.close()
