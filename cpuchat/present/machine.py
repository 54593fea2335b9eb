"""How the hardware screen words what is known. Plain functions over plain values, no widgets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuchat.hardware.machine_reader import MachineFacts
from cpuchat.protocol import EngineInfo, ModelInfo
from cpuchat.telemetry import units
from cpuchat.telemetry.machine import MachineSample

if TYPE_CHECKING:
    from cpuchat.hardware.numa.residency import Residency

Row = tuple[str, str]
"""(label, text)"""

MEASURE_HINT = "no survey yet · m measures cores and L3 groups in under 15 s"


@dataclass(frozen=True)
class Now:
    """What changes while the screen is open. None and "" are "not known"."""

    model: ModelInfo | None = None
    engine: EngineInfo | None = None
    placement: Residency | None = None
    placed: bool = False
    """It was looked for: `placement` None is "not told"."""
    sample: MachineSample | None = None
    counting: bool = True
    """Whether the settings want counters."""


def gigabytes(bytes_per_s: float) -> str:
    """GB/s without the unit: `25.3`, `367`."""
    return units.rate(bytes_per_s / 1e9) if bytes_per_s < 99.95e9 else f"{bytes_per_s / 1e9:,.0f}"


def title(facts: MachineFacts) -> str:
    """`EPYC 9354P · 1 socket · NPS1 · 12 × 4800 MT/s`."""
    topology, memory = facts.topology, facts.theoretical
    parts = [topology.cpu_name, topology.sockets_words]
    if len(topology.cpu_nodes) > 1 or topology.nps_words.startswith("NPS"):
        parts.append(topology.nps_words)
    if memory is not None and memory.channels and memory.speed_mt:
        parts.append(f"{'≈ ' if memory.assumed else ''}{memory.channels} × {memory.speed_mt} MT/s")
    if topology.virtual:
        parts.append("virtual machine")
    return " · ".join(parts)


def cores(facts: MachineFacts, now: Now) -> Row:
    """How many compute, and what of the second threads."""
    topology, model = facts.topology, now.model
    total, allowed = len(topology.cores), len(topology.allowed_cores)
    target, draft = (set(model.cpus), set(model.draft_cpus) - set(model.cpus)) if model else (set[int](), set[int]())
    noun = f"core{'s' * (total != 1)}"
    words = [f"{total} {noun}"]
    if target:
        counts = [sum(not cpus.isdisjoint(core.cpus) for core in topology.cores) for cpus in (target, draft)]
        split = f"{counts[0]} + {counts[1]} for drafts," if draft else f"{counts[0]}"
        words = [f"{split} of {total} {noun} compute"]
    if allowed < total:
        words.append(f"{allowed} are for this process")
    if topology.quota is not None:
        words.append(f"the time of {topology.quota:g} CPUs is granted")
    if len(topology.l3_groups) > 1:
        sizes = {group.size for group in topology.l3_groups}
        size = f" of {sizes.pop() >> 20} MB" if len(sizes) == 1 and 0 not in sizes else ""
        words.append(f"{len(topology.l3_groups)} L3 groups{size}")
    if topology.smt:
        twice = sum(len((target | draft).intersection(core.cpus)) > 1 for core in topology.cores)
        words.append(f"both SMT threads of {twice} cores in use" if twice else "SMT unused" if target else "SMT")
    return "cores", " · ".join(words)


def measured(facts: MachineFacts) -> list[tuple[str, float]]:
    """What was measured, as (cores, bytes per second): one core, one L3 group, ..., all."""
    survey = facts.survey
    if survey is None:
        return []
    n = len(survey.all_cores.cpus)
    found = [("1 core", survey.one_core.bytes_per_s)]
    if survey.l3_group is not None and len(survey.l3_group.cpus) < n:
        found.append(("one L3 group", survey.l3_group.bytes_per_s))
    if survey.fabric_link is not None and len(survey.fabric_link.cpus) < n:
        found.append(("one link", survey.fabric_link.bytes_per_s))
    if n > 1:
        found.append(("both cores" if n == 2 else f"all {n} cores", survey.all_cores.bytes_per_s))
    return found


def reading(facts: MachineFacts) -> str:
    """The read bandwidth in one line."""
    found = measured(facts)
    if not found:
        return MEASURE_HINT
    return ", ".join(f"{name} {gigabytes(value)}" for name, value in found) + " GB/s (measured)"


def of_theoretical(facts: MachineFacts) -> float | None:
    """The measured share of what the memory could deliver (0-1)."""
    if facts.survey is None or facts.theoretical is None:
        return None
    return facts.survey.all_cores.bytes_per_s / facts.theoretical.bytes_per_s


def knee(facts: MachineFacts) -> str:
    """How many cores of each L3 group are enough; "" where that was not measured, or all are needed."""
    survey = facts.survey
    if survey is None or survey.knee is None or not survey.per_core_counts:
        return ""
    if survey.knee >= max(survey.per_core_counts):
        return ""
    return f"{survey.knee} core{'s' * (survey.knee != 1)} of each L3 group read as much as all of them"


def nodes(facts: MachineFacts) -> list[Row]:
    """What is read across nodes, one row for each node of cores; none on one node."""
    matrix = facts.survey.matrix if facts.survey is not None else {}
    rows: list[Row] = []
    for start in sorted({a for a, _ in matrix}):
        found = [f"N{b} {gigabytes(matrix[a, b].bytes_per_s)}" for a, b in sorted(matrix) if a == start]
        rows.append(("" if rows else "nodes", f"cores of N{start} read {' · '.join(found)} GB/s"))
    return rows


def theoretical(facts: MachineFacts) -> Row:
    """What the memory could deliver, and how that is known."""
    memory = facts.theoretical
    if memory is None:
        why = "a virtual machine does not tell" if facts.topology.virtual else "this machine does not tell"
        return "at most", f"n/a · {why} its memory modules"
    words = f"{gigabytes(memory.bytes_per_s)} GB/s · {memory.source}"
    return "at most", f"{words} ({memory.note})" if memory.note else words


def weights(now: Now) -> Row:
    """On which nodes the model lies."""
    if now.model is None:
        return "weights", "no model loaded"
    if not now.placed and now.engine is not None:
        return "weights", "looking …"
    words = now.placement.words() if now.placement is not None else ""
    if not words:
        return "weights", "n/a · the kernel does not tell where the worker's memory is"
    huge = now.placement.huge if now.placement is not None else 0
    return "weights", words.removeprefix("weights: ") + (f" · {huge / 1e9:.1f} GB in huge pages" if huge else "")


def policy(facts: MachineFacts, now: Now) -> Row:
    """The memory policy in effect, what was refused of it, and the kernel's setting for huge pages."""
    huge = f" · huge pages {facts.huge_pages}" if facts.huge_pages else ""
    if now.engine is None:
        return "policy", f"no worker runs{huge}"
    words = now.engine.memory or "local"
    if now.engine.memory_refused:
        words += f" · not as wanted: {now.engine.memory_refused}"
    return "policy", words + huge


def traffic(now: Now) -> Row:
    """What a counter reads now."""
    if not now.counting:
        return "traffic", "≈ model only · counters are off in the settings (F2)"
    if now.sample is None:
        return "traffic", "looking for counters …"
    found = now.sample.bandwidth
    if found is None:
        return "traffic", f"≈ model only · {now.sample.no_bandwidth or 'no counter opens'}"
    scope = {"machine": "whole machine", "socket": "the sockets in use", "process": "the worker alone"}[found.scope]
    return "traffic", f"{gigabytes(found.total):>5} GB/s now · {found.source}, {scope}"


def power(now: Now) -> Row:
    """What the packages take."""
    if not now.counting:
        return "power", "n/a · counters are off in the settings (F2)"
    if now.sample is None:
        return "power", "looking …"
    found = now.sample.power
    if found is None:
        return "power", f"n/a · {now.sample.no_power or 'no source opens'}"
    return "power", f"{found.watts:5.1f} W · {found.source}, packages without memory"
