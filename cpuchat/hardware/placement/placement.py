"""Decides where a model computes: CPUs of the target and of the draft model, and the memory policy.

`place` is called in the process that the user runs, before a worker starts; workers are sent the numbers. `candidates`
are ways to divide a machine between a target model and its draft model, `ceiling` is how fast each can be at best:
decoding reads all weights for each pass, so a placement is as fast as the paths that its cores read through: a core,
the fabric link of its L3 groups, the memory. One link carries a small part of what the memory gives (50 of 367 GB/s on
an EPYC 9354P). That is why a draft model on an L3 group of its own pays only while drafting and verifying overlap, and
why it is not made faster by the L3 cache: it is many times larger, and is read from memory for every token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import UsageError
from cpuchat.config.settings import Changes, Settings, explained, with_changes
from cpuchat.hardware.lists import format_cpu_list, parse_cpu_list
from cpuchat.hardware.numa.mempolicy import Policy, choose_policy
from cpuchat.hardware.placement.cores import CoreChoice, allowed_part, choose_cores
from cpuchat.hardware.topology import Topology
from cpuchat.telemetry.units import plural

MAX_CPUS: Final = 512
"""GGML_MAX_N_THREADS, the length of ggml's CPU masks: threads cannot be pinned to CPUs with higher numbers."""

_SHARED: Final = ("auto", "shared")


@dataclass(frozen=True, slots=True)
class PlacementSpec:
    """Where a model computes, in the words of the settings.

    `cores` and `threads` are of the target (`placement.cores` has the words; 0: one thread for each core).
    `draft_cores`: "shared" (the target's cores, sequentially), cores in the same words (concurrently), or "auto"
    (whichever is measured to be faster). `memory` is the NUMA policy (`numa.mempolicy` has the words). `is_saved`: it
    may have been written for another machine or container, and what is not allowed here is left out.
    """

    cores: str = "auto"
    draft_cores: str = "auto"
    memory: str = "auto"
    threads: int = 0
    is_saved: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, settings: Settings) -> PlacementSpec:
        """Return the placement that `settings` ask for."""
        engine = settings.engine
        return cls(engine.cores, settings.speculation.draft_cores, engine.memory, engine.threads, is_saved=True)

    @property
    def names_draft_cores(self) -> bool:
        """Return whether the draft model has cores of its own, whatever is measured."""
        return self.draft_cores not in _SHARED

    def changes(self) -> Changes:
        """Return the settings as `settings.update` takes them."""
        return {
            "engine": {"cores": self.cores, "memory": self.memory, "threads": self.threads},
            "speculation": {"draft_cores": self.draft_cores},
        }

    def applied_to(self, settings: Settings) -> Settings:
        """Return a copy of `settings` with this placement."""
        return with_changes(settings, self.changes())


@dataclass(frozen=True, slots=True)
class Placement:
    """A `PlacementSpec` resolved on one machine.

    `cpus`: one logical CPU for each thread of the target, ascending. `draft_cpus`: () when the draft model computes on
    `cpus`, sequentially; other CPUs when it computes concurrently; some of `cpus` when the faster of the two has to be
    measured. `memory` is the NUMA policy with its nodes spelled out. `reason` and `memory_reason` are one
    sentence each, `notes` are for the user. `roams`: the target's threads may move among these CPUs; () pins each to
    its own.
    """

    cpus: tuple[int, ...]
    draft_cpus: tuple[int, ...]
    memory: Policy
    reason: str
    memory_reason: str
    notes: tuple[str, ...] = ()
    roams: tuple[int, ...] = ()

    @property
    def is_split(self) -> bool:
        """Return whether the draft model has cores of its own, whatever is measured."""
        return not set(self.draft_cpus) <= set(self.cpus)


class PlacementError(UsageError):
    """Raised for a `PlacementSpec` that this machine does not support. `problems`: the error by field of the spec."""

    def __init__(self, problems: dict[str, UsageError]) -> None:
        first = next(iter(problems.values()))
        super().__init__(first.message, first.hint)
        self.problems = {name: str(error) for name, error in problems.items()}


