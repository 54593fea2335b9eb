"""Two disjoint halves of the cores, for two models that answer at the same time."""

from __future__ import annotations

from cpuchat.errors import UsageError
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.hardware.topology import Topology


def halves(topology: Topology, cores: str = "auto") -> tuple[str, str]:
    """Split the cores that `cores` names into two halves of as many cores, as lists of CPUs.

    By whole L3 groups where there are several, so that the halves share neither a cache nor a link to memory.

    Raises:
        UsageError: fewer than two cores.
    """
    cpus = choose_cores(topology, cores).cpus
    if len(cpus) < 2:
        raise UsageError("Two models cannot answer at the same time on one core.", "Compare them one after the other.")

    def place(cpu: int) -> tuple[int, int, int]:
        core, group = topology.core_of(cpu), topology.l3_of(cpu)
        return (core.node if core is not None else -1, group.index if group is not None else -1, cpu)

    ordered = sorted(cpus, key=place)
    half = len(ordered) // 2
    cut = next((at for at in (half, half + 1) if at < len(ordered) and _group_begins(topology, ordered, at)), half)
    first, second = ordered[:cut], ordered[cut:]
    if len(first) != len(second):  # an odd number of cores, or of groups: nobody gets more
        fewest = min(len(first), len(second))
        first, second = first[:fewest], second[:fewest]
    return format_cpu_list(sorted(first)), format_cpu_list(sorted(second))


def _group_begins(topology: Topology, ordered: list[int], at: int) -> bool:
    before, after = topology.l3_of(ordered[at - 1]), topology.l3_of(ordered[at])
    return before is not None and after is not None and before.index != after.index
