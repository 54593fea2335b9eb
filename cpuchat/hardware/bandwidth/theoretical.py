"""The theoretical peak bandwidth of the memory: channels × transfers per second × width, as this model of CPU takes it.

Which modules there are, only root may read: `sudo dmidecode -t memory`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from cpuchat.costs.usual import usual
from cpuchat.hardware.topology import Topology
from cpuchat.telemetry.units import plural

_CHANNEL_BYTES: Final = 8
MODULES: Final = "sudo dmidecode -t memory"
"""The command that lists the installed modules."""


@dataclass(frozen=True, slots=True)
class Theoretical:
    """The theoretical peak of all channels together, in bytes per second, if each has a module that is as fast as the
    CPU takes, as `source` says in words. `speed_mt`: million transfers per second."""

    bytes_per_s: float
    source: str
    channels: int
    speed_mt: int


def theoretical(topology: Topology) -> Theoretical | None:
    """Return the theoretical peak of this machine; None for a CPU that is not in cpus.toml, and in a virtual one."""
    memory = _usual_memory(topology)
    if memory is None or topology.virtual:
        return None
    channels, speed = memory[0] * len(topology.packages), memory[1]
    words = f"assumed: {plural(channels, 'channel')} × {speed} MT/s, the maximum of {topology.cpu_name}"
    return Theoretical(channels * speed * 1e6 * _CHANNEL_BYTES, words, channels, speed)


_EACH: Final = {"Zen 4": 28e9, "Zen 5": 40e9, "Neoverse V": 28e9, "Cortex-A5": 2e9, "Cortex-A7": 5e9}
_EACH_USUALLY, _VIRTUAL = 20e9, 0.65
"""Bytes per second that a core reads alone, by how its microarchitecture's name begins, and the share of it that one of
a virtual machine reads, beside its neighbors."""
_TOGETHER: Final = 0.6
"""Exponent of the number of cores that share a memory of which nothing is known: 2 cores of a cloud read 20 to 26 GB/s,
32 to 70 of Zen 5, 16 of them 85, and 8 of a desktop 40 to 70."""


def usual_read(topology: Topology, cpus: Collection[int]) -> float:
    """Return the bytes per second that such CPUs usually read together, from the description of the machine alone."""
    n, memory = topology.n_cores(cpus), _usual_memory(topology)
    kind = topology.microarchitecture.name
    each = next((rate for name, rate in _EACH.items() if kind.startswith(name)), _EACH_USUALLY)
    each *= _VIRTUAL if topology.virtual else 1.0
    together = each * (n if memory is not None and not topology.virtual else n**_TOGETHER)
    if memory is None:
        return together
    channels = memory[0] * len(topology.packages)
    return min(together, usual().typical.value * channels * memory[1] * 1e6 * _CHANNEL_BYTES)


def _usual_memory(topology: Topology) -> tuple[int, int] | None:
    """Return the channels per socket and MT/s that this model of CPU takes; None for one that is not in cpus.toml."""
    known = (one for one in usual().memory if re.search(one.cpu, topology.model, re.IGNORECASE))
    return next(((one.channels, one.mts) for one in known), None)
