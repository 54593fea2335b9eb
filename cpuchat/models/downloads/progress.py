"""How far a download is, told to whoever started it: every change of state at once, the rest by a clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cpuchat.errors import CpuchatError
from cpuchat.models.downloads.state import State
from cpuchat.models.downloads.wire import Report

_INTERVAL = 0.2


@dataclass
class Progress:
    """Mutable; one thread changes it, several may tell. `say` hands a report over.

    The file at hand has `here` bytes on the disk, of which `hashed` are checked; the other files of the model have
    `others`, of which `checked` are.
    """

    say: Callable[[Report], None]
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
    _said: Report | None = None
    # Reentrant: being told to stop (an exception from a signal) may hit while it is taken, and is told about.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def done(self) -> int:
        """Bytes of all files that are on the disk."""
        return self.others + self.here

    def begin_file(self, others: int, here: int) -> None:
        """The next file is at hand."""
        with self._lock:
            self.others, self.here, self.hashed = others, here, 0

    def finish_file(self) -> None:
        """The file at hand is checked and in its place."""
        with self._lock:
            self.checked += self.here
            self.others, self.here, self.hashed = self.done, 0, 0

    def enter(self, state: State, *, error: CpuchatError | None = None, retry_in: float = 0.0, path: str = "") -> None:
        """Change the state, and tell. `error`: what is waited for, or ended it. `path`: the model, when it is done."""
        with self._lock:
            self.state, self._error, self._retry_in, self._path = state, error, retry_in, path
            self.tell()

    def tell(self) -> None:
        """Tell where it stands, unless that was told already."""
        with self._lock:
            report = self._report()
            if report != self._said:
                self._said = report
                self.say(report)

    def tell_by_clock(self) -> None:
        """Tell a few times a second, for ever: also while the network or the disk keeps the other thread waiting.

        Not before the first state was entered: until then, nobody knows what is on the disk.
        """
        while True:
            time.sleep(_INTERVAL)
            if self._said is not None:
                self.tell()

    def _report(self) -> Report:
        error = self._error
        return Report(
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