def place(
    topology: Topology, spec: PlacementSpec, *, with_draft: bool = False, inherits_policy: bool = False
) -> Placement:
    """Decide which CPUs compute and where memory is allocated.

    Args:
        with_draft: a draft model is loaded too; without, `spec.draft_cores` counts for nothing.
        inherits_policy: this process was started under a memory policy, which "auto" keeps.

    Raises:
        PlacementError: the spec names what is not there, leaves the target no core, or could not be saved.
        UsageError: llama.cpp can use none of the CPUs of this process.
    """
    whole, topology = topology, _usable(topology)
    spec, left_out = narrowed(topology, spec) if spec.is_saved else (spec, ())
    problems: dict[str, UsageError] = {}
    draft: tuple[int, ...] = ()
    choice, policy, memory_reason = CoreChoice((), ""), Policy("local"), "as this process was started"
    if with_draft and spec.names_draft_cores:
        try:
            draft = choose_cores(topology, spec.draft_cores).cpus
        except UsageError as error:
            problems["draft_cores"] = UsageError(f"Draft cores {spec.draft_cores!r}: {error.message}", error.hint)
    try:
        choice = choose_cores(topology, spec.cores, spec.threads)
    except UsageError as error:
        # The count is at fault when the same words do without it.
        problems["threads" if spec.threads and _names_cores(topology, spec.cores) else "cores"] = error
    if not problems and draft:
        try:
            choice = _beside(topology, spec, draft)
        except UsageError:
            problems["draft_cores"] = UsageError(
                f"The draft cores {spec.draft_cores} leave no core for the target model.", "Choose fewer, or `shared`."
            )
    if not (inherits_policy and spec.memory == "auto"):
        try:
            policy, memory_reason = choose_policy(topology, spec.memory, (*choice.cpus, *draft))
        except UsageError as error:
            problems["memory"] = error
    problems = problems or _unsavable(spec)
    if problems:
        raise PlacementError(problems)
    if with_draft and spec.draft_cores == "auto" and len(choice.cpus) > 1 and not choice.roams:
        draft = cpus_to_try(topology, choice.cpus)
    notes = (*left_out, *choice.notes, *_left_out(whole, topology))
    roams = choice.roams if not draft else ()
    return Placement(choice.cpus, draft, policy, choice.reason, memory_reason, notes, roams)


def _beside(topology: Topology, spec: PlacementSpec, draft: tuple[int, ...]) -> CoreChoice:
    """Return the target's cores without those of `draft`; no more threads than these are."""
    every = choose_cores(topology, spec.cores, without=draft)
    if not 0 < spec.threads < len(every.cpus):
        return every
    return choose_cores(topology, spec.cores, spec.threads, without=draft)


