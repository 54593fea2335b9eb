"""Draws what a server reports beside an answer: what the first token waited for, and its load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuchat.base.text import clean_line
from cpuchat.protocol.timings import SERVER_WIDE
from cpuchat.telemetry import units
from cpuchat.tui.chat.drafting import explained
from cpuchat.tui.chat.frame import LABEL, Frame, Line, fit

if TYPE_CHECKING:
    from cpuchat.telemetry.machine import ServerFigures

_HINTED = {
    "prefill_tok_s": "prefill", "prefill_cached": "reused", "queue_s": "queue", "running": "requests",
    "own_acceptance": "own acceptance",
}  # fmt: skip
"""Figures whose place in the panel is too narrow for how to switch them on; acceptance has rows of its own."""


def waited(frame: Frame) -> list[Line]:
    """Draw network and queue, which are parts of the time to the first token; nothing for a model on this machine."""
    server = frame.figures.server
    if server is None:
        return []
    return [_waited(frame, "  network", "network_s"), _waited(frame, "  queue", "queue_s")]


def _waited(frame: Frame, label: str, field: str) -> Line:
    server = frame.figures.server
    seconds: float | None = getattr(server, field)
    if seconds is not None:
        return frame.row(label, "", *units.duration(seconds))
    return _missing(frame, label, field)


def _missing(frame: Frame, label: str, field: str) -> Line:
    server = frame.figures.server
    why = clean_line(server.why_missing(field)) if server is not None else ""
    if frame.settled and why == "at the end":
        return []
    room, full = frame.width - LABEL, f"n/a · {why}"
    text = full if len(full) <= room else fit(why, room)
    return [frame.text("label", f"{label:<{LABEL}}"), frame.text("missing", text)]


def _load(frame: Frame, server: ServerFigures) -> list[Line]:
    rows: list[Line] = []
    if server.running is not None:
        rows.append(frame.row("running", "", f"{server.running:,}", ""))
    if server.waiting is not None:
        rows.append(frame.row("queued", "", f"{server.waiting:,}", ""))
    if server.kv_used is not None:
        rows.append(frame.row("KV in use", "", f"{100 * server.kv_used:.0f}", "%"))
    return rows


def serving(frame: Frame) -> list[Line]:
    """Draw, while it answers, the requests that the server is at and those that wait and the share of its KV cache in
    use (all of them server-wide), and how to switch on what it does not report. Nothing for a model on this machine.
    """
    server = frame.figures.server
    if server is None:
        return []
    rows = [] if frame.settled else _load(frame, server)
    hints: dict[str, list[str]] = {}
    for figure, reason in server.unreported:
        if figure == "own_acceptance" and frame.figures.drafting.source != SERVER_WIDE:
            continue  # not known yet, or that of this answer
        if figure in _HINTED and "start " in reason:
            hints.setdefault(reason, []).append(_HINTED[figure])
    for reason, names in hints.items():
        rows += explained(frame, f"{', '.join(names)} n/a: {reason}", 5)
    return rows
