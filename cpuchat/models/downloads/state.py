"""A download as plain data: its display, and the messages to and from its process."""

from __future__ import annotations

from typing import Literal

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
