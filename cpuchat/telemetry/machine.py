"""Readings of the machine while it computes: plain values, filled in by `hardware`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cpuchat.telemetry.units import bandwidth, plural

ROUGH: Final = 2.0
"""Factor by which an estimated read bandwidth may be wrong, either way."""
ROUGH_WORDS: Final = f"up to {ROUGH:g}× off"


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak read bandwidth in bytes per second: the denominator of utilization.

    `cpus` are the logical CPUs that read. `at_least`: it may be more, as other programs ran meanwhile, or an answer
    told it; `unfinished`: only because a measurement that nothing disturbed has not ended. `estimated`: it is what such
    CPUs usually reach, within `ROUGH`, and no more than `least` was measured (0: nothing was)."""

    bytes_per_s: float
    cpus: tuple[int, ...]
    at_least: bool = False
    estimated: bool = False
    unfinished: bool = False
    least: float = 0.0

    @property
    def source(self) -> str:
        """Return how it is known, in a few words."""
        if self.estimated:
            so_far = f", at least {bandwidth(self.least)} GB/s" if self.least else " until measured"
            return f"estimated for {plural(len(self.cpus), 'core')}, {ROUGH_WORDS}{so_far}"
        return f"measured, {plural(len(self.cpus), 'core')}{', at least' if self.at_least else ''}"


@dataclass(frozen=True, slots=True)
class Peaks:
    """What is known of one core, of one whole L3 group, which reads through one fabric link, and of all cores."""

    one_core: Peak | None = None
    l3_group: Peak | None = None
    all_cores: Peak | None = None


NO_PEAKS = Peaks()


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Memory traffic of the whole machine since the last sample, in bytes per second. `source` is the counter ("umc",
    "amd_df", "imc"). `read` and `write` are None where it knows only their sum, `total`."""

    total: float
    source: str
    read: float | None = None
    write: float | None = None


@dataclass(frozen=True, slots=True)
class Power:
    """Of whole packages, without memory modules: `watts` since the last sample, `joules` since counting began."""

    watts: float
    joules: float
    source: str


@dataclass(frozen=True, slots=True)
class MachineSample:
    """One sample of the counters. `no_bandwidth` and `no_power` say why a reading is None, and how to get it."""

    bandwidth: Bandwidth | None = None
    power: Power | None = None
    no_bandwidth: str = ""
    no_power: str = ""
