"""Where a model computes, in the words of the settings, and what these words mean on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from cpuchat.errors import UsageError
from cpuchat.hardware.numa.mempolicy import choose_policy
from cpuchat.hardware.placement.cores import choose_cores
from cpuchat.hardware.topology import Topology
from cpuchat.settings import Settings, explained

IN_TURN = ("auto", "shared")
"""Words for draft cores that name none: the draft model computes on the target's cores, in turn."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The settings engine.cores, speculation.draft_cores, engine.memory and engine.threads."""

    cores: str = "auto"
    draft_cores: str = "auto"
    memory: str = "auto"
    threads: int = 0

    @classmethod
    def of(cls, settings: Settings) -> Arrangement:
        """What `settings` say."""
        engine = settings.engine
        return cls(engine.cores, settings.speculation.draft_cores, engine.memory, engine.threads)

    def changes(self) -> dict[str, dict[str, Any]]:
        """As `settings.update` takes them."""
        return {
            "engine": {"cores": self.cores, "memory": self.memory, "threads": self.threads},
            "speculation": {"draft_cores": self.draft_cores},
        }

    def put_into(self, settings: Settings) -> Settings:
        """A copy of `settings` with this."""
        engine = msgspec.structs.replace(settings.engine, cores=self.cores, memory=self.memory, threads=self.threads)
        speculation = msgspec.structs.replace(settings.speculation, draft_cores=self.draft_cores)
        return msgspec.structs.replace(settings, engine=engine, speculation=speculation)


@dataclass(frozen=True, slots=True)
class Resolved:
    """Logical CPUs of the target and of the draft model (None: those of the target, in turn), the memory policy in
    full ("interleave:0-1"), one sentence why these cores, and what is worth a note. `problems` are by the name of the
    part of the arrangement; with any, the rest is as far as it could be found."""

    target: tuple[int, ...] = ()
    draft: tuple[int, ...] | None = None
    memory: str = ""
    reason: str = ""
    memory_reason: str = ""
    notes: tuple[str, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()


def resolve(arrangement: Arrangement, topology: Topology) -> Resolved:
    """What the words mean here. Never raises: what is wrong is in `problems`."""
    problems: dict[str, str] = {}
    draft: tuple[int, ...] | None = None
    if arrangement.draft_cores not in IN_TURN:
        try:
            draft = choose_cores(topology, arrangement.draft_cores).cpus
        except UsageError as error:
            problems["draft_cores"] = str(error)
    target: tuple[int, ...] = ()
    reason = memory = memory_reason = ""
    notes: tuple[str, ...] = ()
    try:
        choice = choose_cores(topology, arrangement.cores, arrangement.threads, without=draft or ())
        target, reason, notes = choice.cpus, choice.reason, choice.notes
    except UsageError as error:
        # The count is at fault when the same words do without it.
        problems["threads" if arrangement.threads and _fits(arrangement.cores, topology) else "cores"] = str(error)
    try:
        policy, memory_reason = choose_policy(topology, arrangement.memory, target)
        memory = policy.words
    except UsageError as error:
        problems["memory"] = str(error)
    if not problems:
        problems = _refused_by_settings(arrangement)
    return Resolved(target, draft, memory, reason, memory_reason, notes, tuple(problems.items()))


def _fits(cores: str, topology: Topology) -> bool:
    try:
        choose_cores(topology, cores)
    except UsageError:
        return False
    return True


def _refused_by_settings(arrangement: Arrangement) -> dict[str, str]:
    """What could not be written into the settings file, such as numbers of five digits."""
    try:
        msgspec.convert(arrangement.changes(), Settings)
    except msgspec.ValidationError as error:
        key, reason = explained(error)
        return {key.rpartition(".")[2]: reason}
    return {}
