"""A trial in words: how far it is, and what it brought."""

from __future__ import annotations

from cpuchat.telemetry import units
from cpuchat.tune.trial import Outcome, Step

_STAGES = {
    "before": "measuring as it is now",
    "loading": "loading the model again",
    "after": "measuring the new layout",
    "back": "going back: loading the model as it was",
}


def step(step: Step) -> str:
    """Where a trial is."""
    if step.stage in ("before", "after"):
        return f"{_STAGES[step.stage]} · answer {step.number} of {step.of} · Esc stops"
    share = "" if step.done is None else f" {100 * step.done:3.0f} %"
    return f"{_STAGES[step.stage]}{share} · Esc stops"


def outcome(outcome: Outcome) -> str:
    """What a trial brought, in a line or two."""
    lines: list[str] = []
    if outcome.before and outcome.after and outcome.factor is not None:
        spread = max(outcome.before.spread, outcome.after.spread)
        lines.append(
            f"before {units.rate(outcome.before.tok_s)} → after {units.rate(outcome.after.tok_s)} tok/s  "
            f"{units.factor(outcome.factor)}  (rounds differ by {spread:.1f})"
        )
    if outcome.problem:
        lines.append(outcome.problem)
    if outcome.lost:
        kept = "The new layout is saved; u goes back" if outcome.applied else "The settings are as they were before"
        lines.append(f"{kept}. No model is loaded now.")
    elif outcome.applied:
        lines.append("Significantly faster. u goes back." if outcome.verdict else "In use now; u goes back.")
    elif (found := outcome.verdict) is not None and not outcome.problem:
        slower = found.gain < -found.needed
        why = "Slower" if slower else f"No significant gain (counts above {100 * found.needed:.0f} %)"
        lines.append(f"{why}: back to the previous layout. u uses the new one all the same.")
    elif outcome.stopped:
        lines.append("Stopped; everything is as it was before.")
    elif outcome.problem:
        lines.append("Everything is as it was before.")
    return "\n".join(lines)
