"""Reading aloud in words."""

from __future__ import annotations

from typing import Any

import msgspec

from cpuchat.hardware.lists import format_cpu_list
from cpuchat.telemetry import units
from cpuchat.telemetry.speech import Speech


def real_time_factor(value: float) -> str:
    """Format a real-time factor with two significant digits: `0.009`, `0.13`, `1.4`."""
    return f"{value:.3f}" if value < 0.0995 else f"{value:.2f}" if value < 0.995 else f"{value:.1f}"


def cores(figures: Speech) -> str:
    """Return the CPUs of the speech process: "CPUs 6-7", or "model's cores"."""
    if figures.shared or not figures.cpus:
        return "model's cores"
    return f"CPU{'s' if len(figures.cpus) > 1 else ''} {format_cpu_list(figures.cpus)}"


def summary(figures: Speech, where: str) -> str:
    """Return the figures of a reading in one line; `where` is the player or the file."""
    if not figures.sound_s:
        return "Nothing to read aloud."
    parts = [f"{figures.sound_s:.1f} s of speech to {where}"]
    if figures.after_token_s is not None and figures.first_audio_s is not None:
        sentence = figures.after_sentence_s
        more = f", {_duration(sentence)} after the first sentence" if sentence is not None else ""
        parts.append(f"first audio {_duration(figures.after_token_s)} after the first token{more}")
    elif figures.after_token_s is not None:
        parts.append(f"first audio {_duration(figures.after_token_s)}")
    if figures.real_time_factor is not None:
        parts.append(f"real-time factor {real_time_factor(figures.real_time_factor)}")
    parts.append(f"{figures.engine}, {cores(figures)}")
    return " · ".join(parts)


def no_device(instead: str) -> str:
    """Return why there is no sound, and what is written `instead`."""
    return f"No sound device: pw-cat, paplay, aplay and play are missing or cannot play. Writing {instead}."


def as_json(figures: Speech, where: str) -> dict[str, Any]:
    """Return the figures for scripts; seconds."""
    return {**msgspec.to_builtins(figures), "output": where}


def _duration(seconds: float) -> str:
    return " ".join(units.duration(seconds))
