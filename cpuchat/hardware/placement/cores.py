"""Resolves words ("auto", "l3:0,2", "4/l3") to one logical CPU per thread, with the reason; tells how busy CPUs are.

Threads of one model read memory at the same time and wait for each other after every layer. So each gets a physical
core of its own (second hyper-threads add nothing, reference figures: 32 to 64 threads on 32 cores no gain), all cores
are of the fast kind, and fewer threads than cores are spread over all memory nodes, fabric links and L3 groups, as one
link carries far less than the memory gives.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Final

from cpuchat.base.errors import UsageError
from cpuchat.hardware.lists import LIST, format_cpu_list, parse_cpu_list
from cpuchat.hardware.sysfs import ROOT, read_text
from cpuchat.hardware.topology import Core, Topology
from cpuchat.telemetry.units import plural

WORDS: Final = "auto, all, a list of CPUs such as 0-7, l3:0, node:0, socket:0, or 4/l3 (cores of each L3 group)"


@dataclass(frozen=True, slots=True)
class CoreChoice:
    """One logical CPU for each thread, ascending; `reason` is one sentence, `notes` are for the user. `roams`: threads
    are not pinned, but may move among these CPUs."""

    cpus: tuple[int, ...]
    reason: str
    notes: tuple[str, ...] = ()
    roams: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Named:
    """The cores that words name: `cpus` to use, `spare` ones for more threads, and descriptions of both."""

    cpus: tuple[int, ...]
    what: str
    why: str = ""
    spare: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def choose_cores(topology: Topology, spec: str = "auto", n_threads: int = 0) -> CoreChoice:
    """Choose the CPUs of `n_threads` threads (0: as many as make sense) on the cores that `spec` names (see WORDS).

    Raises UsageError: `spec` names nothing here, or fewer cores than threads; it says what is possible."""
    named = _named(topology, spec)
    max_threads = len(named.cpus) + len(named.spare)
    # Threads wait for each other: one that is throttled stops all, so a part of a CPU is no CPU.
    quota = None if topology.quota is None else max(math.floor(topology.quota), 1)
    if n_threads < 0 or n_threads > max_threads or (quota is not None and n_threads > quota):
        raise _too_many(topology, spec, n_threads, max_threads, quota)
    wanted = n_threads or len(named.cpus)
    capped = quota is not None and wanted > quota
    n = min(wanted, quota) if quota is not None else wanted
    cpus = spread(topology, named.cpus, n)
    cpus = tuple(sorted({*cpus, *spread(topology, named.spare, n - len(cpus))}))
    notes = list(named.notes)
    if siblings := n_sharing_a_core(topology, cpus):
        notes.append(
            f"{plural(siblings, 'thread')} of {len(cpus)} share a core with another thread, which often slows decoding "
            "down; `cpuchat tune` measures it."
        )
    # Every program with such a limit would choose the same CPUs, and share them while others idle. A cpuset tells which
    # are its own; and threads that are asked for are worth spreading over L3 groups.
    one_group = bool(topology.virtual) or len(topology.by_l3(named.cpus)) < 2
    limited = capped or (len(cpus) < len(named.cpus) and one_group)
    roams = limited and spec in ("auto", "all") and set(topology.allowed) == set(topology.online)
    reason = _reason(topology, named, cpus, asked=bool(n_threads), capped=capped, roams=roams)
    return CoreChoice(cpus, reason, tuple(notes), named.cpus if roams else ())


def allowed_part(topology: Topology, spec: str) -> str:
    """Return those of the CPUs or places that `spec` lists which are allowed, in the same words; "" for none."""

    def is_there(words: str) -> bool:
        try:
            return bool(_named(topology, words))
        except UsageError:
            return False

    kind, colon, text = spec.rpartition(":")
    numbers = () if is_there(spec) or not re.fullmatch(LIST, text) else parse_cpu_list(text)
    usable = [number for number in numbers if is_there(f"{kind}{colon}{number}")]
    return f"{kind}{colon}{format_cpu_list(usable)}" if usable else spec if is_there(spec) else ""


def spread(topology: Topology, cpus: Collection[int], n: int) -> tuple[int, ...]:
    """Return `n` of `cpus`, spread evenly over nodes, then fabric links, then L3 groups, then cores; ascending."""

    def path(cpu: int) -> tuple[int, ...]:
        core, group = topology.core_of(cpu), topology.l3_of(cpu)
        place = (group.fabric_link, group.index) if group is not None else (-1, -1)
        return (core.node, *place, core.index) if core is not None else (-1, *place, cpu)

    return tuple(sorted(_share([(path(cpu), cpu) for cpu in sorted(set(cpus))], n, 0)))


def _share(places: Sequence[tuple[tuple[int, ...], int]], n: int, depth: int) -> list[int]:
    """Distribute `n` CPUs over the parts that differ at `depth` of their path."""
    if n >= len(places) or depth == 4:
        return [cpu for _, cpu in places[: max(n, 0)]]
    parts: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for place in places:
        parts.setdefault(place[0][depth], []).append(place)
    counts = dict.fromkeys(parts, 0)
    for _ in range(n):
        fullest = min((key for key in parts if counts[key] < len(parts[key])), key=lambda key: counts[key])
        counts[fullest] += 1
    return [cpu for key, part in parts.items() for cpu in _share(part, counts[key], depth + 1)]


def _named(topology: Topology, spec: str) -> _Named:
    fast = [core for core in topology.allowed_cores if core.kind != "efficient"]
    slow = [core for core in topology.allowed_cores if core.kind == "efficient"]
    if spec == "auto" and fast and slow:
        would = "the efficient one would" if len(slow) == 1 else f"the {len(slow)} efficient ones would"
        what, why = plural(len(fast), "performance core"), f"{would} slow them down"
        return _Named(_firsts(topology, fast), what, why, spare=_firsts(topology, slow))
    if spec in ("auto", "all"):
        cores = topology.allowed_cores
        why = "SMT siblings do not speed up decoding" if any(len(core.cpus) > 1 for core in cores) else ""
        what = plural(len(cores), "physical core")
        if len(cores) < len(topology.cores):
            what += f" that this process may use (the machine has {len(topology.cores)})"
        return _Named(_firsts(topology, cores), what, why)
    if match := re.fullmatch(r"([0-9]{1,4})/l3", spec):
        return _of_each_l3(topology, int(match[1]))
    if re.fullmatch(LIST, spec):
        cpus = _numbers(spec, spec)
        wrong = [cpu for cpu in cpus if cpu not in topology.allowed]
        if wrong:
            why = "is not allowed for this process" if wrong[0] in topology.online else "does not exist or is offline"
            raise UsageError(f"CPU {wrong[0]} {why}.", f"Choose from {format_cpu_list(topology.allowed)}.")
        return _Named(cpus, f"{plural(len(cpus), 'CPU')} in the list {spec}")
    match = re.fullmatch(rf"(l3|node|socket):({LIST})", spec)
    if match is None:
        raise UsageError(f"{spec!r} does not name any cores.", f"Use {WORDS}.")
    return _placed(topology, match[1], _numbers(spec, match[2]))


def _numbers(spec: str, text: str) -> tuple[int, ...]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        if last and int(last) < int(first):
            raise UsageError(f"The range {part} in {spec!r} is reversed.", f"Use {last}-{first}.")
    return parse_cpu_list(text)


def _firsts(topology: Topology, cores: Iterable[Core]) -> tuple[int, ...]:
    allowed = set(topology.allowed)
    return tuple(min(allowed.intersection(core.cpus)) for core in cores)


def _placed(topology: Topology, kind: str, numbers: tuple[int, ...]) -> _Named:
    name, field, there = {
        "l3": ("L3 group", "l3", range(len(topology.l3_groups))),
        "node": ("NUMA node", "node", [node.number for node in topology.nodes]),
        "socket": ("socket", "package", topology.packages),
    }[kind]
    if not there:
        raise UsageError(f"The {name}s of this machine are not known.", "Use a list of CPUs such as 0-7.")
    allowed, of = topology.allowed_cores, attrgetter(field)
    usable = sorted({number for core in allowed if (number := of(core)) is not None})
    for number in numbers:
        if number not in usable:
            why = "has no core that this process may use" if number in there else "does not exist"
            raise UsageError(
                f"{name[0].upper()}{name[1:]} {number} {why}.", f"Choose from {kind}:{format_cpu_list(usable)}."
            )
    cores = [core for core in allowed if of(core) in numbers]
    many = f"{name}s" if len(numbers) > 1 else name
    return _Named(_firsts(topology, cores), f"{plural(len(cores), 'core')} of {many} {format_cpu_list(numbers)}")


def _of_each_l3(topology: Topology, n: int) -> _Named:
    """Return `n` allowed cores of each L3 group that has any; all of those that have fewer."""
    groups: dict[int, list[Core]] = {}
    for core in topology.allowed_cores:
        if core.l3 is not None:
            groups.setdefault(core.l3, []).append(core)
    if not groups:
        raise UsageError("The L3 groups of this machine are not known.", "Use a list of CPUs such as 0-7.")
    max_threads = max(len(cores) for cores in groups.values())
    if not 1 <= n <= max_threads:
        raise UsageError(
            f"Cannot use {n}/l3: an L3 group has {plural(max_threads, 'core')} that this process may use.",
            f"Choose 1/l3 to {max_threads}/l3.",
        )
    notes = [
        f"L3 group {index} has only {plural(len(cores), 'core')} that this process may use."
        for index, cores in groups.items()
        if len(cores) < n
    ]
    cpus = tuple(cpu for cores in groups.values() for cpu in _firsts(topology, cores[:n]))
    what = f"{plural(len(cpus), 'core')}, {n} of each L3 group"
    why = "each group has its own memory link" if len(groups) > 1 else ""
    return _Named(tuple(sorted(cpus)), what, why, notes=tuple(notes))


def _too_many(topology: Topology, spec: str, n: int, max_threads: int, quota: int | None) -> UsageError:
    cpus, more = len(topology.allowed), ""
    if quota is not None and quota < max_threads:
        why, max_threads = f"the cgroup CPU quota is {topology.quota:g}", quota
    elif spec in ("auto", "all"):
        why = f"this process may use {plural(cpus, 'CPU')} ({plural(max_threads, 'physical core')})"
        if max_threads < n <= cpus:
            every = format_cpu_list(topology.allowed)
            more = f" The other CPUs are SMT siblings; --cores {every} uses them."
    else:
        why = f"the cores {spec} are {plural(max_threads, 'CPU')}"
    return UsageError(
        f"Cannot use {plural(n, 'thread')}: {why}.", f"Choose 1 to {max_threads}, or 0 for the default.{more}"
    )


def n_sharing_a_core(topology: Topology, cpus: Collection[int]) -> int:
    """Return how many of `cpus` share their core with another."""
    counts = Counter(core.index for cpu in cpus if (core := topology.core_of(cpu)) is not None)
    return sum(count for count in counts.values() if count > 1)


def _reason(topology: Topology, named: _Named, cpus: tuple[int, ...], *, asked: bool, capped: bool, roams: bool) -> str:
    used = len(cpus)
    if capped:
        moving = ", and threads move to idle ones" if roams else ""
        return f"{used} of {named.what}: the cgroup CPU quota is {topology.quota:g}{moving}."
    if roams:
        return f"{used} of {named.what}, whichever are idle."
    if asked and used > len(named.cpus):
        return f"{plural(used, 'core')}, {used - len(named.cpus)} of them efficient cores, which are slower."
    if asked and used < len(named.cpus):
        return f"{used} of {named.what}."
    why = f": {named.why}" if named.why else ""
    return f"The {named.what}{why}." if used > 1 else f"{named.what[:1].upper()}{named.what[1:]}{why}."


MAX_BUSY_CORES = 0.5
"""Cores on which other programs may run beside a measurement; a program that computes takes a whole one."""
_N_TIMES = 8  # user, nice, system, idle, iowait, irq, softirq, steal; what follows is part of them
_IDLE = (3, 4)


class BusyCores:
    """Follows how many cores are busy, by all programs together. `root` replaces `/` in tests."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._last: dict[int, tuple[float, float]] = {}  # (busy, idle) of each logical CPU since the system started
        self.ticks: dict[int, float] = {}  # of each between the last two calls

    def since_last(self, cpus: Collection[int]) -> float | None:
        """Return how many of `cpus` were busy since the last call; None at first, 0 where the system does not tell."""
        is_first = not self._last
        shares = self.shares()
        return None if is_first and self._last else sum(shares.get(cpu, 0.0) for cpu in {*cpus})

    def shares(self) -> dict[int, float]:
        """Return for which share of the time since the last call each logical CPU was busy; {} at first."""
        last, self._last = self._last, {}
        for line in read_text(self._root / "proc/stat").splitlines():
            name, *numbers = line.split()
            if name.startswith("cpu") and name[3:].isdecimal():
                times = [int(number) for number in numbers[:_N_TIMES]]
                idle = sum(times[n] for n in _IDLE if n < len(times))
                self._last[int(name[3:])] = sum(times) - idle, idle
        found: dict[int, float] = {}
        for cpu in last.keys() & self._last.keys():
            # Idle time may go back, by proc(5), and all of it after hibernation.
            busy, idle = (max(now - before, 0) for now, before in zip(self._last[cpu], last[cpu], strict=True))
            found[cpu], self.ticks[cpu] = busy / (busy + idle) if busy else 0.0, busy + idle
        return found
