"""Formats the machine, its measurements and its current state as labelled rows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.model_info import EngineInfo, ModelInfo
from cpuchat.present.reuse import kept_states
from cpuchat.telemetry.machine import MachineSample
from cpuchat.telemetry.units import ago, gigabytes, plural

if TYPE_CHECKING:
    from cpuchat.costmodel.observations import Fitted
    from cpuchat.hardware.bandwidth.measuring import ReadBandwidth
    from cpuchat.hardware.bandwidth.memory_modules import Theoretical
    from cpuchat.hardware.bandwidth.survey import Survey
    from cpuchat.hardware.machine_reader import MachineFacts
    from cpuchat.hardware.numa.residency import Residency
    from cpuchat.hardware.topology import Topology
    from cpuchat.models.costs import Known
    from cpuchat.settings import Settings
    from cpuchat.telemetry.machine import Peak

Row = tuple[str, str]
"""(label, text)"""

READ_BANDWIDTH = "read bandwidth"
_NOT_MEASURED = "not measured · press m (takes under 40 s)"
_PASSES_NOT_MEASURED = "not measured: speeds are rough · m measures (under 40 s)"
_COUNTERS_OFF = "counters are off in the settings (F2)"
_SCOPES = {"machine": "whole machine", "socket": "sockets in use", "process": "worker process only"}


@dataclass(frozen=True)
class Now:
    """The state that changes while the hardware screen is open. None and "" are "unknown".

    `placed`: the worker's memory was looked up, so that `placement` None means "not reported". `counting`: counters
    are on in the settings. `passes` as of `passes_measured`, "" while that is being read.
    """

    model: ModelInfo | None = None
    engine: EngineInfo | None = None
    placement: Residency | None = None
    placed: bool = False
    sample: MachineSample | None = None
    counting: bool = True
    passes: str = ""


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


def rows(facts: MachineFacts, now: Now) -> list[Row]:
    """Return all rows of the hardware screen about the machine and the worker on it."""
    survey = facts.survey
    found = [
        ("cores", _cores(facts.topology, now.model)),
        (READ_BANDWIDTH, _read_bandwidth(survey, facts.peak)),
        *([("passes", now.passes)] if now.passes else []),
        ("theoretical peak", theoretical_peak(facts.topology, facts.theoretical)),
        *_nodes(survey),
        ("weights", _weights(now)),
        *([("saved KV", kept)] if (kept := kept_states(now.model)) else []),
        ("memory policy", _policy(facts, now)),
        ("memory traffic", _traffic(now)),
        ("power", _power(now)),
    ]
    return found + [("" if number else "note", note) for number, note in enumerate(facts.topology.notes)]


def _cores(topology: Topology, model: ModelInfo | None) -> str:
    """Describe which part of the cores, of their L3 groups and SMT siblings is used."""
    total, allowed = len(topology.cores), len(topology.allowed_cores)
    target, draft = (set(model.cpus), set(model.draft_cpus) - set(model.cpus)) if model else (set[int](), set[int]())
    words = [plural(total, "core")]
    if target:
        counts = [sum(not cpus.isdisjoint(core.cpus) for core in topology.cores) for cpus in (target, draft)]
        used = f"{counts[0]} + {counts[1]} for the draft model" if draft else f"{counts[0]}"
        words = [f"{used} of {plural(total, 'core')} in use"]
    if allowed < total:
        words.append(f"{allowed} allowed for this process")
    if topology.quota is not None:
        words.append(f"cgroup CPU quota: {topology.quota:g}")
    if len(topology.l3_groups) > 1:
        sizes = {group.size for group in topology.l3_groups}
        size = f" × {sizes.pop() >> 20} MB" if len(sizes) == 1 and 0 not in sizes else ""
        words.append(f"{len(topology.l3_groups)} L3 groups{size}")
    if topology.smt:
        twice = sum(len((target | draft).intersection(core.cpus)) > 1 for core in topology.cores)
        smt = "SMT unused" if target else "SMT"
        words.append(f"both SMT siblings of {plural(twice, 'core')} in use" if twice else smt)
    return " · ".join(words)


def measured_sets(survey: Survey, *, per_count: bool = False) -> list[tuple[str, ReadBandwidth]]:
    """Return each measured set of cores once, all cores last; with `per_count` also n cores of each L3 group."""
    counts = sorted((survey.per_core_counts or {}).items()) if per_count else []
    named = [
        ("1 core", survey.one_core),
        ("1 L3 group", survey.l3_group),
        ("1 fabric link", survey.fabric_link),
        *((f"{count} per L3 group", one) for count, one in counts),
    ]
    everything = survey.all_cores
    found: dict[tuple[int, ...], tuple[str, ReadBandwidth]] = {}
    for name, one in named:
        if one is not None and one.cpus != everything.cpus:
            found.setdefault(one.cpus, (name, one))
    n = len(everything.cpus)
    return [*found.values(), ("1 core" if n == 1 else f"all {n} cores", everything)]


def _read_bandwidth(survey: Survey | None, peak: Peak | None) -> str:
    if survey is not None:
        sets = ", ".join(f"{name} {gigabytes(one.bytes_per_s)}" for name, one in measured_sets(survey))
        return f"{sets} GB/s ({how_measured(survey)})"
    if peak is not None:
        return f"{gigabytes(peak.bytes_per_s)} GB/s · {peak.source} · m measures in detail"
    return _NOT_MEASURED


def how_measured(survey: Survey) -> str:
    """`measured`, and whether other programs took part of the cores meanwhile."""
    if any(one.disturbed for _, one in measured_sets(survey, per_count=True)):
        return "measured while other programs ran · m repeats it"
    return "measured"


def share_of_peak(survey: Survey | None, theoretical: Theoretical | None) -> float | None:
    """Return the measured share of the theoretical peak (0-1)."""
    if survey is None or theoretical is None:
        return None
    return survey.all_cores.bytes_per_s / theoretical.bytes_per_s


def knee(survey: Survey | None) -> str:
    """Return how many cores of each L3 group are enough; "" if that was not measured, or all are needed."""
    if survey is None or survey.knee is None or not survey.per_core_counts:
        return ""
    most = max(survey.per_core_counts)
    return f"{survey.knee} of {most} cores per L3 group reach 97 % of the read bandwidth" if survey.knee < most else ""


def costs_measured(fitted: Fitted | None, n_cores: int) -> str:
    """Return how well the cost model fits the passes of a probe of so many cores; None: there was none."""
    if fitted is None:
        return "Passes not measured: other programs are running. Repeat on an idle machine."
    words = f"Cost model of {plural(n_cores, 'core')} fitted to {fitted.n} passes of synthetic layers"
    return f"{words}, {_errors(fitted)}"


def passes_measured(settings: Settings, root: Path = Path("/")) -> str:
    """Return when passes were measured on the cores of the settings, or that they were not. Reads files."""
    from cpuchat.models.machine import cost_log

    log = cost_log(settings, root)
    if log is None:
        return _PASSES_NOT_MEASURED
    if (known := log.read()).probe:
        return _probed(known)
    if (near := log.nearest_probe()) is not None:
        return f"{_probed(near.read())}, scaled to {plural(len(log.cpus), 'core')} · m measures these"
    if (earlier := log.earlier_probe()) is not None:
        return f"{_probed(earlier.read())}, with an earlier engine · m measures again"
    return _PASSES_NOT_MEASURED


def _errors(fitted: Fitted) -> str:
    """`error 0.5 % (median), 4 % (90th percentile)`."""
    median, most = (
        f"{100 * one:.1g} %" if one < 0.01 else f"{100 * one:.0f} %" for one in (fitted.error, fitted.error_90)
    )
    return f"error {median} (median), {most} (90th percentile)"


def _probed(known: Known) -> str:
    """`2026-11-23 (today) · 8 cores · 86 passes, error 0.5 % (median), 4 % (90th percentile)`."""
    date = time.strftime("%Y-%m-%d", time.localtime(known.taken)) + f" ({ago(known.taken, time.time())})"
    error = f", {_errors(known.fitted)}" if known.fitted is not None else ""
    told = (date, plural(len(known.cpus), "core")) if known.taken else ()
    return " · ".join((*told, f"{len(known.probe)} passes{error}"))


def theoretical_peak(topology: Topology, theoretical: Theoretical | None) -> str:
    """Format the theoretical peak bandwidth and its source, or why it is unknown."""
    if theoretical is not None:
        words = f"{gigabytes(theoretical.bytes_per_s)} GB/s · {theoretical.source}"
        return f"{words} ({theoretical.note})" if theoretical.note else words
    if topology.virtual:
        return "n/a: memory modules are not visible in a virtual machine"
    return "n/a: only root can read the memory modules (sudo dmidecode -t memory)"


def _nodes(survey: Survey | None) -> list[Row]:
    """Return the bandwidths across NUMA nodes, one row for each node of cores; none on one node."""
    matrix = survey.matrix if survey is not None else {}
    found: list[Row] = []
    for start in sorted({a for a, _ in matrix}):
        rates = [f"node {b} {gigabytes(matrix[a, b].bytes_per_s)}" for a, b in sorted(matrix) if a == start]
        found.append(("" if found else "NUMA", f"cores of node {start} read {' · '.join(rates)} GB/s"))
    return found


def _weights(now: Now) -> str:
    """Format on which nodes the model's weights are."""
    if now.model is None:
        return "no model loaded"
    if not now.placed and now.engine is not None:
        return "checking…"
    words = now.placement.words() if now.placement is not None else ""
    if not words:
        return "n/a: the kernel does not report the worker's pages (numa_maps)"
    huge = now.placement.huge if now.placement is not None else 0
    return words.removeprefix("weights: ") + (f" · {huge / 1e9:.1f} GB in huge pages" if huge else "")


