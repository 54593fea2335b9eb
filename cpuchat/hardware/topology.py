"""The topology of this machine: sockets, NUMA nodes, L3 groups and cores, which of them this process may use, and the
CPU's instruction sets, named as llama.cpp prints them.

Linux reports it in sysfs and proc (hardware.sysfs); elsewhere psutil's counts are all there is. An L3 group is
what shares one L3 cache: AMD's CCX. Linux has no name for its die (CCD), so which groups share a fabric link follows
from the CPU family: Zen 1 and 2, and Zen 4c, have two L3 groups per die.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from cpuchat.hardware import sysfs
from cpuchat.hardware.memory import meminfo, total_bytes
from cpuchat.hardware.microarchitecture import Microarchitecture, microarchitecture
from cpuchat.hardware.sysfs import ROOT, CpuInfo, Node, cpu_quota, read_cpuinfo, read_number
from cpuchat.telemetry.units import plural

_OF_GUEST, _OF_CORE = 32 << 20, 4 << 20
"""Bytes of L3 that a virtual machine can count on, all in all or for each core, whichever is more. One with 2 cores and
32 MB decoded models of 10, 20, 30 and 46 MB 2.0, 2.0, 1.5 and 1.25 times as fast as memory allows; a core has 4 MB."""


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core. `cpus` are its online logical CPUs (SMT siblings), ascending; `index` counts online cores by
    their first CPU, `node` is the NUMA node's number, `l3` indexes `Topology.l3_groups` (None: not known). `kind` is ""
    where all cores are alike, else "performance" or "efficient"."""

    index: int
    cpus: tuple[int, ...]
    package: int
    node: int
    l3: int | None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class L3Group:
    """Cores that share one L3 cache of `size` bytes (0: unknown).

    `id` is the cache's (None: unknown), `cores` indexes `Topology.cores`, `fabric_link` indexes
    `Topology.fabric_links`. `node` is that of its first CPU."""

    index: int
    id: int | None
    cpus: tuple[int, ...]
    cores: tuple[int, ...]
    size: int
    package: int
    node: int
    fabric_link: int


