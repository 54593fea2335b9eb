"""Reports how far a download is: every change of state at once, everything else by a clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cpuchat.errors import CpuchatError
from cpuchat.models.downloads.state import Report, State

_INTERVAL = 0.2


@dataclass
class Progress:
    """The mutable state of a download. One thread changes it, several may report; `send` delivers a report.

    The current file has `here` bytes on the disk, of which `hashed` are checked; the other files of the model have
    `others`, of which `checked` are.
    """

    send: Callable[[Report], None]
    state: State = "running"
    others: int = 0
    here: int = 0
    checked: int = 0
    hashed: int = 0
    attempt: int = 1
    verified: list[str] = field(default_factory=list)
    _error: CpuchatError | None = None
    _retry_in: float = 0.0
    _path: str = ""
    _sent: Report | None = None
    # Reentrant: the signal to stop raises an exception that may hit while the lock is held, and is then reported.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def done(self) -> int:
        """Return bytes of all files that are on the disk."""
        return self.others + self.here

    def begin_file(self, others: int, here: int) -> None:
        """Make the next file the current one."""
        with self._lock:
            self.others, self.here, self.hashed = others, here, 0

    def finish_file(self) -> None:
        """Count the current file as checked and in its place."""
        with self._lock:
            self.checked += self.here
            self.others, self.here, self.hashed = self.done, 0, 0

    def enter(self, state: State, *, error: CpuchatError | None = None, retry_in: float = 0.0, path: str = "") -> None:
        """Change the state and report it. `error`: what is waited for, or ended it. `path`: the finished model."""
        with self._lock:
            self.state, self._error, self._retry_in, self._path = state, error, retry_in, path
            self.report()

    def report(self) -> None:
        """Send the current state, unless it was sent already."""
        with self._lock:
            error = self._error
            report = Report(
                state=self.state,
                done=self.done,
                checked=self.checked + self.hashed,
                attempt=self.attempt,
                retry_in=self._retry_in,
                code=error.code if error is not None else "",
                message=error.message if error is not None else "",
                hint=error.hint if error is not None else "",
                path=self._path,
                verified=tuple(self.verified),
            )
            if report != self._sent:
                self._sent = report
                self.send(report)

    def report_by_clock(self) -> None:
        """Report a few times a second, forever: also while the network or the disk blocks the other thread.

        Not before the first state was entered: until then the bytes on the disk are unknown.
        """
        while True:
            time.sleep(_INTERVAL)
            if self._sent is not None:
                self.report()
