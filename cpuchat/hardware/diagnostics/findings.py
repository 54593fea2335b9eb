"""What a check of the machine says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from cpuchat.hardware.diagnostics.facts import DiagnosticFacts
from cpuchat.hardware.tuning.knobs import KNOBS, limited

Level = Literal["problem", "warning", "advice", "ok"]
ORDER: Final[tuple[Level, ...]] = ("problem", "warning", "advice", "ok")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `evidence` holds what was read or measured, `fix` what to do ("" when it is ok).

    problem: inference does not work, or is many times too slow. warning: it is clearly slower than it could be.
    advice: it may be a little slower, or nobody knows. ok: looked at, and right.
    """

    level: Level
    title: str
    evidence: str
    fix: str = ""


def by_plan(facts: DiagnosticFacts, knob: str) -> str:
    """The fix for a setting that a tuning plan can change, where it can."""
    of_kernel = any(one.name == knob and one.of_kernel for one in KNOBS)
    if facts.container or limited(facts.topology) or (facts.topology.virtual and not of_kernel):
        return "It cannot be changed from in here: ask who runs the machine."
    return f"`cpuchat tune plan --knob {knob}` writes a script, `cpuchat tune measure` says whether it helps."
