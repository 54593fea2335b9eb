"""Base of apps that never end with a traceback, neither on an exception nor on a signal."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Generic, TypeVar

from textual.app import App
from textual.driver import Driver
from textual.timer import Timer, TimerCallback

from cpuchat.tui.terminal import crash

R = TypeVar("R")


class GuardedApp(App[R], Generic[R]):
    """Ends itself after an uncaught exception or a signal; `launch.run` handles what follows.

    `crash` is the first such exception, `signalled` the number of the first signal (0: none). `asks_background`: the
    terminal is asked for its background, and a reply arrives as `BackgroundReported`.
    """

    asks_background = False

    def __init__(self) -> None:
        super().__init__()
        self.crash: crash.Crash | None = None
        self.signalled = 0

    def get_driver_class(self) -> type[Driver]:
        if sys.platform == "win32":
            return super().get_driver_class()
        from cpuchat.tui.terminal.driver import Terminal

        return Terminal

    def set_timer(
        self, delay: float, callback: TimerCallback | None = None, *, name: str | None = None, pause: bool = False
    ) -> Timer:
        """As Textual's, whose timer never fires when its task is preempted for longer than `delay` at its start: a
        terminal that was resized just then would keep its old size for ever."""
        timer = super().set_timer(delay, callback, name=name, pause=pause)
        timer._skip = False  # its task begins later
        return timer

    def on_load(self) -> None:
        asyncio.get_running_loop().set_exception_handler(self._loop_failed)
        if self.signalled:  # before there was a loop
            self.exit()

    def fail(self, error: BaseException) -> None:
        """End because of `error`. Textual calls it for handlers, timers, workers, compose, render and style sheets."""
        self._return_code = 1
        if self.crash is None:
            self.crash = crash.record(error)
        if self._exception is None and isinstance(error, Exception):
            self._exception = error  # raised again where a test runs the app
            self._exception_event.set()
        self._close_messages_no_wait()

    def _handle_exception(self, error: Exception) -> None:
        self.fail(error)

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the app after an error in a callback of the event loop; only log those of forgotten tasks."""
        error = context.get("exception")
        if error is not None and "handle" in context:
            self.fail(error)
        elif error is not None:
            crash.record(error)

    def fail_from_thread(self, error: BaseException) -> None:
        """Call `fail` from another thread."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self.fail, error)

    def end_by(self, number: int) -> None:
        """End because of a signal, on the event loop."""
        self.signalled = self.signalled or number
        self.exit()

    def save_now(self) -> None:
        """Save now. Called before the process ends without its event loop; quick, and may raise."""

    def worker_groups(self) -> list[int]:
        """Return the process groups to stop and continue with this one."""
        return []

    def action_suspend_process(self) -> None:
        suspend = getattr(self._driver, "suspend_job", None)
        if suspend is not None:
            suspend()

    def give_terminal_back(self) -> None:
        """Restore the terminal, whatever has happened to the driver."""
        restore = getattr(self._driver, "restore", None)
        if restore is not None:
            restore()
