"""Apps that never end with a traceback, neither on an exception nor on a signal: an unexpected error becomes a log and
one sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from textual import constants
from textual.app import App
from textual.css.query import NoMatches
from textual.driver import Driver
from textual.timer import Timer, TimerCallback
from textual.widget import MountError
from textual.worker import WorkerFailed

import cpuchat
from cpuchat.base import paths
from cpuchat.base.text import clean_line

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
    what = f"{type(error).__name__}: {words}" if words else type(error).__name__
    folder = paths.log_dir()
    log = folder / f"app-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"cpuchat {cpuchat.__version__}\n")
            file.write("".join(traceback.format_exception(error)))
    except OSError:
        return Crash(what, None)
    for old in sorted(folder.glob("app-*.log"))[:-KEPT_LOGS]:
        with contextlib.suppress(OSError):
            old.unlink(missing_ok=True)
    return Crash(what, log)


R = TypeVar("R")


class GuardedApp(App[R], Generic[R]):
    """Ends itself after an uncaught exception or a signal; `launch.run` handles what follows.

    `crash` is the first such exception, `signalled` the number of the first signal (0: none). `asks_background`: the
    terminal is asked for its background, and a reply arrives as `BackgroundReported`."""

    asks_background = False

    def __init__(self) -> None:
        super().__init__()
        self.crash: Crash | None = None
        self.signalled = 0

    def get_driver_class(self) -> type[Driver]:
        if constants.DRIVER:
            return super().get_driver_class()
        from cpuchat.tui.terminal.driver import TerminalDriver

        return TerminalDriver

    def set_timer(
        self, delay: float, callback: TimerCallback | None = None, *, name: str | None = None, pause: bool = False
    ) -> Timer:
        """As Textual's, whose timer never fires when its task is preempted for longer than `delay` at its start: a
        terminal that was resized just then would keep its old size for ever."""
        timer = super().set_timer(delay, callback, name=name, pause=pause)
        timer._skip = False  # its task begins later
        return timer

    def on_load(self) -> None:

        def loop_failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            """End the app after an error in a callback of the event loop; only log those of forgotten tasks."""
            error = context.get("exception")
            if error is not None and "handle" in context:
                self.fail(error)
            elif error is not None:
                record(error)

        asyncio.get_running_loop().set_exception_handler(loop_failed)
        if self.signalled:  # before there was a loop
            self.exit()

    def fail(self, error: BaseException) -> None:
        """End because of `error`. Textual calls it for handlers, timers, workers, compose, render and style sheets."""
        self._return_code = 1
        if self.crash is None:
            self.crash = record(error)
        if self._exception is None and isinstance(error, Exception):
            self._exception = error  # raised again where a test runs the app
            self._exception_event.set()
        self._close_messages_no_wait()

    def _handle_exception(self, error: Exception) -> None:
        cause = error.error if isinstance(error, WorkerFailed) else error
        if not (self._exit and isinstance(cause, MountError | NoMatches)):  # what opens now is given no widgets
            self.fail(error)

    def fail_from_thread(self, error: BaseException) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.fail, error)

    def end_by(self, number: int) -> None:
        self.signalled = self.signalled or number
        self.exit()

    def action_suspend_process(self) -> None:
        if (suspend := getattr(self._driver, "suspend_job", None)) is not None:
            suspend()

    def give_terminal_back(self) -> None:
        if (restore := getattr(self._driver, "restore", None)) is not None:
            restore()
