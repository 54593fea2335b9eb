"""Decides where a model computes, its draft model too: CPUs, and the memory policy.

`place` is called in the process that the user runs, before a worker starts; workers are sent the numbers. `candidates`
are ways to use a machine. Decoding reads all weights for each pass, so a placement is as fast as the paths that its
cores read through: a core, the fabric link of its L3 groups, the memory. One link carries a small part of what the
memory gives (50 of 367 GB/s on an EPYC 9354P).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from cpuchat.base.errors import UsageError
from cpuchat.config.settings import Changes, Settings, with_changes
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.numa.mempolicy import Policy, choose_policy
from cpuchat.hardware.placement.cores import CoreChoice, allowed_part, choose_cores
from cpuchat.hardware.topology import Topology
from cpuchat.telemetry.units import plural

MAX_CPUS: Final = 512
"""GGML_MAX_N_THREADS, the length of ggml's CPU masks: threads cannot be pinned to CPUs with higher numbers."""


@dataclass(frozen=True, slots=True)
class PlacementSpec:
    """Where a model computes, in the words of the settings.

    `placement.cores` has the words of `cores`; 0 `threads`: one for each core. `memory_policy` is the NUMA policy
    (`numa.mempolicy` has the words). `is_saved`: it may have been written for another machine or container, and what is
    not allowed here is left out."""

    cores: str = "auto"
    memory_policy: str = "auto"
    threads: int = 0
    is_saved: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, settings: Settings) -> PlacementSpec:
        """Return the placement that `settings` ask for."""
        engine = settings.engine
        return cls(engine.cores, engine.memory_policy, engine.threads, is_saved=True)

    def changes(self) -> Changes:
        return {"engine": {"cores": self.cores, "memory_policy": self.memory_policy, "threads": self.threads}}

    def applied_to(self, settings: Settings) -> Settings:
        return with_changes(settings, self.changes())


@dataclass(frozen=True, slots=True)
class Placement:
    """A `PlacementSpec` on one machine: `cpus`, one logical CPU a thread, ascending, the `memory_policy` with all
    nodes, a sentence each why, and `notes` for the user. `roams`: threads may move among these CPUs; () pins each."""

    cpus: tuple[int, ...]
    memory_policy: Policy
    reason: str
    policy_reason: str
    notes: tuple[str, ...] = ()
    roams: tuple[int, ...] = ()


class PlacementError(UsageError):
    """Raised for a `PlacementSpec` that this machine does not support. `problems`: the error by field of the spec."""

    def __init__(self, problems: dict[str, UsageError]) -> None:
        first = next(iter(problems.values()))
        super().__init__(first.message, first.hint)
        self.problems = {name: str(error) for name, error in problems.items()}


def place(topology: Topology, spec: PlacementSpec, *, inherits_policy: bool = False) -> Placement:
    """Decide which CPUs compute and where memory is allocated. `inherits_policy`: this process was started under a
    memory policy, which "auto" keeps. Raises PlacementError: the spec names what is not there; UsageError: llama.cpp
    can use none of the CPUs of this process."""
    whole = topology
    usable = tuple(cpu for cpu in topology.allowed if cpu < MAX_CPUS)
    if not usable:
        raise UsageError(
            f"This process may only use CPUs {format_cpu_list(topology.allowed)}, and llama.cpp can use only those "
            f"below {MAX_CPUS}.",
            "Start it on others, for example with `taskset -c 0-31 cpuchat`.",
        )
    if usable != topology.allowed:
        topology = replace(topology, allowed=usable)
    spec, left_out = narrowed(topology, spec) if spec.is_saved else (spec, ())
    problems: dict[str, UsageError] = {}
    choice, policy, policy_reason = CoreChoice((), ""), Policy("local"), "as this process was started"
    try:
        choice = choose_cores(topology, spec.cores, spec.threads)
    except UsageError as error:
        # The count is at fault when the same words do without it.
        problems["threads" if spec.threads and _names_cores(topology, spec.cores) else "cores"] = error
    if not (inherits_policy and spec.memory_policy == "auto"):
        try:
            policy, policy_reason = choose_policy(topology, spec.memory_policy, choice.cpus)
        except UsageError as error:
            problems["memory_policy"] = error
    if problems:
        raise PlacementError(problems)
    notes = (*left_out, *choice.notes, *_left_out(whole, topology))
    return Placement(choice.cpus, policy, choice.reason, policy_reason, notes, choice.roams)


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
    if spec.threads > 1 and not _names_cores(topology, used.cores, spec.threads):
        used = replace(used, threads=len(choose_cores(topology, used.cores).cpus))
    notes = [
        f"{name.replace('_', ' ').capitalize()} {getattr(spec, name)} → {getattr(used, name)} ({why})."
        for name in ("cores", "threads")
        if getattr(spec, name) != getattr(used, name)
    ]
    try:
        choose_policy(topology, spec.memory_policy)
    except UsageError as error:
        used = replace(used, memory_policy="auto")
        notes.append(f"Memory policy {spec.memory_policy} → auto: {error.message[:1].lower()}{error.message[1:]}")
    return used, tuple(notes)


