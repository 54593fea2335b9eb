"""Readings of the machine while it computes: plain values, filled in by `hardware`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scope = Literal["machine", "socket", "process"]


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak read bandwidth in bytes per second: the denominator of utilization.

    `source` is how it is known in a few words ("measured, 2 cores"), `cpus` the logical CPUs that were measured.
    """

    bytes_per_s: float
    source: str
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Memory traffic since the last sample, in bytes per second.

    `source` names the counter ("hsmp", "umc", "mbm", ...), `scope` what its figure covers: the whole machine, the
    sockets in use, or the inference process alone. `read` and `write` are None where the counter knows only their
    sum, `total`. `per_l3` is the share of each L3 group, in the order of the topology; () where not known.
    """

    total: float
    source: str
    scope: Scope
    read: float | None = None
    write: float | None = None
    per_l3: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Power:
    """`watts` since the last sample; `joules` since counting began; `source` as of `Bandwidth`.

    Whole packages, without memory modules and power supply.
    """

    watts: float
    joules: float
    source: str


@dataclass(frozen=True, slots=True)
class MachineSample:
    """One sample of the counters. None is "unknown", and `why_missing` says why and how to get it."""

    bandwidth: Bandwidth | None = None
    power: Power | None = None
    no_bandwidth: str = ""
    no_power: str = ""