def _policy(facts: MachineFacts, now: Now) -> str:
    """Format the memory policy in effect, what was rejected of it, and the kernel's setting for huge pages."""
    huge = f" · huge pages {facts.huge_pages}" if facts.huge_pages else ""
    if now.engine is None:
        return f"no worker running{huge}"
    words = now.engine.memory or "local"
    if now.engine.memory_refused:
        words += f" · requested policy rejected: {now.engine.memory_refused}"
    return words + huge


def _traffic(now: Now) -> str:
    """Format the current reading of the memory traffic counter."""
    if not now.counting:
        return f"estimated · {_COUNTERS_OFF}"
    if now.sample is None:
        return "opening counters…"
    found = now.sample.bandwidth
    if found is None:
        return f"estimated · {now.sample.no_bandwidth or 'no counter available'}"
    return f"{gigabytes(found.total):>5} GB/s now · {found.source}, {_SCOPES[found.scope]}"


def _power(now: Now) -> str:
    """Format the power of the CPU packages."""
    if not now.counting:
        return f"n/a: {_COUNTERS_OFF}"
    if now.sample is None:
        return "opening counters…"
    found = now.sample.power
    if found is None:
        return f"n/a: {now.sample.no_power or 'no sensor available'}"
    return f"{found.watts:5.1f} W · {found.source}, CPU packages without DRAM"