def check_given(topology: Topology, spec: PlacementSpec, names: Collection[str]) -> None:
    """Check the fields `names` of `spec`, which were given for this run. Raises UsageError as `place`, but for a list
    of cores only where none of them is allowed."""
    given = {name: getattr(spec, name) for name in names}
    kept = {name: given[name] for name in names if name != "cores" or not allowed_part(topology, given[name])}
    used = replace(narrowed(topology, spec)[0], is_saved=False, **kept)
    place(topology, used)


def _names_cores(topology: Topology, cores: str, threads: int = 0) -> bool:
    try:
        choose_cores(topology, cores, threads)
    except UsageError:
        return False
    return True


ALL_CORES: Final = "all cores"
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
    ways = [(ALL_CORES, PlacementSpec(), _why_all(topology, place(topology, PlacementSpec())))]
    groups = sorted({core.l3 for core in topology.allowed_cores if core.l3 is not None})
    if len(groups) > 1:
        smallest = min(sum(core.l3 == group for core in topology.allowed_cores) for group in groups)
        n = 4 if smallest > 4 else 2
        if smallest > n and (topology.quota is None or topology.quota >= n * len(groups)):
            why = (
                f"{n} cores nearly saturate a group's memory link while decoding, with less synchronization; prefill "
                "has fewer cores to compute on."
            )
            ways.append((f"{n} cores per L3 group", PlacementSpec(f"{n}/l3"), why))
    nodes = sorted({core.node for core in topology.allowed_cores})
    mine = [node for node in topology.nodes if node.number in nodes and node.number in topology.allowed_nodes]
    if len(nodes) > 1 and mine:
        node = max(mine, key=lambda node: (node.memory, -node.number))
        room = f"{node.memory / 1e9:.0f} GB of its memory" if node.memory else "its memory"
        why = (
            f"No cross-node reads, but the bandwidth of the other {'node' if len(nodes) == 2 else 'nodes'} is unused, "
            f"and the model must fit the {room}."
        )
        ways.append((ONE_NODE, PlacementSpec(f"node:{node.number}", f"bind:{node.number}"), why))
    found: list[PlacementCandidate] = []
    for name, spec, why in ways:
        with contextlib.suppress(UsageError):  # the quota is too small for it
            found.append(PlacementCandidate(name, spec, place(topology, spec), why))
    return found


def offered(topology: Topology, used: Iterable[PlacementSpec]) -> list[PlacementCandidate]:
    """Return the placements that this machine allows; those that are or were `used`, in these words."""

    def where(placed: Placement) -> tuple[object, ...]:
        return placed.cpus, placed.memory_policy

    words: dict[tuple[object, ...], PlacementSpec] = {}
    for spec in used:
        with contextlib.suppress(UsageError):
            words.setdefault(where(place(topology, spec)), spec)
    return [replace(one, spec=words.get(where(one.placement), one.spec)) for one in candidates(topology)]


def _why_all(topology: Topology, placed: Placement) -> str:
    cpus, nodes = placed.cpus, placed.memory_policy.nodes
    n, all_cores = len(cpus), len(topology.allowed_cores)
    who = f"All {n} cores"
    if topology.quota is not None and topology.quota < all_cores:
        return f"{n} of {all_cores} cores: the cgroup CPU quota is {topology.quota:g}."
    if all_cores < 2:
        return "Only one core."
    if n < all_cores:
        return f"The {n} performance cores: the {all_cores - n} efficient ones would slow them down."
    if len(nodes) > 1:
        return f"{who}, with memory interleaved over {len(nodes)} nodes."
    return f"{who}."
