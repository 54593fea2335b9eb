"""Runs all checks over the facts that `facts.gather_facts` collects. Pure."""

from __future__ import annotations

from cpuchat.hardware.diagnostics import cores as checks_cores
from cpuchat.hardware.diagnostics import engine as checks_engine
from cpuchat.hardware.diagnostics import memory as checks_memory
from cpuchat.hardware.diagnostics.facts import DiagnosticFacts
from cpuchat.hardware.diagnostics.findings import ORDER, Finding

_CHECKS = (*checks_engine.CHECKS, *checks_cores.CHECKS, *checks_memory.CHECKS)


def examine(facts: DiagnosticFacts) -> list[Finding]:
    """Return all findings, the worst first. What is unknown on a machine has none."""
    found = [finding for check in _CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: ORDER.index(finding.level))
