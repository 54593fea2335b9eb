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
    CPU takes.

    `source` says so in words. `speed_mt`: million transfers per second.
    """

    bytes_per_s: float
    source: str
    channels: int
    speed_mt: int


# CPU name: (channels of one socket, MT/s at one module per channel). AMD's and Intel's product pages.
_CPUS: Final = tuple(
    (re.compile(pattern, re.IGNORECASE), channels, speed)
    for pattern, channels, speed in (
        (r"EPYC 9\w\w5", 12, 6000),
        (r"EPYC 9\w\w4", 12, 4800),
        (r"EPYC 8\w\w4", 6, 4800),
        (r"EPYC 7\w\w[23]", 8, 3200),
        (r"EPYC 7\w\w1", 8, 2666),
        (r"EPYC 4\w\w5", 2, 5600),
        (r"EPYC 4\w\w4", 2, 5200),
        (r"Threadripper PRO 9\d\d\dWX", 8, 6400),
        (r"Threadripper PRO 7\d\d\dWX", 8, 5200),
        (r"Threadripper PRO [35]\d\d\dWX", 8, 3200),
        (r"Threadripper 9\d\d\dX", 4, 6400),
        (r"Threadripper 7\d\d\dX", 4, 5200),
        (r"Threadripper 3\d\d\dX", 4, 3200),
        (r"Ryzen \d 9\d\d\dX?(3D)?\b", 2, 5600),
        (r"Ryzen \d 7[5-9]\d\dX?(3D)?\b", 2, 5200),
        (r"Ryzen \d [35]\d\d\dX?(T|3D)?\b", 2, 3200),
        (r"Xeon.* 69\d\dP", 12, 6400),
        (r"Xeon.* 6[57]\d\d[PE]", 8, 6400),
        (r"Xeon.* (Platinum|Gold|Silver|Bronze) [3-9]5\d\d", 8, 5600),
        (r"Xeon.* (Platinum|Gold|Silver|Bronze) [3-9]4\d\d", 8, 4800),
        (r"Xeon.* (Platinum|Gold|Silver) [3-9]3\d\dH", 6, 3200),
        (r"Xeon.* (Platinum|Gold|Silver) [3-9]3\d\d", 8, 3200),
        (r"Xeon.* (Platinum|Gold|Silver|Bronze) [3-9]2\d\d", 6, 2933),
        (r"Xeon.* (Platinum|Gold|Silver|Bronze) [3-9]1\d\d", 6, 2666),
    )
)


def theoretical(topology: Topology) -> Theoretical | None:
    """Return the theoretical peak of this machine; None for a CPU that is not in the table, and in a virtual machine,
    which has some share of a memory that it knows nothing about.
    """
    usual = _usual_memory(topology)
    if usual is None or topology.virtual:
        return None
    channels, speed = usual[0] * len(topology.packages), usual[1]
    words = f"assumed: {plural(channels, 'channel')} × {speed} MT/s, the maximum of {topology.cpu_name}"
    return Theoretical(channels * speed * 1e6 * _CHANNEL_BYTES, words, channels, speed)


_EACH, _EACH_VIRTUAL = 20e9, 13e9
"""Bytes per second that a core reads alone; in a virtual machine, beside its neighbours."""
_TOGETHER: Final = 0.6
"""Exponent of the number of cores that share a memory of which nothing is known: 2 cores of a cloud read 20 to 26 GB/s,
16 of them 85, and 8 of a desktop 40 to 70."""


def usual_read(topology: Topology, cpus: Collection[int]) -> float:
    """Return the bytes per second that such CPUs usually read together, from the description of the machine alone."""
    n, memory = topology.n_cores(cpus), _usual_memory(topology)
    each = _EACH_VIRTUAL if topology.virtual else _EACH
    together = each * (n if memory is not None and not topology.virtual else n**_TOGETHER)
    if memory is None:
        return together
    channels = memory[0] * len(topology.packages)
    return min(together, usual().typical.value * channels * memory[1] * 1e6 * _CHANNEL_BYTES)


def _usual_memory(topology: Topology) -> tuple[int, int] | None:
    """Return the channels per socket and MT/s that this model of CPU takes; None for one that is not in the table."""
    return next(((channels, mts) for pattern, channels, mts in _CPUS if pattern.search(topology.model)), None)
