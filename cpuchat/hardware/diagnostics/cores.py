"""Checks of the cores: which are in use, what else runs on them, their frequency settings."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

from cpuchat.hardware.diagnostics.facts import DiagnosticFacts
from cpuchat.hardware.diagnostics.findings import Finding, by_plan
from cpuchat.hardware.lists import format_cpu_list

_AUTO = "engine.cores auto, engine.threads 0"
_DYNAMIC = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose "powersave" governor scales with the load instead of holding the lowest frequency
(pm/intel_pstate.rst).
"""


def settings(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report settings that this machine cannot apply."""
    if facts.cores_error:
        words = f"engine.cores {facts.settings.cores}, engine.threads {facts.settings.threads}: {facts.cores_error}"
        yield Finding("problem", "The configured cores cannot be used", words, "Set both to auto and 0.")
    if facts.policy_error:
        words = f"engine.memory {facts.settings.memory}: {facts.policy_error}"
        yield Finding("problem", "The configured memory policy cannot be used", words, "Set it to auto.")
    if facts.policy_refused:
        evidence = f"{facts.policy}: {facts.policy_refused}"
        fix = "In a container, allow set_mempolicy: docker run --cap-add SYS_NICE."
        yield Finding("warning", "The memory policy is not in effect", evidence, fix)


def siblings(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report SMT siblings in use: two threads on one core share its execution units and its path to memory."""
    if facts.choice is None:
        return
    cores = Counter(core.index for cpu in facts.choice.cpus if (core := facts.topology.core_of(cpu)) is not None)
    shared = sum(n for n in cores.values() if n > 1)
    n = len(facts.choice.cpus)
    if shared:
        evidence = f"{shared} of {n} threads share a core with another (CPUs {format_cpu_list(facts.choice.cpus)})"
        yield Finding("warning", "SMT siblings are in use", evidence, f"Use one thread per core: {_AUTO}.")
    elif facts.topology.smt:
        yield Finding("ok", "one thread per core", f"{n} threads on {len(cores)} cores")


def quota(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report a cgroup CPU quota below the number of cores, which throttles all threads periodically."""
    granted, cores = facts.topology.quota, len(facts.topology.allowed_cores)
    if granted is None:
        return
    if facts.settings.threads > max(math.floor(granted), 1):
        evidence = f"{facts.settings.threads} threads configured, cgroup CPU quota: {granted:g}"
        yield Finding("problem", "The CPU quota is below the thread count", evidence, "Set engine.threads to 0.")
    elif granted < cores:
        evidence = f"cgroup CPU quota: {granted:g}, {cores} cores available"
        fix = "Raise cpu.max (docker run --cpus), or better assign whole cores (--cpuset-cpus)."
        yield Finding("warning", "The CPU quota leaves cores unused", evidence, fix)
    else:
        yield Finding("ok", "CPU quota", f"{granted:g} CPUs for {cores} cores")


def others(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report other load: a thread that waits for its core delays all others."""
    if facts.load is None:
        return
    cores = len(facts.topology.cores)  # the figure is of the whole machine, also in a container
    if not cores:
        return
    evidence = f"load average {facts.load:.1f} over the last minute, {cores} cores"
    if facts.load > cores:
        yield Finding("warning", "Other programs use the cores", evidence, "Find them with top; stop them or wait.")
    elif facts.load > cores / 2:
        fix = "Find them with top; measure when they have finished."
        yield Finding("advice", "Other programs use some of the cores", evidence, fix)
    else:
        yield Finding("ok", "other load", evidence)


def isolated(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report isolated CPUs, which are usually reserved for another program."""
    if facts.choice is None:
        return
    ours = sorted(set(facts.choice.cpus) & set(facts.topology.isolated))
    if ours and len(ours) < len(facts.choice.cpus):
        evidence = f"CPUs {format_cpu_list(ours)} of {format_cpu_list(facts.choice.cpus)} are isolated (isolcpus=)"
        rest = format_cpu_list(set(facts.choice.cpus) - set(ours))
        fix = f"If they are reserved for another program: engine.cores {rest}."
        yield Finding("advice", "Cores in use are isolated", evidence, fix)


def virtual(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report a virtual machine, whose caches and nodes may differ from the host's."""
    if facts.topology.virtual:
        evidence = f"{facts.topology.virtual}; reports {facts.topology.cores_words}, {facts.topology.nps_words}"
        fix = "Rely on `cpuchat probe`; on the host, pin virtual CPUs to dedicated cores."
        yield Finding("advice", "Virtual machine: the topology is unverified", evidence, fix)


def governor(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report frequency governors other than "performance", which raise the frequency slowly after each pause."""
    if not facts.governors:
        return
    n = sum(count for _, count in facts.governors)
    slow = [(name, count) for name, count in facts.governors if name != "performance"]
    if not slow:
        yield Finding("ok", "governor", f"performance on {n} CPUs")
        return
    words = ", ".join(f"{name} on {count}" for name, count in slow)
    evidence = f"{words} of {n} CPUs (driver {facts.driver or 'unknown'})"
    lowest = any(name == "powersave" for name, _ in slow) and facts.driver not in _DYNAMIC
    title = "The governor holds the cores at their lowest frequency" if lowest else "The governor saves power"
    yield Finding("warning" if lowest else "advice", title, evidence, by_plan(facts, "governor"))


def boost(facts: DiagnosticFacts) -> Iterator[Finding]:
    """Report disabled boost (frequencies above the base clock)."""
    if facts.boost is False:
        evidence = "cpufreq/boost is 0, or intel_pstate/no_turbo is 1"
        yield Finding("advice", "Boost is off", evidence, by_plan(facts, "boost"))
    elif facts.boost:
        yield Finding("ok", "boost", "on")


CHECKS: tuple[Callable[[DiagnosticFacts], Iterator[Finding]], ...] = (
    settings, siblings, quota, others, isolated, virtual, governor, boost,
)  # fmt: skip
