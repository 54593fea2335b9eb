"""The driver of the terminal: takes it over, and restores it however the app ends.

Textual's driver gives it back when its own message loop ends in order. Here the rest is seen to: signals, a terminal
that is closed, Ctrl+Z, and a loop that is stuck.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
from collections.abc import Callable
from typing import Any, Protocol, TextIO, cast

from textual.app import App
from textual.drivers import linux_driver
from textual.drivers.linux_driver import LinuxDriver

from cpuchat.tui.terminal.background import QUERY, BackgroundParser

# The driver's input thread makes its parser by this name.
setattr(linux_driver, "XTermParser", BackgroundParser)  # noqa: B010

# Undoes all that the driver may have switched on: synchronized output, bracketed paste, no line wrap, resize reports,
# mouse, keyboard protocol, alternate screen, hidden cursor, focus reports, colors.
_RESET = (
    "\x1b[?2026l\x1b[?2004l\x1b[?7h\x1b[?2048l\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?1016l"
    "\x1b[<u\x1b[?1049l\x1b[?25h\x1b[?1004l\x1b[0m"
)
_WRITABLE_SECONDS = 0.5  # a terminal that takes nothing for so long gets no farewell


class Job(Protocol):
    signalled: int
    asks_background: bool

    def worker_groups(self) -> list[int]: ...

    def end_by(self, number: int) -> None: ...


class _Output:
    """The terminal as a file; once it is gone, writes are dropped."""

    def __init__(self, file: TextIO, gone: Callable[[], None]) -> None:
        self._file = file
        self._gone = gone

    def write(self, text: str) -> None:
        self._try(lambda: self._file.write(text))

    def flush(self) -> None:
        self._try(self._file.flush)

    def fileno(self) -> int:
        return self._file.fileno()

    def isatty(self) -> bool:
        return True

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except (OSError, ValueError):
            self._gone()


class Terminal(LinuxDriver):
    """Textual's driver, which also stops the whole job on Ctrl+Z and notices that the terminal is gone.

    `active` tells whether the terminal is taken over now. `app` is a `Job`.
    """

    active = False

    def __init__(self, app: App[Any], **options: Any) -> None:
        super().__init__(app, **options)
        # Not Rich's, which has a size of its own for dumb terminals and those of 0×0: Textual would lay out for either
        # size in turn, for ever.
        self._size = self._get_terminal_size()
        self._lost_once = False
        # stdout, which was checked to be a terminal: stderr may go into a file.
        self._file = _Output(sys.__stdout__ or self._file, self._lost)  # type: ignore[assignment]
        # The driver's own handlers stop only this process, and start a second reader after a SIGSTOP.
        signal.signal(signal.SIGTSTP, lambda *_: self._soon(self.suspend_job))
        signal.signal(signal.SIGCONT, lambda *_: self._soon(self._continued))
        threading.Thread(target=self._await_hangup, name="hangup", daemon=True).start()

    @property
    def _job(self) -> Job:
        return cast("Job", self._app)

    def _soon(self, callback: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(callback)

    def start_application_mode(self) -> None:
        self.active = True
        super().start_application_mode()
        if self._job.asks_background:
            self.write(QUERY)
            self.flush()

    def stop_application_mode(self) -> None:
        if self.active:
            super().stop_application_mode()
            self.active = False

    def disable_input(self) -> None:
        if self.active:  # in the background, the kernel stops whoever touches the terminal
            super().disable_input()

    def write(self, data: str) -> None:
        if self.active and self._writer_thread is not None:
            super().write(data)

    # Ctrl+Z

    def suspend_job(self) -> None:
        """Give the terminal back, stop, and take it over again when the shell continues the job.

        The whole process group stops, as when the terminal itself sends the signal: a shell may wait for a parent of
        ours. So does each worker, in a group of its own: it must not continue computing. If nothing
        could continue the job, the kernel does not stop it.
        """
        if not self.active:
            return
        self.suspend_application_mode()
        before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTSTP, signal.SIGCONT)}
        workers = self._job.worker_groups()
        _signal_groups(workers, signal.SIGSTOP)
        os.killpg(os.getpgrp(), signal.SIGTSTP)
        _signal_groups(workers, signal.SIGCONT)
        for number, handler in before.items():
            signal.signal(number, handler)
        if not self._job.signalled:  # else the terminal is the shell's
            self._take_over()

    def _continued(self) -> None:
        """Take the terminal over again after a SIGSTOP: the shell has reconfigured it."""
        if self.active:
            self.suspend_application_mode()
            self._take_over()

    def _take_over(self) -> None:
        self.resume_application_mode()
        self._app.refresh(layout=True)

    # The terminal is gone

    def _await_hangup(self) -> None:
        poll = select.poll()
        poll.register(self.fileno, 0)
        with contextlib.suppress(OSError):
            if any(what & select.POLLHUP for _, what in poll.poll()):
                self._lost()

    def _run_input_thread(self) -> None:
        try:
            self.run_input_thread()
        except (OSError, ValueError):
            self._lost()

    def _lost(self) -> None:
        """End the app as a SIGHUP would, from any thread."""
        if not self._lost_once:
            self._lost_once = True
            self._soon(lambda: self._job.end_by(signal.SIGHUP))

    # The last resort

    def restore(self) -> None:
        """Restore the terminal without the driver's threads, from anywhere."""
        if not self.active:
            return
        self.active = False
        with contextlib.suppress(OSError, ValueError):
            if select.select([], [self._file.fileno()], [], _WRITABLE_SECONDS)[1]:
                os.write(self._file.fileno(), _RESET.encode())
        if self.attrs_before is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self.fileno, termios.TCSANOW, self.attrs_before)


def _signal_groups(groups: list[int], number: int) -> None:
    for group in groups:
        with contextlib.suppress(OSError):  # gone meanwhile
            os.killpg(group, number)