@dataclass(frozen=True)
class Topology:
    """The machine, and what of it this process may use.

    The first six fields are those of `sysfs.CpuInfo`. `l2` are bytes and cores of an L2 cache by kind of core.
    `fabric_links` holds for each fabric link the L3 groups (by index) behind it. `online` are all running CPUs,
    `allowed` those of this process, `allowed_nodes` the nodes that it may take memory from. `quota`: the cgroup's, in
    CPUs. `memory_total` is the machine's, `memory_limit` the cgroup's, in bytes (of limits, None: unlimited). `virtual`
    is the evidence for a virtual machine, "" for bare metal. `notes` say what is not known."""

    model: str = ""
    vendor: str = ""
    family: int | None = None
    model_number: int | None = None
    architecture: str = ""
    flags: frozenset[str] = frozenset()
    cores: tuple[Core, ...] = ()
    l2: tuple[tuple[str, int, int], ...] = ()
    l3_groups: tuple[L3Group, ...] = ()
    nodes: tuple[Node, ...] = ()
    packages: tuple[int, ...] = (0,)
    fabric_links: tuple[tuple[int, ...], ...] = ()
    online: tuple[int, ...] = ()
    allowed: tuple[int, ...] = ()
    allowed_nodes: tuple[int, ...] = (0,)
    quota: float | None = None
    memory_total: int = 0
    memory_limit: int | None = None
    virtual: str = ""
    smt: bool = False
    notes: tuple[str, ...] = ()

    @cached_property
    def _core_by_cpu(self) -> dict[int, Core]:
        return {cpu: core for core in self.cores for cpu in core.cpus}

    def core_of(self, cpu: int) -> Core | None:
        """Return the core of a logical CPU; None when it is not online."""
        return self._core_by_cpu.get(cpu)

    def l3_of(self, cpu: int) -> L3Group | None:
        """Return the L3 group of a logical CPU; None when that is not known."""
        core = self.core_of(cpu)
        return self.l3_groups[core.l3] if core is not None and core.l3 is not None else None

    def by_l3(self, cpus: Collection[int]) -> dict[int, list[int]]:
        """Return these logical CPUs by the index of their L3 group; those whose group is not known are left out."""
        found: dict[int, list[int]] = {}
        for cpu in cpus:
            if (group := self.l3_of(cpu)) is not None:
                found.setdefault(group.index, []).append(cpu)
        return found

    def l3_bytes(self, cpus: Collection[int]) -> int:
        """Return the bytes of L3 that these logical CPUs can count on together; 0 when that is not known. A virtual
        machine may report all of its host's, or the same cache for each of its CPUs."""
        reported = sum(self.l3_groups[index].size for index in self.by_l3(cpus))
        return min(reported, max(_OF_GUEST, _OF_CORE * self.n_cores(cpus))) if self.virtual else reported

    def n_cores(self, cpus: Collection[int]) -> int:
        """Return how many physical cores these logical CPUs belong to, each that is not known counted as one."""
        return len({core.index if (core := self.core_of(cpu)) is not None else -1 - cpu for cpu in cpus})

    def node_of(self, cpu: int) -> int | None:
        """Return the number of the NUMA node of a logical CPU; None when it is not online."""
        core = self.core_of(cpu)
        return core.node if core is not None else None

    @cached_property
    def allowed_cores(self) -> tuple[Core, ...]:
        """Return cores of which this process may use at least one CPU, ascending."""
        allowed = set(self.allowed)
        return tuple(core for core in self.cores if not allowed.isdisjoint(core.cpus))

    @property
    def cpu_nodes(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.cpus)

    @property
    def cpu_name(self) -> str:
        """Return the CPU's name without vendor and clock: "EPYC 9354P"."""
        name = re.sub(r"\((R|TM)\)|\bCPU\b|@.*|\b[0-9]+-Core\b|\bProcessor\b|\bwith .*", " ", self.model)
        name = re.sub(r"^\s*([0-9]+th Gen\s+)?(AMD|Intel)\b", "", name)
        return " ".join(name.split()) or self.microarchitecture.name or self.architecture or "unknown CPU"

    @cached_property
    def microarchitecture(self) -> Microarchitecture:
        return microarchitecture(self.vendor, self.family, self.model_number, self.flags)

    @property
    def sockets_words(self) -> str:
        return plural(len(self.packages), "socket")

    @property
    def nps_words(self) -> str:
        """Return how memory is divided: "NPS1" on AMD servers (nodes per socket, a firmware setting; NPS4 is the most),
        else "2 NUMA nodes"."""
        n, sockets = len(self.cpu_nodes), len(self.packages)
        if "EPYC" not in self.model or self.virtual:
            return plural(n, "NUMA node")
        if n > 4 * sockets and n == len(self.l3_groups):
            return f"{n} NUMA nodes (L3 as NUMA)"
        if n == 1 < sockets:
            return "NPS0"
        return plural(n, "NUMA node") if n % sockets else f"NPS{n // sockets}"

    @property
    def cores_words(self) -> str:
        """Return the L3 groups and cores: "8 L3 groups × 4 cores", with a word about SMT."""
        sizes = {len(group.cores) for group in self.l3_groups}
        if len(self.l3_groups) > 1 and len(sizes) == 1:
            words = f"{len(self.l3_groups)} L3 groups × {plural(sizes.pop(), 'core')}"
        else:
            words = plural(len(self.cores), "core")
        return f"{words}, {len(self.online)} threads" if self.smt else words

    @property
    def name(self) -> str:
        """Return the machine in one line: "EPYC 9354P · 1 socket · NPS1 · 8 L3 groups × 4 cores"."""
        return " · ".join((self.cpu_name, self.sockets_words, self.nps_words, self.cores_words))


