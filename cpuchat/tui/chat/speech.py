"""Draws the figures of reading aloud: a section of the panel, and a part of the one-line display."""

from __future__ import annotations

from cpuchat.present import chats as words
from cpuchat.telemetry import units
from cpuchat.tui.chat.frame import LABEL, NUMBER, Frame, Line, fit, rate

_WIDE = 100  # cells of a line that has room for first audio


def speech(frame: Frame) -> list[Line]:
    """Draw six rows, the most important first; none while nothing was read."""
    now = frame.figures.speech
    if not now.engine or not (now.reading or now.sound_s):
        return []
    rows = [
        _row(frame, "first audio", None if now.first_audio_s is None else units.duration(now.first_audio_s)),
        _row(frame, "after token", None if now.after_token_s is None else units.duration(now.after_token_s)),
        _row(
            frame, "RTF", None if now.real_time_factor is None else (words.real_time_factor(now.real_time_factor), "")
        ),
        _row(frame, "audio queued", (f"{now.queued_s:.1f}", "s") if now.reading else None),
        [frame.text("label", f"{'speech on':<{LABEL}} "), frame.text("value", fit(words.cores(now), frame.width - 13))],
    ]
    if now.decode_tok_s is not None and now.plain_tok_s is not None:
        both = f"{rate(now.decode_tok_s)} of {rate(now.plain_tok_s)}"
        rows.append(
            [
                frame.text("label", f"{'with speech':<{LABEL}}"),
                frame.text("value", f"{both:>{NUMBER}}"),
                frame.text("label", " tok/s"),
            ]
        )
    return rows


def speech_in_line(frame: Frame) -> Line:
    """Draw the audio queued, and first audio where there is room, for one line; nothing while nothing is read."""
    now = frame.figures.speech
    if not now.reading:
        return []
    if frame.width < _WIDE:
        return [
            frame.text("label", "audio "),
            frame.text("value", f"{f'+{now.queued_s:.1f}':>5}"),
            frame.text("label", " s"),
        ]
    first = "n/a" if now.first_audio_s is None else " ".join(units.duration(now.first_audio_s))
    return [
        frame.text("label", "first audio "),
        frame.text("missing" if now.first_audio_s is None else "value", f"{first:>6}"),
        frame.text("label", ", queued "),
        frame.text("value", f"{now.queued_s:>4.1f}"),
        frame.text("label", " s"),
    ]


def _row(frame: Frame, label: str, figure: tuple[str, str] | None) -> Line:
    head = frame.text("label", f"{label:<{LABEL}}")
    if figure is not None:
        return [head, frame.text("value", f"{figure[0]:>{NUMBER}}"), frame.text("label", f" {figure[1]}".rstrip())]
    return (
        []
        if frame.settled and not frame.figures.speech.reading
        else [head, frame.text("missing", f"{'n/a':>{NUMBER}}")]
    )
