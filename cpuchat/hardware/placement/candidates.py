"""Placements worth trying on a machine: ways to divide it between a target model and its draft model.

Decoding reads all weights for each pass, so a placement is as fast as the paths that its cores read through: a core,
the fabric link of its L3 groups, the memory. One link carries a small part of what the memory gives (50 of 367 GB/s on
an EPYC 9354P). That is why a draft model on an L3 group of its own pays only while drafting and verifying overlap, and
why it is not made faster by the L3 cache: it is many times larger, and is read from memory for every token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from cpuchat.errors import UsageError
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.placement.placement import Placement, PlacementSpec, place
from cpuchat.hardware.topology import Topology

SHARED: Final = "all cores, shared"
OWN_L3: Final = "draft on its own L3 group"
OWN_LINK: Final = "draft on its own fabric link"
OWN_SOCKET: Final = "one socket drafts, the other verifies"
ONE_NODE: Final = "one node"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement with a name; `reason` is one sentence for or against it."""

    name: str
    spec: PlacementSpec
    placement: Placement
    reason: str


def candidates(topology: Topology) -> list[Candidate]:
    """Return the placements that this machine allows; the recommended one, to begin with, comes first."""
    found = [_shared(topology)]
    groups = sorted({core.l3 for core in topology.allowed_cores if core.l3 is not None})
    if len(groups) > 1:
        found += _with_own_l3(topology, groups[-1])
        found += _few_of_each(topology, groups)
    sockets = sorted({core.package for core in topology.allowed_cores})
    if len(sockets) > 1:
        found += _candidate(
            topology,
            OWN_SOCKET,
            PlacementSpec(f"socket:{sockets[0]}", f"socket:{sockets[-1]}"),
            "Pays off only while drafting and verifying overlap; the target gets the cores of one socket.",
        )
    found += _one_node(topology)
    return found


def _candidate(topology: Topology, name: str, spec: PlacementSpec, reason: str) -> list[Candidate]:
    """Return a list with the candidate, or an empty one if that would leave a model without cores."""
    try:
        return [Candidate(name, spec, place(topology, spec, with_draft=True), reason)]
    except UsageError:
        return []


def _shared(topology: Topology) -> Candidate:
    spec = PlacementSpec(draft_cores="shared")
    placement = place(topology, spec)
    return Candidate(SHARED, spec, placement, _why_shared(topology, placement.cpus))


def _why_shared(topology: Topology, cpus: tuple[int, ...]) -> str:
    """Explain in one sentence why all cores are shared, by what is special about this machine."""
    n, all_cores = len(cpus), len(topology.allowed_cores)
    used = [core for cpu in cpus if (core := topology.core_of(cpu)) is not None]
    groups = {core.l3 for core in used if core.l3 is not None}
    nodes = sorted({core.node for core in used})
    who = f"All {n} cores, shared"
    if topology.quota is not None and topology.quota < all_cores:
        return f"{n} of {all_cores} cores, shared: the cgroup CPU quota is {topology.quota:g}."
    if all_cores < 2:
        return "Only one core."
    if topology.virtual:
        return f"{who}: a virtual machine's L3 groups and nodes may not be real."
    if any(core.kind == "efficient" for core in topology.allowed_cores) and n < all_cores:
        return f"The {n} performance cores, shared: the {all_cores - n} efficient ones would slow them down."
    if len(topology.packages) > 1 and len(nodes) > 1:
        return f"{who}, with memory interleaved: weights are read from both sockets."
    if len(nodes) > 1:
        return f"{who}, with memory interleaved over {len(nodes)} nodes: equivalent to NPS1."
    if not groups:
        return f"{who}: the L3 groups are not known."
    if len(groups) < 2:
        return f"{who}: they share one L3 cache and one memory link."
    links = {group.fabric_link for cpu in cpus if (group := topology.l3_of(cpu)) is not None}
    if len(links) < len(groups):
        return (
            f"{who}: pairs of L3 groups share a fabric link, so a group for the draft model would use part of one of "
            f"{len(links)} links and slow its neighbor down."
        )
    return (
        f"{who}: an L3 group of its own would give the draft model one of {len(links)} links to memory, and take it "
        "from the target."
    )


def _with_own_l3(topology: Topology, last: int) -> list[Candidate]:
    group = topology.l3_groups[last]
    size = f" of {group.size >> 20} MB" if group.size else ""
    found = _candidate(
        topology,
        OWN_L3,
        PlacementSpec(draft_cores=f"l3:{last}"),
        f"Pays off only while drafting and verifying overlap: a draft model does not fit the L3{size}, and one link "
        "carries a fraction of the memory bandwidth.",
    )
    link = topology.fabric_links[group.fabric_link]
    if len(link) > 1 and len(topology.fabric_links) > 1:
        found += _candidate(
            topology,
            OWN_LINK,
            PlacementSpec(draft_cores=f"l3:{format_cpu_list(link)}"),
            "Pays off only while drafting and verifying overlap; the L3 groups of one fabric link draft together, so "
            "no other group is slowed down.",
        )
    return found


def _few_of_each(topology: Topology, groups: Collection[int]) -> list[Candidate]:
    """Four cores of each L3 group, or two where it has no more than four."""
    sizes = [sum(core.l3 == group for core in topology.allowed_cores) for group in groups]
    n = 4 if min(sizes) > 4 else 2
    if min(sizes) <= n:
        return []
    found = _candidate(
        topology,
        f"{n} cores per L3 group",
        PlacementSpec(f"{n}/l3", "shared"),
        f"{n} cores nearly saturate a group's memory link while decoding, with less synchronization; prefill has fewer "
        "cores to compute on.",
    )
    # A cgroup quota may grant fewer.
    return [one for one in found if len(one.placement.cpus) == n * len(sizes)]


def _one_node(topology: Topology) -> list[Candidate]:
    nodes = sorted({core.node for core in topology.allowed_cores})
    mine = [node for node in topology.nodes if node.number in nodes and node.number in topology.allowed_nodes]
    if len(nodes) < 2 or not mine:
        return []
    node = max(mine, key=lambda node: (node.memory, -node.number))
    room = f"{node.memory / 1e9:.0f} GB of its memory" if node.memory else "its memory"
    return _candidate(
        topology,
        ONE_NODE,
        PlacementSpec(f"node:{node.number}", "shared", f"bind:{node.number}"),
        f"No cross-node reads, but the bandwidth of the other {'node' if len(nodes) == 2 else 'nodes'} is "
        f"unused, and the model must fit the {room}.",
    )