def read_topology(root: Path = ROOT, *, allowed: Collection[int] | None = None) -> Topology:
    """Read the topology of the machine below `root`; never raises. `allowed` are the CPUs that may be used (default:
    those of this process; below another root, those that /proc/self/status names there)."""
    info = sysfs.read_cpuinfo(root)
    if not (root / sysfs.CPUS).is_dir():
        return _without_sysfs(root, info, allowed)
    if allowed is None:
        allowed = sysfs.own_cpus() if root == ROOT else sysfs.allowed_list(root, "Cpus_allowed_list")
    online = sysfs.online_cpus(root, allowed)
    mine = tuple(sorted(set(allowed))) or online
    # A CPU without topology files counts as a separate core.
    online = online or mine or (0,)
    mine = tuple(cpu for cpu in mine if cpu in set(online)) or mine or online
    online = tuple(sorted({*online, *mine}))
    notes: list[str] = []
    virtual = sysfs.hypervisor(root, info.flags)
    running = set(online)
    nodes = tuple(node._replace(cpus=tuple(cpu for cpu in node.cpus if cpu in running)) for node in sysfs.nodes(root))
    if not any(node.cpus for node in nodes):  # the kernel knows of none
        nodes = (Node(0, online, meminfo(root).get("MemTotal", 0)),)
    cores = _cores(root, online, nodes, info.vendor)
    cores, groups = _l3_groups(root, cores, notes)
    groups, links = _fabric_links(groups, info, virtual)
    mems = [n for n in sysfs.allowed_list(root, "Mems_allowed_list") if any(node.number == n for node in nodes)]
    total, limit = _memory(root)
    return Topology(
        **info._asdict(),
        cores=cores,
        l2=_l2(root, cores),
        l3_groups=groups,
        nodes=nodes,
        packages=tuple(sorted({core.package for core in cores})),
        fabric_links=links,
        online=online,
        allowed=mine,
        allowed_nodes=tuple(mems) or tuple(node.number for node in nodes),
        quota=cpu_quota(root),
        memory_total=total,
        memory_limit=limit,
        virtual=virtual,
        smt=any(len(core.cpus) > 1 for core in cores),
        notes=tuple(notes),
    )


def _cores(root: Path, online: tuple[int, ...], nodes: tuple[Node, ...], vendor: str) -> tuple[Core, ...]:
    running = set(online)
    node_of = {cpu: node.number for node in nodes for cpu in node.cpus}
    first_node = next(node.number for node in nodes if node.cpus)
    taken: set[int] = set()
    cores: list[Core] = []
    for cpu in online:
        if cpu in taken:
            continue
        # Lists that contradict each other must not put a CPU into two cores.
        cpus = tuple(c for c in sysfs.siblings(root, cpu) if c in running and c not in taken)
        taken.update(cpus)
        cores.append(Core(len(cores), cpus, sysfs.package(root, cpu), node_of.get(cpu, first_node), None))
    efficient = sysfs.efficient_cpus(root, [core.cpus[0] for core in cores], vendor)
    if not efficient:
        return tuple(cores)
    return tuple(replace(c, kind="efficient" if c.cpus[0] in efficient else "performance") for c in cores)


def _l2(root: Path, cores: tuple[Core, ...]) -> tuple[tuple[str, int, int], ...]:
    """Return (kind, bytes, cores that share it) of the L2 cache of the first core of each kind."""
    firsts = {core.kind: core.cpus[0] for core in reversed(cores)}
    found = (
        (kind, cache)
        for kind, cpu in sorted(firsts.items(), reverse=True)
        for cache in sysfs.caches(root, cpu)
        if cache.level == 2
    )
    return tuple((kind, one.size, sum(not {*one.cpus}.isdisjoint(c.cpus) for c in cores)) for kind, one in found)


def _l3_groups(root: Path, cores: tuple[Core, ...], notes: list[str]) -> tuple[tuple[Core, ...], list[L3Group]]:
    """Return the cores with their L3 group, and the groups in the order of socket and cache id; links are still 0."""
    found: list[tuple[sysfs.Cache, list[Core]]] = []
    known: set[int] = set()
    for core in cores:
        if core.index in known:
            continue
        cache = next((c for c in sysfs.caches(root, core.cpus[0]) if c.level == 3), None)
        if cache is None:
            continue
        shared = set(cache.cpus)
        members = [c for c in cores if c.index not in known and c.package == core.package and c.cpus[0] in shared]
        known.update(c.index for c in members)
        found.append((cache, members))
    if not found:
        notes.append("The system does not report L3 caches, so cores cannot be chosen by L3 group.")
        return cores, []
    ids = [cache.id for cache, _ in found]
    has_ids = None not in ids and len(set(ids)) == len(ids)
    if not has_ids:
        notes.append("The system does not number its L3 caches; they are numbered by their first CPU.")
    found.sort(key=lambda f: (f[1][0].package, f[0].id if has_ids else 0, f[1][0].index))
    groups: list[L3Group] = []
    place: dict[int, int] = {}
    for index, (cache, members) in enumerate(found):
        place.update((core.index, index) for core in members)
        cpus = tuple(sorted(cpu for core in members for cpu in core.cpus))
        first = members[0]
        groups.append(L3Group(
            index, cache.id if has_ids else None, cpus, tuple(core.index for core in members), cache.size,
            first.package, first.node, 0,
        ))  # fmt: skip
    return tuple(replace(core, l3=place.get(core.index)) for core in cores), groups


