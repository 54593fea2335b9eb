"""Records an unexpected error: a traceback in a log, and one sentence."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from textual.worker import WorkerFailed

import cpuchat
from cpuchat import paths
from cpuchat.text import clean_line

KEPT_LOGS = 10
_MAX_LENGTH = 200


@dataclass(frozen=True)
class Crash:
    """`what` in one line; `log` holds the traceback, None when it could not be written."""

    what: str
    log: Path | None

    @property
    def log_words(self) -> str:
        return f"Log: {paths.shown(self.log)}" if self.log is not None else "The log could not be written."


def record(error: BaseException) -> Crash:
    """Write the traceback of `error` into a log. Never raises."""
    if isinstance(error, WorkerFailed):  # Textual's wrapping of what a worker raised
        error = error.error
    words = clean_line(str(error))
    words = words if len(words) <= _MAX_LENGTH else f"{words[:_MAX_LENGTH]}…"
    return Crash(f"{type(error).__name__}: {words}" if words else type(error).__name__, _write(error))


def _write(error: BaseException) -> Path | None:
    folder = paths.log_dir()
    stamp = time.strftime("%Y%m%d-%H%M%S")
    log = folder / f"app-{stamp}-{os.getpid()}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"cpuchat {cpuchat.__version__}\n")
            file.write("".join(traceback.format_exception(error)))
    except OSError:
        return None
    for old in sorted(folder.glob("app-*.log"))[:-KEPT_LOGS]:
        with contextlib.suppress(OSError):
            old.unlink(missing_ok=True)
    return log
