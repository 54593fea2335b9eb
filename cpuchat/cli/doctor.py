"""`cpuchat doctor`: what this machine is, and what is wrong with it for CPU inference, on one page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cpuchat.cli.options import laid_over

if TYPE_CHECKING:
    from cpuchat.hardware.diagnostics.checks import Finding
    from cpuchat.hardware.diagnostics.facts import DiagnosticFacts, WantedSetup
    from cpuchat.hardware.topology import Topology
    from cpuchat.settings import Settings

ROOT = Path("/")
"""Replaced in tests."""
WIDTH = 100

_EPILOG = """\b
Examples:
  cpuchat doctor
  cpuchat doctor --probe
  cpuchat doctor --json | jq '.findings[] | select(.level == "problem")'

Nothing is changed, and without --probe nothing is measured either.

Exit codes: 0 nothing worse than advice, 1 a warning or a problem was found, 2 wrong usage or settings, 14 --probe
could not measure."""


@click.command(epilog=_EPILOG, short_help="What this machine is, and what keeps inference from being fast on it.")
@click.option("--probe", is_flag=True, help="Measure the read bandwidth first; takes up to 15 seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(probe: bool, as_json: bool) -> int:
    """Say what this machine is and what keeps inference from being fast on it, with the evidence and what to do."""
    import asyncio
    import dataclasses

    from cpuchat.cli.engine_info import engine_info
    from cpuchat.cli.output import json_line
    from cpuchat.cli.terminal import columns
    from cpuchat.errors import CpuchatError
    from cpuchat.hardware.diagnostics.checks import examine
    from cpuchat.hardware.diagnostics.facts import gather_facts
    from cpuchat.hardware.topology import read_topology

    chosen = laid_over({})
    topology = read_topology(ROOT)
    engine, engine_error, engine_fix = None, "", ""
    try:
        engine = asyncio.run(engine_info())
    except CpuchatError as error:
        engine_error, engine_fix = error.message, error.hint
    wanted = _wanted(chosen)
    found = _measure(topology, wanted) if probe else {}
    facts = gather_facts(
        wanted, engine=engine, engine_error=engine_error, engine_fix=engine_fix, topology=topology, pid=os.getpid(),
        root=ROOT,
    )  # fmt: skip
    facts = dataclasses.replace(facts, **found)
    findings = examine(facts)
    if as_json:
        click.echo(json_line(_json(facts, findings)))
    else:
        for line in page(facts, findings, columns()):
            click.echo(line)
    return 1 if any(finding.level in ("problem", "warning") for finding in findings) else 0


def _wanted(chosen: Settings) -> WantedSetup:
    """What the settings say about the machine, and the model that was used last."""
    import contextlib

    from cpuchat.cli.options import model_path
    from cpuchat.errors import CpuchatError
    from cpuchat.hardware.diagnostics.facts import WantedSetup
    from cpuchat.models.gguf.header import split_parts

    name, size = "", 0
    if chosen.model.last:
        with contextlib.suppress(CpuchatError, OSError):
            path = model_path(None, chosen)
            name, size = path.name, sum(part.stat().st_size for part in split_parts(path) or [path])
    engine = chosen.engine
    return WantedSetup(cores=engine.cores, threads=engine.threads, memory=engine.memory, model=name, model_bytes=size)


def _measure(topology: Topology, wanted: WantedSetup) -> dict[str, Any]:
    """Measure what the page shows, for the cores and the policy of the settings; {} where they cannot be used here,
    which is a finding then. (Handed on in case that it cannot be kept.)"""
    from cpuchat.errors import CpuchatError
    from cpuchat.hardware.bandwidth.peaks import remember
    from cpuchat.hardware.bandwidth.survey import survey
    from cpuchat.hardware.numa.mempolicy import choose_policy
    from cpuchat.hardware.placement.cores import choose_cores

    try:
        cpus = choose_cores(topology, wanted.cores, wanted.threads).cpus
        memory = choose_policy(topology, wanted.memory, cpus)[0].words
    except CpuchatError:
        return {}
    click.echo("cpuchat: measuring the read bandwidth, up to 15 seconds", err=True)
    found = survey(topology, cpus=cpus, memory=memory, root=ROOT)
    return {"survey": found, "peak": remember(found.all_cores, memory, root=ROOT)}


def page(facts: DiagnosticFacts, findings: list[Finding], width: int = WIDTH) -> list[str]:
    """The page, in lines of at most `width` characters."""
    import textwrap

    from cpuchat.text import clean_line

    lines = textwrap.wrap(clean_line(facts.topology.name), width, subsequent_indent="  ")
    for name, text in _about(facts):
        lines += textwrap.wrap(
            f"{name:<10} {clean_line(text)}", width, subsequent_indent=" " * 11, break_on_hyphens=False
        )
    level = ""
    for finding in findings:
        if finding.level == "ok":
            continue
        lines += [""] if finding.level != level else []
        level = finding.level
        head = f"{level}: {clean_line(finding.title)} — {clean_line(finding.evidence)}"
        lines += textwrap.wrap(head, width, subsequent_indent="  ", break_on_hyphens=False)
        lines += textwrap.wrap(
            clean_line(finding.fix), width, initial_indent="  → ", subsequent_indent="    ", break_on_hyphens=False
        )
    fine = [finding.title for finding in findings if finding.level == "ok"]
    if fine:
        lines += ["", *textwrap.wrap(f"ok: {', '.join(fine)}", width, subsequent_indent="  ", break_on_hyphens=False)]
    return lines


def _about(facts: DiagnosticFacts) -> list[tuple[str, str]]:
    """The machine and how it is used: one line each."""
    rows = [
        ("cores", _cores(facts)),
        ("memory", _memory(facts)),
        ("bandwidth", _bandwidth(facts)),
        ("NUMA", _numa(facts)),
        ("counters", _counters(facts)),
        ("engine", _engine_words(facts)),
        ("settings", _settings_words(facts)),
    ]
    return rows


def _cores(facts: DiagnosticFacts) -> str:
    from cpuchat.hardware.lists import format_cpu_list

    if facts.choice is None:
        return f"n/a: {facts.cores_error}"
    cpus = facts.choice.cpus
    notes = " ".join(("", *facts.choice.notes))
    return f"{len(cpus)} in use, CPUs {format_cpu_list(cpus)}. {facts.choice.reason}{notes}"


def _memory(facts: DiagnosticFacts) -> str:
    total, limit = facts.topology.memory_total, facts.topology.memory_limit
    parts = [f"{total / 1e9:.1f} GB, {facts.available / 1e9:.1f} GB available"]
    if limit is not None:
        parts.append(f"limited to {limit / 1e9:.1f} GB by the control group")
    if facts.modules:
        speeds = sorted({module.speed_mt for module in facts.modules if module.speed_mt})
        parts.append(f"{len(facts.modules)} modules at {'/'.join(map(str, speeds)) or 'n/a'} MT/s")
    if facts.theoretical is not None:
        parts.append(f"{facts.theoretical.bytes_per_s / 1e9:.0f} GB/s at most: {facts.theoretical.source}")
    elif facts.topology.virtual:
        parts.append("modules n/a: a virtual machine does not tell them")
    else:
        parts.append("modules n/a: only root may read them, sudo dmidecode -t memory")
    return " · ".join(parts)


def _bandwidth(facts: DiagnosticFacts) -> str:
    if facts.peak is None:
        return "n/a: not measured yet; `cpuchat probe` does it in 15 seconds"
    words = f"{facts.peak.bytes_per_s / 1e9:.1f} GB/s read ({facts.peak.source})"
    if facts.theoretical is not None:
        words += f", {100 * facts.peak.bytes_per_s / facts.theoretical.bytes_per_s:.0f} % of the most"
    found = facts.survey
    if found is not None:
        words += f" · one core {found.one_core.bytes_per_s / 1e9:.1f}"
        if found.l3_group is not None and found.l3_group.cpus != found.all_cores.cpus:
            words += f" · one L3 group {found.l3_group.bytes_per_s / 1e9:.1f}"
        if found.knee is not None and found.knee < max(found.per_core_counts or {0: None}):
            words += f" · {found.knee} of each L3 group are enough"
    return words


def _numa(facts: DiagnosticFacts) -> str:
    policy = f"memory policy {facts.policy}: {facts.policy_reason}" if facts.policy else f"n/a: {facts.policy_error}"
    return f"{facts.topology.nps_words} · {policy}"


def _counters(facts: DiagnosticFacts) -> str:
    from cpuchat.hardware.counters.ladder import advice

    traffic = facts.counter or f"n/a: {advice(facts.counter_refusals, facts.topology)}"
    power = facts.power or f"n/a: {advice(facts.power_refusals, facts.topology)}"
    return f"memory traffic: {traffic} · power: {power}"


def _engine_words(facts: DiagnosticFacts) -> str:
    if facts.engine is None:
        return f"n/a: {facts.engine_error or 'not asked'}"
    version = f"llama.cpp {facts.engine.llama_commit or facts.engine.version}"
    return f"{version} with {', '.join(facts.engine.features) or 'no optional CPU features'}"


def _settings_words(facts: DiagnosticFacts) -> str:
    wanted = facts.settings
    parts = [f"cores {wanted.cores}", f"threads {wanted.threads or 'auto'}", f"memory {wanted.memory}"]
    if facts.governors:
        parts.append(f"governor {'/'.join(name for name, _ in facts.governors)}")
    if facts.boost is not None:
        parts.append(f"boost {'on' if facts.boost else 'off'}")
    if facts.thp:
        parts.append(f"huge pages {facts.thp}")
    if facts.settings.model:
        parts.append(f"model {wanted.model}, {wanted.model_bytes / 1e9:.1f} GB")
    return " · ".join(parts)


def _json(facts: DiagnosticFacts, findings: list[Finding]) -> dict[str, Any]:
    """`about` is the page's upper half; the rest are figures in bytes and bytes per second."""
    import dataclasses

    machine = facts.topology
    return {
        "machine": machine.name,
        "about": dict(_about(facts)),
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
