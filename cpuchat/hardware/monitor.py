"""Samples memory traffic and power while an answer is written; cheap enough for several samples a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from cpuchat.hardware.counters.perf_events import ROOT, CannotCount, Counter, Kernel
from cpuchat.hardware.counters.uncore import open_power, open_traffic
from cpuchat.telemetry.machine import Bandwidth, MachineSample, Power

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology

MIN_SECONDS = 0.25
"""Minimum interval between two readings; in between the last figure stays."""
RETRY_SECONDS = 60.0
"""Seconds until a counter that did not open is tried again: a module may have been loaded in the meantime."""
IMPOSSIBLE = 1.5
"""Multiple of the theoretical bandwidth above which a figure is wrong."""
_MAX_WATTS = 2000.0
"""Maximum plausible watts of a package."""

V = TypeVar("V", Bandwidth, Power)


@dataclass(frozen=True, slots=True)
class CounterState:
    """Whether a counter opens: its `name`, "" if it does not; then `why`, and `how` to make it readable."""

    name: str = ""
    why: str = ""
    how: str = ""

    def __str__(self) -> str:
        return self.name or f"n/a: {self.why}" + (f"; {self.how}" if self.how else "")


UNTRIED = CounterState("", "not opened yet")


def counter_states(topology: Topology, root: Path = ROOT, kernel: Kernel | None = None) -> tuple[CounterState, ...]:
    """Try the counters of memory traffic and of power; each is closed again. Never raises."""
    found: list[CounterState] = []
    for opener in (open_traffic, open_power):
        try:
            counter = opener(topology, root, kernel)
            counter.close()
            found.append(CounterState(counter.name))
        except Exception as error:
            found.append(CounterState("", *_why(error)))
    return tuple(found)


def _why(error: Exception) -> tuple[str, str]:
    """Return why a counter failed, and what would help."""
    if isinstance(error, CannotCount):
        return error.why, error.how
    return f"unexpected {type(error).__name__}: {error}", ""


class _Watched(Generic[V]):
    """One counter: open, or to be opened again later, with its last figure, or `why` there is none. Whatever it raises,
    figures never end an answer. `figure`: computes the figure from the counter's name, seconds and amounts; None: it is
    impossible."""

    def __init__(
        self, opener: Callable[[], Counter], figure: Callable[[str, float, tuple[float, ...]], V | None]
    ) -> None:
        self.why = UNTRIED.why
        self._opener = opener
        self._figure = figure
        self._counter: Counter | None = None
        self._value: V | None = None
        self._read_at = 0.0
        self._tried_at: float | None = None

    @property
    def name(self) -> str:
        """Return the counter in use, "" without one."""
        return self._counter.name if self._counter is not None else ""

    def sample(self, now: float) -> V | None:
        try:
            if (counter := self._counter) is None:
                if self._tried_at is None or not 0 <= now - self._tried_at < RETRY_SECONDS:
                    self._tried_at = now
                    self._counter = self._opener()
                    self._counter.growth()  # what it counted until now is of no interval
                    self._read_at, self.why = now, f"{self.name} needs a second sample"
            elif not 0 <= now - self._read_at < MIN_SECONDS:
                seconds, self._read_at = now - self._read_at, now
                amounts = tuple(amount for amount in counter.growth() if amount is not None)
                is_known = seconds > 0 and len(amounts) == len(counter.groups)
                self._value = self._figure(counter.name, seconds, amounts) if is_known else None
                self.why = "" if self._value is not None else f"{counter.name} has no reading at the moment"
        except Exception as error:
            why, how = _why(error)
            self._release()
            self.why = f"{why}; {how}" if how else why
        return self._value

    def close(self) -> None:
        self._release()
        self._tried_at = None

    def _release(self) -> None:
        counter, self._counter, self._value = self._counter, None, None
        if counter is not None:
            counter.close()


class Monitor:
    """Samples the machine's counters. `sample` may be called at any rate. Counters are opened at the first sample.
    `root`: replaces `/` in tests. `theoretical`: bytes per second that all memory can carry; None: found out from the
    machine."""

    def __init__(
        self, topology: Topology, root: Path = ROOT, *, kernel: Kernel | None = None, theoretical: float | None = None
    ) -> None:
        self._topology = topology
        self._root = root
        self.theoretical = theoretical
        self._bandwidth = _Watched(lambda: self._open_traffic(kernel), self._traffic)
        self._power = _Watched(lambda: open_power(topology, root, kernel), self._watts)
        self._joules = 0.0

    def _open_traffic(self, kernel: Kernel | None) -> Counter:
        from cpuchat.hardware.bandwidth.theoretical import theoretical

        if self.theoretical is None and (found := theoretical(self._topology)) is not None:
            self.theoretical = found.bytes_per_s
        return open_traffic(self._topology, self._root, kernel)

    def _traffic(self, name: str, seconds: float, amounts: tuple[float, ...]) -> Bandwidth | None:
        total, *each = (amount / seconds for amount in (sum(amounts), *amounts))
        if self.theoretical is not None and total > IMPOSSIBLE * self.theoretical:
            return None
        return Bandwidth(total, name, *each) if len(each) == 2 else Bandwidth(total, name)

    def _watts(self, name: str, seconds: float, amounts: tuple[float, ...]) -> Power | None:
        [joules] = amounts
        if joules > _MAX_WATTS * max(len(self._topology.packages), 1) * seconds:
            return None
        self._joules += joules
        return Power(joules / seconds, self._joules, name)

    @property
    def sources(self) -> tuple[str, ...]:
        """Return the counters in use, of bandwidth, then of power; () before the first sample, and if none opened."""
        return tuple(name for name in (self._bandwidth.name, self._power.name) if name)

    def sample(self, now: float | None = None) -> MachineSample:
        """Return the newest figures. Never raises. `now`: monotonic seconds, of the same clock in every call; None:
        time.monotonic()."""
        when = time.monotonic() if now is None else now
        bandwidth, power = self._bandwidth.sample(when), self._power.sample(when)
        return MachineSample(
            bandwidth=bandwidth, power=power, no_bandwidth=self._bandwidth.why, no_power=self._power.why
        )

    def close(self) -> None:
        """Release the counters; a later sample opens them again."""
        self._bandwidth.close()
        self._power.close()
