"""Formats what a prompt reused of kept states of the model, why it was not more, and what a model may keep."""

from __future__ import annotations

from cpuchat.model_info import ModelInfo
from cpuchat.telemetry import units
from cpuchat.telemetry.units import plural
from cpuchat.timings import Reuse, Timings

_CHANGED = {
    "system": ("the system prompt changed", "system prompt changed"),
    "trimmed": ("the oldest messages were left out", "old messages left out"),
    "message": ("message {:,} was edited", "message {:,} was edited"),
    "template": ("the template changed message {:,}", "message {:,} re-rendered"),
}


def restored(reuse: Reuse) -> str:
    """`restored from disk in 40 ms`; "" for what was in the context already."""
    return f"restored from {reuse.source} in {' '.join(units.duration(reuse.ms / 1e3))}" if reuse.source else ""


def reasons(reuse: Reuse) -> list[str]:
    """Say why not more was reused: `evaluated anew: message 2 was edited`."""
    found = [f"evaluated anew: {_CHANGED[reuse.changed][0].format(reuse.message)}"] if reuse.changed else []
    if reuse.again:
        found.append(f"no checkpoint nearer: {plural(reuse.again, 'token')} evaluated again")
    return found


def brief_reasons(reuse: Reuse) -> list[str]:
    """Say the same in about 28 characters each: `anew: message 2 was edited`, `210 tokens re-evaluated`."""
    found = [f"anew: {_CHANGED[reuse.changed][1].format(reuse.message)}"] if reuse.changed else []
    return [*found, *([f"{plural(reuse.again, 'token')} re-evaluated"] if reuse.again else [])]


def note(timings: Timings | None) -> str:
    """Return what is not kept, and which setting helps, as a sentence; "" for nothing."""
    text = timings.reuse.note.rstrip(".") if timings is not None and timings.reuse is not None else ""
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def kept_states(model: ModelInfo | None) -> str:
    """`checkpoints 50.0 MB each, up to 1.9 GB in memory`: what chats may keep; "" for nothing."""
    if model is None or not model.state_memory:
        return ""
    checkpoints = f"checkpoints {units.size(model.partial_state)} each, " if model.partial_state else ""
    return f"{checkpoints}up to {units.size(model.state_memory)} in memory"
