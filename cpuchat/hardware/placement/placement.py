"""Decides where a model computes: CPUs of the target and of the draft model, and the memory policy.

It is made in the process that the user runs, before a worker starts; workers are sent the numbers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

import msgspec

from cpuchat.base.errors import UsageError
from cpuchat.config.settings import Changes, Settings, explained, with_changes
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.numa.mempolicy import Policy, choose_policy
from cpuchat.hardware.placement.cores import CoreChoice, choose_cores
from cpuchat.hardware.topology import Topology

MAX_CPUS: Final = 512
"""GGML_MAX_N_THREADS, the length of ggml's CPU masks: threads cannot be pinned to CPUs with higher numbers."""

_SHARED: Final = ("auto", "shared")


@dataclass(frozen=True, slots=True)
class PlacementSpec:
    """Where a model computes, in the words of the settings.

    `cores` and `threads` are of the target (`placement.cores` has the words; 0: one thread for each core).
    `draft_cores`: "shared" (the target's cores, sequentially), cores in the same words (concurrently), or "auto"
    (whichever is measured to be faster). `memory` is the NUMA policy (`numa.mempolicy` has the words).
    """

    cores: str = "auto"
    draft_cores: str = "auto"
    memory: str = "auto"
    threads: int = 0

    @classmethod
    def of(cls, settings: Settings) -> PlacementSpec:
        """Return the placement that `settings` ask for."""
        engine = settings.engine
        return cls(engine.cores, settings.speculation.draft_cores, engine.memory, engine.threads)

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
    sentence each, `notes` are for the user.
    """

    cpus: tuple[int, ...]
    draft_cpus: tuple[int, ...]
    memory: Policy
    reason: str
    memory_reason: str
    notes: tuple[str, ...] = ()

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
    topology = _usable(topology)
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
    if with_draft and spec.draft_cores == "auto" and len(choice.cpus) > 1:
        draft = cpus_to_try(topology, choice.cpus)
    return Placement(choice.cpus, draft, policy, choice.reason, memory_reason, choice.notes)


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
    groups: dict[int, list[int]] = {}
    for cpu in cpus:
        group = topology.l3_of(cpu)
        if group is not None:
            groups.setdefault(group.index, []).append(cpu)
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
    return topology if cpus == topology.allowed else dataclasses.replace(topology, allowed=cpus)


def _names_cores(topology: Topology, cores: str) -> bool:
    try:
        choose_cores(topology, cores)
    except UsageError:
        return False
    return True


def _unsavable(spec: PlacementSpec) -> dict[str, UsageError]:
    """Return the fields that the settings file would not accept, such as CPU numbers of five digits."""
    try:
        msgspec.convert(spec.changes(), Settings)
    except msgspec.ValidationError as error:
        key, reason = explained(error)
        return {key.rpartition(".")[2]: UsageError(f"{key}: {reason}.")}
    return {}
