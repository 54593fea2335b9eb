"""Findings of the diagnostics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from cpuchat.hardware.diagnostics.facts import DiagnosticFacts
from cpuchat.hardware.tuning.knobs import KNOBS, limited

Level = Literal["problem", "warning", "advice", "ok"]
ORDER: Final[tuple[Level, ...]] = ("problem", "warning", "advice", "ok")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `evidence` is what was read or measured, `fix` what to do ("" when it is ok).

    problem: inference does not work or is many times too slow. warning: clearly slower than possible. advice: maybe
    slightly slower, or unknown. ok: checked, nothing to do.
    """

    level: Level
    title: str
    evidence: str
    fix: str = ""


def by_plan(facts: DiagnosticFacts, knob: str) -> str:
    """Return the fix for a setting that a tuning plan can change, where it can."""
    of_kernel = any(one.name == knob and one.of_kernel for one in KNOBS)
    if facts.container or limited(facts.topology) or (facts.topology.virtual and not of_kernel):
        return "Not changeable from here: ask the administrator of the machine."
    return f"`cpuchat system plan --knob {knob}` writes a script; `cpuchat system measure` shows whether it helps."
