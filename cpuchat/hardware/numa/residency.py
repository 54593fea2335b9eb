"""Finds the NUMA nodes that hold the weights, and moves them if the policy requires others."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.hardware.cgroups import read_number
from cpuchat.hardware.numa.mempolicy import Policy
from cpuchat.hardware.numa.numa_maps import parse_numa_maps, share_words, shares
from cpuchat.hardware.numa.page_cache import ROOT, evict, mapped_by, resident_bytes, resident_nodes

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology

__all__ = ["LARGE", "Residency", "evict", "prepare_file", "read_residency", "resident_bytes", "resident_nodes"]

LARGE = 64 << 20
"""Anonymous regions from this size on are counted separately: weights that were read or repacked, KV caches."""

_LITTLE = 0.05  # of the file in memory: too little to matter
_TOLERANCE = 0.10  # between the wanted and the found part of a node
_PLAIN_PAGE = 64 << 10  # the largest that kernels are built for
_NAMELESS = ("", "/dev/zero", "/anon_hugepage")  # how the kernel calls memory that is shared, or in huge page files
_HUGE = re.compile(r"^(?:AnonHugePages|ShmemPmdMapped|FilePmdMapped): *([0-9]{1,15}) kB$", re.MULTILINE)
_WEIGHTS = "sys/kernel/mm/mempolicy/weighted_interleave"


@dataclass(frozen=True)
class Residency:
    """Bytes in memory by node. `weights`: the mapped model files. `large`: other regions of 64 MiB and more (weights
    that are not mapped, KV caches, buffers). `other`: the rest. `huge`: how much of it all is in huge pages. `policy`:
    the kernel's word for the policy of the weights, or of the large regions where no file is mapped."""

    weights: Mapping[int, int] = field(default_factory=dict)
    large: Mapping[int, int] = field(default_factory=dict)
    other: Mapping[int, int] = field(default_factory=dict)
    huge: int = 0
    policy: str = ""

    def words(self) -> str:
        """ "weights: N0 51 % · N1 49 %", the same for large buffers; "" when there is nothing to tell."""
        parts = [("weights", self.weights), ("large buffers", self.large)]
        return " · ".join(f"{name}: {share_words(nodes)}" for name, nodes in parts if sum(nodes.values()))


def read_residency(pid: int | str, files: Collection[Path] = (), root: Path = ROOT) -> Residency | None:
    """Return where the memory of process `pid` ("self": this one) is; `files` are the model files that it may map.

    The kernel walks all page tables for it (hundreds of milliseconds for hundreds of gigabytes): ask once after
    loading, in a thread. None when it can't be read: the process is gone or another user's, or the kernel has no NUMA.
    """
    folder = root / "proc" / str(pid)
    names = {os.path.realpath(file) for file in files}
    weights, large, other = Counter[int](), Counter[int](), Counter[int]()
    weights_policy = large_policy = ""
    huge = 0
    try:
        with (folder / "numa_maps").open(encoding="utf-8", errors="surrogateescape") as lines:
            for region in parse_numa_maps(lines):
                if region.file in names:
                    weights.update(region.nodes)
                    weights_policy = region.policy
                elif region.file in _NAMELESS and region.bytes >= LARGE:
                    large.update(region.nodes)
                    large_policy = region.policy
                else:
                    other.update(region.nodes)
                if region.page_size > _PLAIN_PAGE:
                    huge += region.bytes
        huge += _transparent_huge(folder / "smaps_rollup")
    except OSError:
        return None
    return Residency(dict(weights), dict(large), dict(other), huge, weights_policy or large_policy)


def _transparent_huge(path: Path) -> int:
    """Return bytes in transparent huge pages, which numa_maps counts as plain ones."""
    try:
        return sum(int(kilobytes) << 10 for kilobytes in _HUGE.findall(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError):
        return 0


def prepare_file(path: Path, policy: Policy, topology: Topology, root: Path = ROOT) -> str:
    """Make sure that mapping the file gives memory placed as `policy` says; to be called before it is mapped.

    A file that is in the page cache on the wrong nodes is dropped from it and so read again, under the policy of the
    process that maps it. Returns one sentence on what was done or could not be done; "" when there was nothing to do.
    """
    usable = {node.number: node.memory for node in topology.nodes if node.memory}
    if len(usable) < 2 or not policy.places:
        return ""
    wanted = _wanted_shares(policy, tuple(usable), root)
    found = resident_nodes(path, root)
    if found is None:
        return "The NUMA placement of the file is not known: it belongs to another user."
    size = path.stat().st_size
    if sum(found.values()) < _LITTLE * size or _matches(policy, wanted, shares(found)):
        return ""
    if policy.mode == "preferred" and size > sum(usable.get(node, 0) for node in wanted):
        return ""  # the preferred nodes can't hold it: what went elsewhere would go there again
    was = f"The file was in memory on {share_words(found)}"
    if evict(path):
        return f"{was}, which does not match {policy.words}: reading it from disk again."
    holders = mapped_by(path, root)
    who = f"{', '.join(holders)} uses it" if len(holders) == 1 else f"{', '.join(holders) or 'another program'} use it"
    return f"{was} and cannot be moved: {who}. End that program and reload the model to place it as {policy.words}."


def _wanted_shares(policy: Policy, usable: tuple[int, ...], root: Path) -> dict[int, float]:
    """Return the part of the pages that each node gets; of bind and preferred only the nodes matter."""
    nodes = policy.nodes or usable
    weights = dict.fromkeys(nodes, 1)
    if policy.mode == "weighted":
        weights = {node: read_number(root / _WEIGHTS / f"node{node}") or 1 for node in nodes}
    return shares(weights)


def _matches(policy: Policy, wanted: Mapping[int, float], found: Mapping[int, float]) -> bool:
    if sum(part for node, part in found.items() if node not in wanted) > _TOLERANCE:
        return False
    if policy.mode in ("bind", "preferred"):
        return True
    return all(abs(found.get(node, 0.0) - part) <= _TOLERANCE for node, part in wanted.items())