def cpus_to_try(topology: Topology, cpus: tuple[int, ...]) -> tuple[int, ...]:
    """Return those of `cpus` that the draft model gets to find out whether drafting concurrently is faster.

    They are those of the last L3 group, so that the two models share neither a cache nor a link to memory; where there
    is only one group, every eighth.
    """
    groups = topology.by_l3(cpus)
    if len(groups) > 1:
        return tuple(groups[max(groups)])
    return cpus[-max(1, len(cpus) // 8) :]


def _usable(topology: Topology) -> Topology:
    """Return the machine with those CPUs as allowed ones that ggml can pin threads to."""
    cpus = tuple(cpu for cpu in topology.allowed if cpu < MAX_CPUS)
    if not cpus:
        raise UsageError(
            f"This process may only use CPUs {format_cpu_list(topology.allowed)}, and llama.cpp can use only those "
            f"below {MAX_CPUS}.",
            "Start it on others, for example with `taskset -c 0-31 cpuchat`.",
        )
    return topology if cpus == topology.allowed else replace(topology, allowed=cpus)


def _left_out(topology: Topology, usable: Topology) -> tuple[str, ...]:
    """Return a note about cores that ggml cannot pin threads to."""
    missing = len(topology.allowed_cores) - len(usable.allowed_cores)
    if not missing:
        return ()
    nodes = {core.node for core in topology.allowed_cores} - {core.node for core in usable.allowed_cores}
    none = f", all of {'node' if len(nodes) == 1 else 'nodes'} {format_cpu_list(nodes)} among them" if nodes else ""
    unused = f"{plural(missing, 'core')} {'is' if missing == 1 else 'are'} not used{none}"
    return (f"llama.cpp pins threads to CPUs below {MAX_CPUS} only: {unused}.",)


def narrowed(topology: Topology, spec: PlacementSpec) -> tuple[PlacementSpec, tuple[str, ...]]:
    """Return `spec` without what this process may not use, and a note for each part that differs."""
    used, why = spec, f"allowed CPUs: {format_cpu_list(topology.allowed)}"
    if topology.quota is not None:
        why += f", quota: {topology.quota:g}"
    if spec.cores not in ("auto", "all"):
        used = replace(used, cores=allowed_part(topology, spec.cores) or "auto")
    if spec.names_draft_cores:
        used = replace(used, draft_cores=allowed_part(topology, spec.draft_cores) or "auto")
    if spec.threads > 1 and not _names_cores(topology, used.cores, spec.threads):
        used = replace(used, threads=len(choose_cores(topology, used.cores).cpus))
    notes = [
        f"{name.replace('_', ' ').capitalize()} {getattr(spec, name)} → {getattr(used, name)} ({why})."
        for name in ("cores", "draft_cores", "threads")
        if getattr(spec, name) != getattr(used, name)
    ]
    try:
        choose_policy(topology, spec.memory)
    except UsageError as error:
        used = replace(used, memory="auto")
        notes.append(f"Memory policy {spec.memory} → auto: {error.message[:1].lower()}{error.message[1:]}")
    return used, tuple(notes)


def check_given(topology: Topology, spec: PlacementSpec, names: Collection[str]) -> None:
    """Check the fields `names` of `spec`, which were given for this run. Raises UsageError as `place`, but for lists of
    cores only where none of them is allowed."""
    given = {name: getattr(spec, name) for name in names}
    kept = {name: given[name] for name in names if "cores" not in name or not allowed_part(topology, given[name])}
    used = replace(narrowed(topology, spec)[0], is_saved=False, **kept)
    place(topology, used, with_draft="draft_cores" in kept)


def _names_cores(topology: Topology, cores: str, threads: int = 0) -> bool:
    try:
        choose_cores(topology, cores, threads)
    except UsageError:
        return False
    return True


def _unsavable(spec: PlacementSpec) -> dict[str, UsageError]:
    """Return the fields that the settings file would not accept, such as CPU numbers of five digits."""
    try:
        msgspec.convert(spec.changes(), prepared(Settings))
    except msgspec.ValidationError as error:
        key, reason = explained(error)
        return {key.rpartition(".")[2]: UsageError(f"{key}: {reason}.")}
    return {}


SHARED: Final = "all cores, shared"
OWN_L3: Final = "draft on its own L3 group"
OWN_LINK: Final = "draft on its own fabric link"
OWN_SOCKET: Final = "one socket drafts, the other verifies"
ONE_NODE: Final = "one node"


@dataclass(frozen=True, slots=True)
class PlacementCandidate:
    """A placement with a name; `reason` is one sentence for or against it."""

    name: str
    spec: PlacementSpec
    placement: Placement
    reason: str


def candidates(topology: Topology) -> list[PlacementCandidate]:
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


def _candidate(topology: Topology, name: str, spec: PlacementSpec, reason: str) -> list[PlacementCandidate]:
    """Return a list with the candidate, or an empty one if that would leave a model without cores."""
    try:
        return [PlacementCandidate(name, spec, place(topology, spec, with_draft=True), reason)]
    except UsageError:
        return []


def _shared(topology: Topology) -> PlacementCandidate:
    spec = PlacementSpec(draft_cores="shared")
    placement = place(topology, spec)
    return PlacementCandidate(SHARED, spec, placement, _why_shared(topology, placement.cpus))


def _why_shared(topology: Topology, cpus: tuple[int, ...]) -> str:
    """Explain in one sentence why all cores are shared, by what is special about this machine."""
    n, all_cores, groups = len(cpus), len(topology.allowed_cores), topology.by_l3(cpus)
    nodes = {node for cpu in cpus if (node := topology.node_of(cpu)) is not None}
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
    links = {topology.l3_groups[index].fabric_link for index in topology.by_l3(cpus)}
    if len(links) < len(groups):
        return (
            f"{who}: pairs of L3 groups share a fabric link, so a group for the draft model would use part of one of "
            f"{len(links)} links and slow its neighbor down."
        )
    return (
        f"{who}: an L3 group of its own would give the draft model one of {len(links)} links to memory, and take it "
        "from the target."
    )


def _with_own_l3(topology: Topology, last: int) -> list[PlacementCandidate]:
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


def _few_of_each(topology: Topology, groups: Collection[int]) -> list[PlacementCandidate]:
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


def _one_node(topology: Topology) -> list[PlacementCandidate]:
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


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The ceiling of a placement: times of one round (all drafts, one verify pass) in seconds.

    `limit` says what bounds it, `remarks` what else to know. `plain_tok_s` is the target without a draft model on all
    cores, for comparison.
    """

    tok_s: float
    plain_tok_s: float
    t_target_s: float
    t_draft_s: float
    limit: str
    remarks: tuple[str, ...] = ()


class ReadRates(NamedTuple):
    """Measured read bandwidth in bytes per second: of the whole machine, of one L3 group alone, and of one core (None:
    not known, taken as no bound)."""

    peak: float
    l3_link: float | None = None
    one_core: float | None = None

    def of(self, topology: Topology, cpus: Collection[int], memory: str = "auto") -> tuple[float, str]:
        """Return the bytes per second that `cpus` can read together, and what bounds them: "memory", "link" or "cores".

        Each link carries what its cores ask for, at most that of one L3 group; all links together at most the part of
        the peak that belongs to the sockets of `cpus`, and to the nodes that the policy `memory` binds to.
        """
        peak, l3_link, one_core = self
        sockets = {core.package for cpu in cpus if (core := topology.core_of(cpu)) is not None}
        share = max(len(sockets), 1) / max(len(topology.packages), 1)
        if memory.startswith("bind:"):
            share = min(share, len(parse_cpu_list(memory.removeprefix("bind:"))) / max(len(topology.cpu_nodes), 1))
        max_bytes_per_s = peak * share
        if one_core is None and l3_link is None:
            return max_bytes_per_s, "memory"
        cores: dict[int, set[int]] = {}
        for cpu in cpus:
            core, group = topology.core_of(cpu), topology.l3_of(cpu)
            cores.setdefault(group.fabric_link if group is not None else -1, set()).add(
                core.index if core is not None else cpu
            )
        total, on_link = 0.0, False
        for link, members in cores.items():
            asked = len(members) * one_core if one_core is not None else float("inf")
            limit = l3_link if l3_link is not None and link >= 0 else float("inf")
            total += min(asked, limit)
            on_link = on_link or limit <= asked
        if total >= max_bytes_per_s:
            return max_bytes_per_s, "memory"
        return total, "link" if on_link else "cores"


def ceiling(
    candidate: PlacementCandidate,
    topology: Topology,
    *,
    target_bytes: float,
    draft_bytes: float,
    rates: ReadRates,
    tokens_per_pass: float = 1.0,
    depth: int = 0,
    overlap: bool = False,
) -> Ceiling:
    """Compute what `candidate` reaches at best (reference/hardware.md, "Numbers for judging plans").

    Sequentially: t = target / B(target cores) + depth * draft / B(draft cores). With overlap the longer of both, and
    not less than all bytes together through the memory. Computing is not counted.

    Args:
        target_bytes, draft_bytes: read per pass of each model.
        tokens_per_pass: tokens that a verify pass yields, its own one included.
        depth: tokens drafted for each pass.
        overlap: draft the next round while this one is verified; counts only for a draft model on cores of its own.

    Raises:
        UsageError: bytes, bandwidth or tokens that are not above 0.
    """
    if min(target_bytes, rates.peak, tokens_per_pass) <= 0 or min(draft_bytes, depth) < 0:
        raise UsageError("Sizes, bandwidth and tokens per pass must be above 0.")
    placement, memory = candidate.placement, candidate.spec.memory
    own = placement.is_split
    speed, bound = rates.of(topology, placement.cpus, memory)
    draft_speed, draft_bound = rates.of(topology, placement.draft_cpus if own else placement.cpus, memory)
    t_target = target_bytes / speed
    t_draft = depth * draft_bytes / draft_speed
    overlap = overlap and own and depth > 0
    t_memory = (target_bytes + depth * draft_bytes) / rates.peak
    t_round = max(t_target, t_draft, t_memory) if overlap else t_target + t_draft
    whole, _ = rates.of(topology, choose_cores(topology).cpus)
    plain = whole / target_bytes
    result = Ceiling(
        tokens_per_pass / t_round,
        plain,
        t_target,
        t_draft,
        _limit(t_target, t_draft, t_memory if overlap else 0.0, bound, draft_bound),
    )
    return replace(result, remarks=tuple(_remarks(candidate, topology, result, draft_bytes, depth, overlap)))


def _limit(t_target: float, t_draft: float, t_memory: float, bound: str, draft_bound: str) -> str:
    if t_memory > max(t_target, t_draft):
        return "memory bandwidth, shared by both models"
    where = {"memory": "memory bandwidth", "link": "the links of its L3 groups", "cores": "its cores"}
    if t_draft > t_target:
        return f"the draft model, by {where[draft_bound]}"
    return f"the target model, by {where[bound]}"


def _remarks(
    candidate: PlacementCandidate, topology: Topology, result: Ceiling, draft_bytes: float, depth: int, overlap: bool
) -> list[str]:
    remarks = []
    own = candidate.placement.is_split
    if depth and draft_bytes and own:
        remarks.append(_cache_remark(topology, candidate.placement.draft_cpus, draft_bytes))
        if not overlap:
            remarks.append("Without overlap, one model's cores idle while the other computes.")
    if depth and result.tok_s < result.plain_tok_s:
        remarks.append(f"Slower than plain decoding on all cores ({result.plain_tok_s:.3g} tok/s).")
    if candidate.name == OWN_SOCKET:
        remarks.append("Memory is interleaved, so half of the reads cross sockets.")
    if candidate.spec.memory == "auto" and not own and len(topology.packages) > 1:
        remarks.append("With memory interleaved, half of the reads cross sockets: expect less.")
    if topology.virtual:
        remarks.append("A virtual machine's L3 groups may not be real: trust the measurement.")
    return [remark for remark in remarks if remark]


def _cache_remark(topology: Topology, cpus: Collection[int], draft_bytes: float) -> str:
    """Return whether a draft model could stay in the L3 caches of its own cores."""
    size = topology.l3_bytes(cpus)
    if not size:
        return ""
    model, cache = f"{draft_bytes / 1e6:.0f} MB", f"{size >> 20} MB"
    if draft_bytes > size:
        return (
            f"The draft model of {model} does not fit the L3 of {cache} of its cores ({draft_bytes / size:.0f} times "
            "its size): it is read from memory for every token."
        )
    return f"The draft model of {model} fits the L3 of {cache} of its cores and may be faster than this."
