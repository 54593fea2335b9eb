"""Tuning in words: a row for each choice, and a summary."""

from __future__ import annotations

from typing import Final

from cpuchat.measure.turns import MAX_ROUNDS
from cpuchat.telemetry import units
from cpuchat.tune.tuner import ChoiceResult, TuneResult

HEADINGS: Final = ("CHOICE", "BEFORE → AFTER", "DECODE", "PREFILL", "RESULT")
RIGHT: Final = (2, 3)


def row(one: ChoiceResult) -> tuple[str, ...]:
    """Format a choice of tuning: what was compared, its gains, and what became of it."""
    compared = f"{one.before} → {one.after}" if one.after else one.before
    gains = [units.change(gain) if gain is not None else "" for gain in (one.decode, one.prefill)]
    return (one.name, compared, *gains, _decision(one))


def _decision(one: ChoiceResult) -> str:
    if one.adopted:
        return "adopted"
    match one.verdict:
        case None:
            return f"not tried: {one.reason}"
        case "mixed" if one.prefill is None:  # of drafters, on several texts
            return "not adopted: slower in one text"
        case "mixed":
            slower = "decode" if (one.decode or 0.0) < (one.prefill or 0.0) else "prefill"
            return f"not adopted: slower {slower}"
        case "noisy":
            return f"undecided: {one.reason or f'{MAX_ROUNDS} rounds differ by more'}"
        case "failed":
            return f"failed: {one.reason}"
        case "same":
            return "no gain"
        case verdict:
            return verdict


def summary(result: TuneResult, *, undo: str) -> list[str]:
    """Say in a sentence or two what tuning brought; `undo` says how to revert it."""
    lines: list[str] = []
    if result.adopted and result.decode is not None and result.prefill is not None:
        figures = [
            f"{name} {units.rate(before)} → {units.rate(after)} tok/s"
            for name, (before, after) in (("decode", result.decode), ("prefill", result.prefill))
            if abs(after / before - 1) > 0.0005
        ]
        figures += [f"drafted text {units.change(one.decode or 0.0)}" for one in result.adopted if one.is_of_drafters]
        what = ", ".join(figures) or "adopted"
        lines.append(f"{result.model}: {what}. Used from the next load; {undo}.")
    elif result.busy:
        lines.append("Nothing was adopted: other programs use the CPUs. Tune again when the machine is idle.")
    elif not result.stopped:
        lines.append(f"{result.model}: nothing is faster than the settings in use; nothing was changed.")
    if result.busy and result.adopted:
        names = ", ".join(one.name for one in result.choices if one.is_busy)
        lines.append(f"Undecided, because other programs use the CPUs: {names}. Tune again when the machine is idle.")
    if result.stopped:
        kept = "what was adopted is kept" if result.adopted else "nothing was changed"
        lines.append(f"Stopped; {kept}.")
    elif result.out_of_time:
        lines.append("Time limit reached before all choices were measured.")
    return lines
