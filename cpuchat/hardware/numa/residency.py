"""Finds the NUMA nodes that hold the weights, and moves them if the policy requires others.

/proc/PID/numa_maps says which mapping of a process has how many pages on which node (Documentation/filesystems/
proc.rst; written by show_numa_map in fs/proc/task_mmu.c). Spaces, tabs, newlines and "=" in file names are octal
escapes; pages in huge page files are counted in huge pages, all others in plain ones.

Pages of a file go where the policy of the program that reads it *first* says, and stay there: a download or a checksum
decides for every later run. Without privileges only one thing moves them: drop them (posix_fadvise) and read the file
again under the wanted policy. Pages that any process maps are not dropped.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.hardware.numa.mempolicy import Policy
from cpuchat.hardware.sysfs import ROOT, read_text

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology


_NODE = re.compile(r"N([0-9]{1,5})=([0-9]{1,15})")
_ESCAPE = re.compile(r"\\(011|012|040|075)")
_FLAGS = frozenset({"heap", "stack", "huge"})


@dataclass(frozen=True, slots=True)
class Region:
    """One mapping: its `policy` in the kernel's words ("weighted interleave:0-1"), its `file` or "", bytes by node."""

    policy: str
    file: str
    nodes: Mapping[int, int]

    @property
    def bytes(self) -> int:
        return sum(self.nodes.values())


def parse_numa_maps(lines: Iterable[str]) -> Iterator[Region]:
    """Yield the regions with resident pages; malformed fields are skipped."""
    for line in lines:
        nodes: dict[int, int] = {}
        policy: list[str] = []
        file, page_kb = "", 4
        for word in line.split()[1:]:
            name, equals, value = word.partition("=")
            if found := _NODE.fullmatch(word):
                nodes[int(found[1])] = int(found[2])
            elif name == "file":
                file = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), value).removesuffix(" (deleted)")
            elif name == "kernelpagesize_kB":
                page_kb = int(value) if value.isdecimal() else page_kb
            elif word not in _FLAGS and (not equals or ":" in value):  # with "=": "bind=static:0"
                policy.append(word)
        if nodes:
            yield Region(" ".join(policy), file, {node: count * page_kb << 10 for node, count in nodes.items()})


def shares(nodes: Mapping[int, int]) -> dict[int, float]:
    """Return each node's part of the whole, by ascending node; empty for nothing."""
    total = sum(nodes.values())
    return {node: nodes[node] / total for node in sorted(nodes)} if total else {}


def share_words(nodes: Mapping[int, int]) -> str:
    """ "51 % on node 0 · 49 % on node 1"; "" for nothing."""
    return " · ".join(f"{part * 100:.0f} % on node {node}" for node, part in shares(nodes).items())


_SAMPLES = 4096
_LOWEST_BIT = bytes(byte & 1 for byte in range(256))
_PAGE = mmap.PAGESIZE
_MISSING = re.compile(b"\0+")


def resident_bytes(path: Path) -> int | None:
    """Return bytes of the file in the page cache; None where that is not known.

    mincore(2). About files that the caller neither owns nor may write the kernel answers "everything" (since Linux 5.2,
    against spying on others): of those nothing is known."""
    try:
        with _mapped(path) as (_, size, resident):
            return min(sum(resident) * _PAGE, size)
    except OSError:
        return None


def missing_ranges(path: Path) -> list[tuple[int, int]] | None:
    """(start, end) in bytes of the parts that are not in the page cache; None where that is not known."""
    try:
        with _mapped(path) as (_, size, resident):
            return [(run.start() * _PAGE, min(run.end() * _PAGE, size)) for run in _MISSING.finditer(resident)]
    except OSError:
        return None


