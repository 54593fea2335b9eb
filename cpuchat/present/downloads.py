"""Formats downloads as words and figures in columns of constant width. Names come from Hugging Face and are cleaned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuchat.base.text import clean_line
from cpuchat.models.downloads.state import Download
from cpuchat.models.hub.repository import RepoModel
from cpuchat.present.table import ListRow
from cpuchat.telemetry.units import plural, size, time_left

if TYPE_CHECKING:
    from cpuchat.models.quantize.make import QuantizeJob, QuantizeProgress

MARKS = {"paused": "‖", "done": "✓", "failed": "!"}
SPEED, LEFT = 9, 11
STATE = SPEED + 2 + LEFT
"""Column widths in cells."""
_STATES = {
    "queued": "Queued",
    "checking": "Verifying",
    "paused": "Paused",
    "done": "Downloaded (verified)",
    "failed": "Failed",
}


def download_mark(download: Download) -> str:
    """Return one character for the state, so that color is not its only sign."""
    return MARKS.get(download.state, "↓")


def name(model: RepoModel) -> str:
    """`Qwen2.5-7B-Instruct`: the name without its quantization."""
    return clean_line(model.base)


def download_title(model: RepoModel) -> str:
    """`Qwen2.5-7B-Instruct Q4_K_M`."""
    return f"{name(model)} {clean_line(model.quantization)}".rstrip()


def share(download: Download) -> float:
    """Return what the bar shows, 0 to 1: the downloaded part, or the verified part."""
    if download.state == "checking" and download.total:
        return min(download.checked / download.total, 1.0)
    return download.share


def percent(download: Download) -> str:
    """Return ` 61 %`; rounded down, so that 100 % is all of it."""
    return f"{int(100 * share(download)):>3d} %"


def amount(download: Download) -> str:
    """`2.9/4.7 GB`: downloaded of total in one unit, of constant width."""
    number, unit = size(download.total).split(" ")
    step = download.total / float(number) if float(number) else 1.0
    decimals = len(number.partition(".")[2])
    done = f"{download.done / step:.{decimals}f}"
    return f"{done:>{len(number)}}/{number} {unit}"


def download_speed(bytes_per_second: float) -> str:
    """`38.1 MB/s`, right-aligned; blank while unknown."""
    return (f"{size(int(bytes_per_second))}/s" if bytes_per_second > 0 else "").rjust(SPEED)


def without_hub(problem: str, key: str) -> str:
    """Say why the hub was not reached, and how to go on without it; `key` reads the folders again."""
    return f"{clean_line(problem)} Copy a .gguf file to ~/models, then press {key}."


def left(seconds: float | None) -> str:
    """`47 s left`, `12 min left`, `3.2 h left`, right-aligned; blank while unknown."""
    return ("" if seconds is None else time_left(seconds)).rjust(LEFT)


def state(download: Download) -> str:
    """Format the state in `STATE` cells: download_speed and time left while bytes arrive, else words."""
    if download.state == "running":
        return f"{download_speed(download.speed)}  {left(download.seconds_left)}"
    words = _STATES.get(download.state, "")
    if download.state == "waiting":
        words = f"Retry {download.attempt} in {max(download.retry_in, 0):.0f} s"
    return f"{words:>{STATE}}"


def row(download: Download) -> ListRow:
    """`↓ Qwen2.5-7B-Instruct   Q4_K_M   4.7 GB  61 %   38.1 MB/s`; the key is the download's id."""
    is_still = download.state in ("queued", "paused", "failed")
    state = download.state if is_still else percent(download).strip()
    if download.state == "waiting":
        state = f"retry {download.attempt}"
    speed = download_speed(download.speed).strip() if download.state == "running" else ""
    columns = (clean_line(download.order.model.quantization), size(download.total), state, speed)
    return ListRow(download.id, download_mark(download), name(download.order.model), columns)


def problem(download: Download) -> str:
    """Return what went wrong and what to do; "" without a problem."""
    return clean_line(f"{download.message} {download.hint}")


def download_details(download: Download) -> list[tuple[str, str]]:
    """Label and text of everything that is known about one download."""
    files = download.order.model.files
    more = len(files) - 1
    rows = [
        ("repository", clean_line(download.order.repo)),
        ("file", clean_line(files[0].path) + (f" and {plural(more, 'more part')}" if more else "")),
        ("size", size(download.total)),
        ("state", _state_details(download)),
        ("problem", problem(download)),
        ("path", clean_line(download.path)),
    ]
    return [(label, text) for label, text in rows if text]


def _state_details(download: Download) -> str:
    arrived = f"{size(download.done)} of {size(download.total)} downloaded"
    return {
        "queued": f"queued behind another download; {arrived}",
        "running": ", ".join(filter(None, (f"downloading; {arrived}", left(download.seconds_left).strip()))),
        "waiting": f"waiting for retry {download.attempt}; {arrived}, resumes from there",
        "checking": "complete; verifying its SHA-256 against the hash that Hugging Face published",
        "paused": f"paused; {arrived}, resumes from there",
        "done": "downloaded; its SHA-256 matches the hash that Hugging Face published",
        "failed": f"failed; {arrived}",
    }[download.state]


def quantizing(job: QuantizeJob | None, now: QuantizeProgress | None) -> str:
    """Return `qwen-Q4_K_M.gguf · writing 40 % · 12 s left`; "" without a job."""
    share = f" {100 * min(now.bytes_out / max(now.total_out, 1), 1.0):.0f} %" if now is not None else ""
    left = time_left(now.seconds_left) if now is not None and now.seconds_left is not None else ""
    return " · ".join(filter(None, (clean_line(job.out.name), f"writing{share}", left))) if job is not None else ""
