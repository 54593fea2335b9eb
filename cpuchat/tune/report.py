"""Formats a placement trial and the tuning of a model: their progress and their results."""

from __future__ import annotations

from cpuchat.telemetry import units
from cpuchat.tune.compare import percent
from cpuchat.tune.result import ChoiceResult, TuneResult
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


TUNING_HEADINGS = ("CHOICE", "BEFORE → AFTER", "DECODE", "PREFILL", "RESULT")
TUNING_RIGHT = (2, 3)


def tuning_row(one: ChoiceResult) -> tuple[str, ...]:
    """Format a choice of tuning: what was compared, its gains, and what became of it."""
    compared = f"{one.before} → {one.after}" if one.after else one.before
    gains = [percent(gain) if gain is not None else "" for gain in (one.decode, one.prefill)]
    return (one.name, compared, *gains, _decision(one))


def _decision(one: ChoiceResult) -> str:
    if one.adopted:
        return "adopted"
    if one.offered:
        return "offered: changes the output"
    match one.verdict:
        case "mixed":
            slower = "decode" if (one.decode or 0.0) < (one.prefill or 0.0) else "prefill"
            return f"not adopted: slower {slower}"
        case "busy":
            return f"undecided: {one.reason}"
        case "failed":
            return f"failed: {one.reason}"
        case None:
            return f"not tried: {one.reason}"
        case verdict:
            return verdict


def tuning_summary(result: TuneResult, *, undo: str) -> list[str]:
    """Say in a sentence or two what tuning brought; `undo` says how to revert it."""
    lines: list[str] = []
    if result.adopted and result.decode is not None and result.prefill is not None:
        figures = [
            f"{name} {units.rate(before)} → {units.rate(after)} tok/s"
            for name, (before, after) in (("decode", result.decode), ("prefill", result.prefill))
            if abs(after / before - 1) > 0.0005
        ]
        figures += [f"drafted text {percent(one.decode or 0.0)}" for one in result.adopted if one.name == "drafters"]
        what = ", ".join(figures) or "adopted"
        lines.append(f"{result.model}: {what}. Used from the next load; {undo}.")
    elif result.busy:
        lines.append("Nothing was adopted: other programs use the CPUs. Tune again when the machine is idle.")
    elif not result.stopped:
        lines.append(f"{result.model}: nothing is faster than the settings in use; nothing was changed.")
    for one in result.choices:
        if one.offered:
            lines.append(
                f"{one.after} for the {one.name} is faster (decode {percent(one.decode or 0.0)}), but changes the "
                "output. Adopt it with `cpuchat tune MODEL --quantized-kv`, or set the KV type in the settings."
            )
    if result.busy and result.adopted:
        names = ", ".join(one.name for one in result.choices if one.verdict == "busy")
        lines.append(f"Undecided, because other programs use the CPUs: {names}. Tune again when the machine is idle.")
    if result.stopped:
        kept = "what was adopted is kept" if result.adopted else "nothing was changed"
        lines.append(f"Stopped; {kept}.")
    elif result.out_of_time:
        lines.append("Time limit reached before all choices were measured. `cpuchat tune MODEL --minutes 6` raises it.")
    return lines
