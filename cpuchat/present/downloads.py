"""How downloads read on the screen: a model and a state in words, figures in columns that keep their width.

Plain functions, no widgets. Names come from the hub, so they are cleaned here.
"""

from __future__ import annotations

from cpuchat.models.downloads.state import Download
from cpuchat.models.hub.repository import RepoModel
from cpuchat.telemetry.units import plural, size, time_left
from cpuchat.text import clean_line

MARKS = {"paused": "‖", "done": "✓", "failed": "!"}
SPEED, LEFT = 9, 11
STATE = SPEED + 2 + LEFT
"""Widths of columns, in cells."""


def mark(download: Download) -> str:
    """One character for the state; the state never stands in colour alone."""
    return MARKS.get(download.state, "↓")


def name(model: RepoModel) -> str:
    """`Qwen2.5-7B-Instruct`: the name without its quantization."""
    return clean_line(model.base)


def title(model: RepoModel) -> str:
    """`Qwen2.5-7B-Instruct Q4_K_M`."""
    return f"{name(model)} {clean_line(model.quantization)}".rstrip()


def share(download: Download) -> float:
    """0 to 1 of what the bar shows: bytes that arrived, or that the check went through."""
    if download.state == "checking" and download.total:
        return min(download.checked / download.total, 1.0)
    return download.share


def percent(download: Download) -> str:
    """` 61 %`; rounded down, so that 100 % is all of it."""
    return f"{int(100 * share(download)):>3d} %"


def amount(download: Download) -> str:
    """`2.9/4.7 GB`: what is here of how much, in one unit; as wide at the start as at the end."""
    number, unit = size(download.total).split(" ")
    step = download.total / float(number) if float(number) else 1.0
    decimals = len(number.partition(".")[2])
    done = f"{download.done / step:.{decimals}f}"
    return f"{done:>{len(number)}}/{number} {unit}"


def speed(bytes_per_second: float) -> str:
    """`38.1 MB/s`, right-aligned; blank while it is not known."""
    return (f"{size(int(bytes_per_second))}/s" if bytes_per_second > 0 else "").rjust(SPEED)


def left(seconds: float | None) -> str:
    """`47 s left`, `12 min left`, `3.2 h left`, right-aligned; blank while it can't be told."""
    return ("" if seconds is None else time_left(seconds)).rjust(LEFT)


def state(download: Download) -> str:
    """The state in `STATE` cells: speed and time left while bytes arrive, else words."""
    if download.state == "running":
        return f"{speed(download.speed)}  {left(download.seconds_left)}"
    return f"{_state(download):>{STATE}}"


def _state(download: Download) -> str:
    if download.state == "waiting":
        return f"try {download.attempt} in {max(download.retry_in, 0):.0f} s"
    return {"queued": "waits its turn", "checking": "checking the hash", "paused": "paused",
            "done": "here, checked", "failed": "failed"}.get(download.state, "")  # fmt: skip


def problem(download: Download) -> str:
    """What went wrong and what to do, "" if nothing did."""
    return clean_line(f"{download.message} {download.hint}")


def about(download: Download) -> list[tuple[str, str]]:
    """Everything worth telling about one download, as label and text."""
    files = download.model.files
    rows = [
        ("repository", clean_line(download.repo)),
        ("file", clean_line(files[0].path) + (f" and {plural(len(files) - 1, 'part')} more" if len(files) > 1 else "")),
        ("size", size(download.total)),
        ("is", _about_state(download)),
        ("problem", problem(download)),
        ("path", clean_line(download.path)),
    ]
    return [(label, text) for label, text in rows if text]


def _about_state(download: Download) -> str:
    arrived = f"{size(download.done)} of {size(download.total)} are here"
    return {
        "queued": f"waiting until another one is done; {arrived}",
        "running": f"arriving; {arrived}",
        "waiting": f"waiting for try {download.attempt}; {arrived}, and it goes on from there",
        "checking": "complete; its hash is compared with the one that the hub announced",
        "paused": f"paused; {arrived}, and it goes on from there",
        "done": "here, and its hash is the one that the hub announced",
        "failed": f"failed; {arrived}",
    }[download.state]
