"""A download as plain data: its display, and the messages to and from its process.

Reports how far a download is: every change of state at once, everything else by a clock.

Transfer rate, averaged over a few seconds so that the figure can be read.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from cpuchat.base.errors import CpuchatError
from cpuchat.models.hub.repository import Data, HubFile, RepoModel

State = Literal["queued", "running", "waiting", "checking", "paused", "done", "failed"]
"""`waiting`: for a retry, or for another program. `checking`: all bytes are here, the hash is being computed. `done`
only after the file passed its check and has its name in the cache."""

RUNNING: frozenset[State] = frozenset({"queued", "running", "waiting", "checking"})


class Status(Data, frozen=True):
    """How far a download is, in bytes.

    `done` counts what is on the disk, `checked` how much of that the running check has hashed. `retry_in` is the time
    in seconds until attempt number `attempt`. `code`, `message` and `hint` are those of the error that ended the
    download or that it waits for. `path` is the file to load, "" before `done`.
    """

    state: State = "queued"
    done: int = 0
    checked: int = 0
    attempt: int = 1
    retry_in: float = 0.0
    code: str = ""
    message: str = ""
    hint: str = ""
    path: str = ""


class Download(Status, frozen=True, kw_only=True):
    """One model being downloaded. `revision` is a commit, `newest_at` see `Repository`.

    `speed` is in bytes per second over the last seconds; `seconds_left` is None while it cannot be estimated.
    """

    id: str
    repo: str
    revision: str
    model: RepoModel
    newest_at: float = 0.0
    speed: float = 0.0
    seconds_left: float | None = None

    @property
    def total(self) -> int:
        return self.model.size

    @property
    def share(self) -> float:
        """Fraction of the bytes that are on the disk, 0 to 1."""
        return min(self.done / self.total, 1.0) if self.total else 0.0


class Unfinished(Data, frozen=True):
    """A download in the journal, as of its last change of state. `verified` see `Order`."""

    download: Download
    verified: tuple[str, ...] = ()


class RetryPolicy(Data, frozen=True):
    """How long network faults are retried; times in seconds.

    The wait before a retry doubles from `first_wait` to `max_wait`. A server's Retry-After is respected up to
    `max_retry_after`. A connection that delivers hardly a byte for `idle_timeout` counts as broken. After `attempts` in
    a row without progress the download fails.
    """

    first_wait: float = 1.0
    max_wait: float = 60.0
    max_retry_after: float = 600.0
    idle_timeout: float = 10.0
    attempts: int = 10


class Order(Data, frozen=True):
    """The message to the download process: one JSON line on its standard input, which then stays open.

    `revision` is a commit, `newest_at` see `Repository`. `verified` are the etags of files that passed their check in
    an earlier run. `reserved` bytes of the free space belong to other downloads.
    """

    repo: str
    revision: str
    files: tuple[HubFile, ...]
    cache: str
    newest_at: float = 0.0
    verified: tuple[str, ...] = ()
    reserved: int = 0
    retry_policy: RetryPolicy = RetryPolicy()


class Report(Status, frozen=True):
    """The messages of the download process: one JSON line each; the last has the state `done`, `failed` or `paused`."""

    verified: tuple[str, ...] = ()


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


WINDOW = 8.0
"""Seconds of the moving average."""


class Rate:
    """Computes bytes per second over the last seconds from readings of a counter."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int]] = deque()

    def add(self, moment: float, count: int) -> None:
        """Add a reading: the counter stood at `count` at `moment` (seconds). A counter that falls starts over."""
        if self._readings and count < self._readings[-1][1]:
            self._readings.clear()
        self._readings.append((moment, count))
        while len(self._readings) > 2 and self._readings[1][0] <= moment - WINDOW:
            self._readings.popleft()

    def clear(self) -> None:
        self._readings.clear()

    @property
    def per_second(self) -> float:
        """Return bytes per second; 0.0 before the second reading."""
        if len(self._readings) < 2:
            return 0.0
        (first, before), (last, now) = self._readings[0], self._readings[-1]
        return (now - before) / (last - first) if last > first else 0.0
