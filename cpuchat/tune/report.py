"""Formats a placement trial: its progress and its result."""

from __future__ import annotations

from cpuchat.telemetry import units
from cpuchat.tune.trial import Outcome, Step

_STAGES = {
    "before": "measuring the current placement",
    "loading": "reloading the model",
    "after": "measuring the new placement",
    "back": "restoring the previous placement",
}


def step(step: Step) -> str:
    """Format the progress of a trial."""
    if step.stage in ("before", "after"):
        return f"{_STAGES[step.stage]} · run {step.number} of {step.of} · Esc cancels"
    share = "" if step.done is None else f" {100 * step.done:3.0f} %"
    return f"{_STAGES[step.stage]}{share} · Esc cancels"


def outcome(outcome: Outcome) -> str:
    """Format the result of a trial, in a line or two."""
    lines: list[str] = []
    if outcome.before and outcome.after and outcome.factor is not None:
        spread = max(outcome.before.spread, outcome.after.spread)
        lines.append(
            f"{units.rate(outcome.before.tok_s)} → {units.rate(outcome.after.tok_s)} tok/s  "
            f"{units.factor(outcome.factor)}  (spread {spread:.1f} tok/s)"
        )
    if outcome.problem:
        lines.append(outcome.problem)
    if outcome.lost:
        kept = "The new placement is saved; u reverts it" if outcome.applied else "Settings unchanged"
        lines.append(f"{kept}. No model is loaded now.")
    elif outcome.applied:
        lines.append("Significantly faster, applied; u reverts it." if outcome.comparison else "Applied; u reverts it.")
    elif (found := outcome.comparison) is not None and not outcome.problem:
        slower = found.gain < -found.needed
        why = "Slower" if slower else f"No significant gain (threshold {100 * found.needed:.0f} %)"
        lines.append(f"{why}: previous placement restored. u applies the new one anyway.")
    elif outcome.stopped:
        lines.append("Cancelled; nothing was changed.")
    elif outcome.problem:
        lines.append("Nothing was changed.")
    return "\n".join(lines)
