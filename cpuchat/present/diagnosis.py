"""Formats the page of `cpuchat doctor`: the machine, how it is used, and what slows inference down."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import TYPE_CHECKING, Any

from cpuchat.present.machine import Row, knee, measured_sets, theoretical_peak
from cpuchat.telemetry.units import gigabytes
from cpuchat.text import clean_line

if TYPE_CHECKING:
    from cpuchat.hardware.diagnostics.facts import DiagnosticFacts
    from cpuchat.hardware.diagnostics.findings import Finding

WIDTH = 100
_LABEL = 10


def page(facts: DiagnosticFacts, findings: list[Finding], width: int = WIDTH) -> list[str]:
    """Format the page in lines of at most `width` characters; the worst finding comes first."""

    def wrap(text: str, first: str = "", rest: str = "  ") -> list[str]:
        return textwrap.wrap(
            clean_line(text), width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
        )

    lines = wrap(facts.topology.name)
    for label, text in about(facts):
        lines += wrap(text, f"{label:<{_LABEL}} ", " " * (_LABEL + 1))
    level = ""
    for finding in findings:
        if finding.level == "ok":
            continue
        lines += [""] if finding.level != level else []
        level = finding.level
        lines += wrap(f"{level}: {finding.title} — {finding.evidence}")
        lines += wrap(finding.fix, "  → ", "    ")
    if passed := [finding.title for finding in findings if finding.level == "ok"]:
        lines += ["", *wrap(f"ok: {', '.join(passed)}")]
    return lines


def about(facts: DiagnosticFacts) -> list[Row]:
    """Return the machine and how it is used, one row each."""
    return [
        ("cores", _cores(facts)),
        ("memory", _memory(facts)),
        ("bandwidth", _bandwidth(facts)),
        ("NUMA", _numa(facts)),
        ("counters", _counters(facts)),
        ("engine", _engine(facts)),
        ("settings", _settings(facts)),
    ]


def page_json(facts: DiagnosticFacts, findings: list[Finding]) -> dict[str, Any]:
    """Return the page as JSON: `about` is its upper half; the rest are figures in bytes and bytes per second."""
    machine = facts.topology
    return {
        "machine": machine.name,
        "about": dict(about(facts)),
        "virtual": machine.virtual,
        "container": facts.container,
        "cpus": list(facts.choice.cpus) if facts.choice is not None else None,
        "quota": machine.quota,
        "memory_total": machine.memory_total,
        "memory_limit": machine.memory_limit,
        "memory_available": facts.available,
        "peak_read": facts.peak.bytes_per_s if facts.peak is not None else None,
        "theoretical": facts.theoretical.bytes_per_s if facts.theoretical is not None else None,
        "memory_policy": facts.policy or None,
        "counter": facts.counter or None,
        "power": facts.power or None,
        "engine": {"commit": facts.engine.llama_commit, "features": facts.engine.features} if facts.engine else None,
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def _cores(facts: DiagnosticFacts) -> str:
    from cpuchat.hardware.lists import format_cpu_list

    if facts.choice is None:
        return f"n/a: {facts.cores_error}"
    cpus = facts.choice.cpus
    notes = " ".join(("", *facts.choice.notes))
    return f"{len(cpus)} in use, CPUs {format_cpu_list(cpus)}. {facts.choice.reason}{notes}"


def _memory(facts: DiagnosticFacts) -> str:
    limit = facts.topology.memory_limit
    parts = [f"{gigabytes(facts.topology.memory_total)} GB, {gigabytes(facts.available)} GB available"]
    if limit is not None:
        parts.append(f"cgroup memory limit: {gigabytes(limit)} GB")
    if facts.modules:
        speeds = sorted({module.speed_mt for module in facts.modules if module.speed_mt})
        parts.append(f"{len(facts.modules)} modules at {'/'.join(map(str, speeds)) or 'n/a'} MT/s")
    parts.append(f"theoretical peak: {theoretical_peak(facts.topology, facts.theoretical)}")
    return " · ".join(parts)


def _bandwidth(facts: DiagnosticFacts) -> str:
    if facts.peak is None:
        return "n/a: not measured yet; `cpuchat probe` measures it in under 15 seconds"
    words = [f"{gigabytes(facts.peak.bytes_per_s)} GB/s read ({facts.peak.source})"]
    if facts.theoretical is not None:
        words[0] += f", {100 * facts.peak.bytes_per_s / facts.theoretical.bytes_per_s:.0f} % of the theoretical peak"
    if facts.survey is not None:
        words += [f"{name} {gigabytes(one.bytes_per_s)}" for name, one in measured_sets(facts.survey)[:-1]]
        words += filter(None, [knee(facts.survey)])
    return " · ".join(words)


def _numa(facts: DiagnosticFacts) -> str:
    policy = f"memory policy {facts.policy}: {facts.policy_reason}" if facts.policy else f"n/a: {facts.policy_error}"
    return f"{facts.topology.nps_words} · {policy}"


def _counters(facts: DiagnosticFacts) -> str:
    from cpuchat.hardware.counters.ladder import advice

    traffic = facts.counter or f"n/a: {advice(facts.counter_refusals, facts.topology)}"
    power = facts.power or f"n/a: {advice(facts.power_refusals, facts.topology)}"
    return f"memory traffic: {traffic} · power: {power}"


def _engine(facts: DiagnosticFacts) -> str:
    if facts.engine is None:
        return f"n/a: {facts.engine_error or 'not started'}"
    version = f"llama.cpp {facts.engine.llama_commit or facts.engine.version}"
    return f"{version} with {', '.join(facts.engine.features) or 'no optional CPU features'}"


def _settings(facts: DiagnosticFacts) -> str:
    wanted = facts.settings
    parts = [f"cores {wanted.cores}", f"threads {wanted.threads or 'auto'}", f"memory {wanted.memory}"]
    if facts.governors:
        parts.append(f"governor {'/'.join(name for name, _ in facts.governors)}")
    if facts.boost is not None:
        parts.append(f"boost {'on' if facts.boost else 'off'}")
    if facts.thp:
        parts.append(f"huge pages {facts.thp}")
    if wanted.model:
        parts.append(f"model {wanted.model}, {gigabytes(wanted.model_bytes)} GB")
    return " · ".join(parts)