def resident_nodes(path: Path, root: Path = ROOT) -> dict[int, int] | None:
    """Return bytes of the file in the page cache by node; None where that is not known. Some thousand pages of it are
    touched through a mapping (which reads nothing in), and what numa_maps says of those is taken for all."""
    try:
        with _mapped(path) as (address, size, resident):
            # Into this process's page table, at uneven steps, which do not alias with interleaving.
            count = min(_SAMPLES, len(resident))
            for number in range(count):
                first, end = number * len(resident) // count, (number + 1) * len(resident) // count
                page = first + number * 2_654_435_761 % (end - first)
                if resident[page]:
                    _ = ctypes.c_char.from_address(address + page * _PAGE).value
            name = os.path.realpath(path)
            with (root / "proc/self/numa_maps").open(encoding="utf-8", errors="surrogateescape") as lines:
                found = Counter[int]()
                for region in parse_numa_maps(lines):
                    if region.file == name:
                        found.update(region.nodes)
    except OSError:
        return None
    total = min(sum(resident) * _PAGE, size)
    return {node: total * count // found.total() for node, count in sorted(found.items())}


def evict(path: Path) -> bool:
    """Drop the file from the page cache (written first if need be); True when less than 1 % is left, if known."""
    try:
        with path.open("rb") as file:
            with contextlib.suppress(OSError):
                os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size = os.fstat(file.fileno()).st_size
    except (OSError, AttributeError):
        return False
    left = resident_bytes(path)
    return left is not None and left * 100 <= size


def mapped_by(path: Path, root: Path = ROOT) -> list[str]:
    """Return names of the programs that map the file and keep it in memory; those of other users are not visible."""
    name = os.path.realpath(path)
    names: list[str] = []
    for maps in sorted((root / "proc").glob("[0-9]*/maps")):
        try:
            with maps.open(encoding="utf-8", errors="surrogateescape") as lines:
                found = any(line.rstrip("\n").endswith(f" {name}") for line in lines)
        except OSError:
            continue
        if found:
            names.append(f"{read_text(maps.parent / 'comm') or 'a program'} ({maps.parent.name})")
    return names


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Map a file for reading; yield its address, its size, and a byte for each of its pages: 1 when it is in memory.
    Raises OSError where the kernel can't or won't tell about it.

    Python's mmap does not give the address of a read-only mapping, which mincore needs."""
    if sys.platform != "linux":
        raise OSError("supported on Linux only")
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if not (os.geteuid() in (0, status.st_uid) or os.access(path, os.W_OK)):
            raise PermissionError(f"{path} belongs to another user")
        if not (size := status.st_size):
            yield 0, 0, b""
            return
        library = ctypes.CDLL(None, use_errno=True)
        library.mmap.restype = ctypes.c_void_p
        library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
        library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        address = library.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        # Otherwise touching a page could read in its neighbors.
        library.madvise(address, size, mmap.MADV_RANDOM)
        pages = ctypes.create_string_buffer(-(-size // _PAGE))
        if library.mincore(address, size, pages):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        yield address, size, pages.raw.translate(_LOWEST_BIT)
    finally:
        library.munmap(address, size)


LARGE = 64 << 20
"""Anonymous regions from this size on are counted separately: weights that were read or repacked, KV caches."""

_LITTLE = 0.05  # of the file in memory: too little to matter
_TOLERANCE = 0.10  # between the wanted and the found part of a node
_NAMELESS = ("", "/dev/zero", "/anon_hugepage")  # how the kernel calls memory that is shared, or in huge page files


@dataclass(frozen=True)
class Residency:
    """Bytes in memory by node: of mapped `weights`, and of `large` other regions (unmapped weights, KV caches).
    `policy`: the kernel's word for that of the weights, or of the large regions where no file is mapped."""

    weights: Mapping[int, int] = field(default_factory=dict)
    large: Mapping[int, int] = field(default_factory=dict)
    policy: str = ""

    def words(self) -> str:
        """ "weights: 51 % on node 0 · 49 % on node 1", the same for large buffers; "" when there is nothing to tell."""
        parts = [("weights", self.weights), ("large buffers", self.large)]
        return " · ".join(f"{name}: {share_words(nodes)}" for name, nodes in parts if sum(nodes.values()))


def read_residency(pid: int | str, files: Collection[Path] = (), root: Path = ROOT) -> Residency | None:
    """Return where the memory of process `pid` ("self": this one) is; `files` are the model files that it may map.
    None: the process is gone or another user's, or the kernel has no NUMA. The kernel walks all page tables for it
    (hundreds of milliseconds for hundreds of gigabytes): ask once after loading, in a thread."""
    names = {os.path.realpath(file) for file in files}
    weights, large = Counter[int](), Counter[int]()
    weights_policy = large_policy = ""
    try:
        with (root / "proc" / str(pid) / "numa_maps").open(encoding="utf-8", errors="surrogateescape") as lines:
            for region in parse_numa_maps(lines):
                if region.file in names:
                    weights.update(region.nodes)
                    weights_policy = region.policy
                elif region.file in _NAMELESS and region.bytes >= LARGE:
                    large.update(region.nodes)
                    large_policy = region.policy
    except OSError:
        return None
    return Residency(dict(weights), dict(large), weights_policy or large_policy)


def prepare_file(path: Path, policy: Policy, topology: Topology, root: Path = ROOT) -> str:
    """Make sure that mapping the file, later, gives memory placed as `policy` says: drop one that is in the page cache
    on the wrong nodes, so that it is read again under the policy of the process that maps it. Returns one sentence on
    what was done or could not be done; "" when there was nothing to do."""
    usable = {node.number: node.memory for node in topology.nodes if node.memory}
    if len(usable) < 2 or not policy.places:
        return ""
    wanted = shares(dict.fromkeys(policy.nodes or usable, 1))  # of bind and preferred only the nodes matter
    found = resident_nodes(path, root)
    if found is None:
        return "The NUMA placement of the file is not known: it belongs to another user."
    size, found_shares = path.stat().st_size, shares(found)
    is_elsewhere = sum(part for node, part in found_shares.items() if node not in wanted) > _TOLERANCE
    is_uneven = any(abs(found_shares.get(node, 0.0) - part) > _TOLERANCE for node, part in wanted.items())
    is_placed = not is_elsewhere and (policy.mode in ("bind", "preferred") or not is_uneven)
    if sum(found.values()) < _LITTLE * size or is_placed:
        return ""
    if policy.mode == "preferred" and size > sum(usable.get(node, 0) for node in wanted):
        return ""  # the preferred nodes can't hold it: what went elsewhere would go there again
    was = f"The file was in memory, {share_words(found)},"
    if evict(path):
        return f"{was} which does not match {policy.words}: reading it from disk again."
    holders = mapped_by(path, root)
    who = f"{', '.join(holders)} uses it" if len(holders) == 1 else f"{', '.join(holders) or 'another program'} use it"
    return f"{was} and cannot be moved: {who}. End that program and reload the model to place it as {policy.words}."


def reader_cpus(
    topology: Topology, cpus: Collection[int], policy: Policy | None, refused: str
) -> list[tuple[int, ...]]:
    """Return the CPUs on which to read a file into memory, a set for each NUMA node of the `cpus` that compute.

    Without a `policy` that places pages (None: the kernel does not tell), because it was `refused` as in most
    containers, one reader would put the whole file on its own node. [()], a reader anywhere, is enough otherwise."""
    if not refused and policy is not None:
        return [()]
    by_node: dict[int | None, list[int]] = {}
    for cpu in cpus:
        by_node.setdefault(topology.node_of(cpu), []).append(cpu)
    return [tuple(one) for one in by_node.values()] if len(by_node) > 1 and None not in by_node else [()]
