"""A download as plain data: what is wanted (`Order`), and how it stands (`Download`), which its process reports."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from cpuchat.base.errors import CpuchatError
from cpuchat.models.hub.repository import HubFile, ModelData, RepoModel

State = Literal["queued", "running", "waiting", "checking", "paused", "done", "failed"]
"""`waiting`: for a retry, or for another program. `checking`: all bytes are here, the hash is being computed. `done`
only after the file passed its check and has its name in the cache."""

RUNNING: frozenset[State] = frozenset({"queued", "running", "waiting", "checking"})


class RetryPolicy(ModelData, frozen=True):
    """How long network faults are retried; times in seconds.

    The wait before a retry doubles from `first_wait` to `max_wait`. A server's Retry-After is respected up to
    `max_retry_after`. A connection that delivers hardly a byte for `idle_timeout` counts as broken. After `attempts` in
    a row without progress the download fails."""

    first_wait: float = 1.0
    max_wait: float = 60.0
    max_retry_after: float = 600.0
    idle_timeout: float = 10.0
    attempts: int = 10


class Order(ModelData, frozen=True):
    """What is wanted: a model of a repository, in the Hugging Face cache `cache`.

    `revision` is a commit, `newest_at` see `Repository`. `reserved` bytes of the free space belong to other downloads.
    """

    repo: str
    revision: str
    model: RepoModel
    cache: str
    newest_at: float = 0.0
    reserved: int = 0
    retry_policy: RetryPolicy = RetryPolicy()

    @property
    def id(self) -> str:
        """Return an id that is the same for the same content of the same repository, whatever the revision."""
        named = "\n".join([self.repo, self.model.name, *(file.etag for file in self.model.files)])
        return hashlib.sha256(named.encode()).hexdigest()[:12]


class Download(ModelData, frozen=True, tag="download"):
    """How an order stands, in bytes. Also the message to and from the process of a download, one JSON line each.

    `done` counts what is on the disk, `checked` how much of that the running check has hashed. `retry_in` is the time
    in seconds until attempt number `attempt`. `code`, `message` and `hint` are those of the error that ended the
    download or that it waits for. `path` is the file to load, "" before `done`. `verified` are the etags of files that
    passed their check. `speed` is in bytes per second over the last seconds; `seconds_left` is None while it cannot be
    estimated; both are 0 and None where the process reports."""

    order: Order
    state: State = "queued"
    done: int = 0
    checked: int = 0
    attempt: int = 1
    retry_in: float = 0.0
    code: str = ""
    message: str = ""
    hint: str = ""
    path: str = ""
    verified: tuple[str, ...] = ()
    speed: float = 0.0
    seconds_left: float | None = None

    @property
    def id(self) -> str:
        return self.order.id

    @property
    def total(self) -> int:
        return self.order.model.size

    @property
    def share(self) -> float:
        """Fraction of the bytes that are on the disk, 0 to 1."""
        return min(self.done / self.total, 1.0) if self.total else 0.0


_INTERVAL = 0.2  # seconds


class DownloadProgress:
    """Counts the bytes of a download in its process; `send` delivers how it stands, for mere progress a few times a
    second.

    Of each file, by its etag, `here` bytes are on the disk, of which `checked` are hashed."""

    def __init__(self, download: Download, send: Callable[[Download], None]) -> None:
        self.order = download.order
        self.here = {file.etag: 0 for file in download.order.model.files}
        self.checked = dict(self.here)
        self.attempt = 1
        self.verified = list(download.verified)
        self._send = send
        self._sent = download
        self._sent_at = 0.0

    @property
    def done(self) -> int:
        """Return bytes of all files that are on the disk."""
        return sum(self.here.values())

    def written(self, file: HubFile, size: int) -> None:
        """Record that `size` bytes of a file are on the disk."""
        self.here[file.etag] = size
        self._count()

    def hashed(self, file: HubFile, size: int) -> None:
        """Record that `size` bytes of a file are checked."""
        self.checked[file.etag] = size
        self._count()

    def _count(self) -> None:
        if self._sent_at and time.monotonic() - self._sent_at > _INTERVAL:
            self.enter(self._sent.state)

    def enter(self, state: State, *, error: CpuchatError | None = None, retry_in: float = 0.0, path: str = "") -> None:
        """Report the state, unless nothing changed. `error`: what is waited for, or ended it. `path`: the finished
        model."""
        code, message, hint = (error.code, error.message, error.hint) if error is not None else ("", "", "")
        now = replace(
            self._sent, state=state, retry_in=retry_in, path=path, code=code, message=message, hint=hint,
            done=self.done, checked=sum(self.checked.values()), attempt=self.attempt, verified=tuple(self.verified),
        )  # fmt: skip
        if now != self._sent or not self._sent_at:
            self._sent, self._sent_at = now, time.monotonic()
            self._send(now)