def _fabric_links(
    groups: list[L3Group], info: CpuInfo, virtual: str
) -> tuple[tuple[L3Group, ...], tuple[tuple[int, ...], ...]]:
    """Return the groups with their link, and the links. Two groups of one die have neighboring cache ids."""
    kind = microarchitecture(info.vendor, info.family, info.model_number).name
    paired = not virtual and kind in ("Zen", "Zen 2", "Zen 4c")
    dies: dict[tuple[int, int], list[int]] = {}
    in_package: dict[int, int] = {}
    for group in groups:
        place = in_package.setdefault(group.package, 0)
        in_package[group.package] += 1
        number = place if group.id is None else group.id
        die = number // 2 if paired else group.index
        dies.setdefault((group.package, die), []).append(group.index)
    links = tuple(tuple(members) for members in dies.values())
    link_of = {index: link for link, members in enumerate(links) for index in members}
    return tuple(replace(group, fabric_link=link_of[group.index]) for group in groups), links


def _memory(root: Path) -> tuple[int, int | None]:
    """Return the machine's memory and the control group's limit on it, in bytes."""
    total, limited = meminfo(root).get("MemTotal", 0), total_bytes(root)
    return (total, limited if limited < total else None) if total else (limited, None)


def _without_sysfs(root: Path, info: CpuInfo, allowed: Collection[int] | None) -> Topology:
    """Return the topology on macOS and Windows: the number of cores from psutil, and nothing about their location."""
    import psutil

    mine = tuple(sorted(set(sysfs.own_cpus() if allowed is None else allowed))) or (0,)
    n_cores = min(psutil.cpu_count(logical=False) or len(mine), len(mine))
    total, limit = _memory(root)
    return Topology(
        **info._replace(model=info.model or platform.processor())._asdict(),
        cores=tuple(Core(index, (cpu,), 0, 0, None) for index, cpu in enumerate(mine[:n_cores])),
        nodes=(Node(0, mine, total),),
        online=mine,
        allowed=mine,
        quota=cpu_quota(root),
        memory_total=total,
        memory_limit=limit,
        smt=n_cores < len(mine),
        notes=("This system does not report caches, NUMA nodes or SMT siblings: only the number of cores is known.",),
    )


# Flag in /proc/cpuinfo: feature as llama.cpp prints it.
# ggml/src/ggml-cpu/ggml-cpu.cpp (ggml_backend_cpu_get_features); arch/{x86,arm64}/include/asm/{cpufeatures,hwcap}.h.
FEATURES: dict[str, str] = {
    "avx": "AVX",
    "avx2": "AVX2",
    "avx_vnni": "AVX_VNNI",
    "fma": "FMA",
    "f16c": "F16C",
    "bmi2": "BMI2",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "avx512vbmi": "AVX512_VBMI",
    "amx_int8": "AMX_INT8",
    "asimd": "NEON",
    "asimddp": "DOTPROD",
    "i8mm": "MATMUL_INT8",
    "asimdhp": "FP16_VA",
    "sve": "SVE",
}
# Where no /proc/cpuinfo is: what every CPU of that kind has that runs a language model today.
_COMMON = {
    **dict.fromkeys(("x86_64", "amd64"), frozenset({"AVX", "AVX2", "FMA", "F16C"})),
    **dict.fromkeys(("aarch64", "arm64"), frozenset({"NEON", "DOTPROD"})),
}


@dataclass(frozen=True, slots=True)
class Instructions:
    """`features` in llama.cpp's names; `sve_bytes` is how long SVE vectors are, 0 without SVE."""

    features: frozenset[str] = frozenset()
    sve_bytes: int = 0


def instructions(root: Path = ROOT) -> Instructions:
    """Return the instruction sets of this CPU. An engine built for it (GGML_NATIVE) uses all of them."""
    flags = read_cpuinfo(root).flags
    if not flags:
        return Instructions(_COMMON.get(platform.machine().lower(), frozenset()))
    features = frozenset(name for flag, name in FEATURES.items() if flag in flags)
    # The vector length of new processes (Documentation/arch/arm64/sve.rst).
    sve_bytes = read_number(root / "proc/sys/abi/sve_default_vector_length") if "SVE" in features else 0
    return Instructions(features, sve_bytes or 0)
