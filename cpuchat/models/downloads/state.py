"""What a download is and how far it is, as plain data."""

from __future__ import annotations

from typing import Literal

from cpuchat.models.hub.repository import Data, RepoModel

State = Literal["queued", "running", "waiting", "checking", "paused", "done", "failed"]
"""`waiting`: for the next try after a fault. `checking`: all bytes are here, the hash is computed. `done` only after
the check passed and the file is in its place."""

RUNNING: frozenset[State] = frozenset({"queued", "running", "waiting", "checking"})


class Download(Data, frozen=True):
    """One model on its way. All sizes in bytes. `revision` is a commit, `newest_at` see `Repository`.

    `done` counts what is on the disk already, `checked` how many of these the running check went through. `speed` is
    bytes per second of the last seconds, `seconds_left` None while it cannot be told. `retry_in` seconds until try
    number `attempt`. `code`, `message` and `hint` are those of the error that ended it or that is waited for. `path` is
    the file to load, "" before `done`.
    """

    id: str
    repo: str
    revision: str
    model: RepoModel
    newest_at: float = 0.0
    state: State = "queued"
    done: int = 0
    checked: int = 0
    speed: float = 0.0
    seconds_left: float | None = None
    attempt: int = 1
    retry_in: float = 0.0
    code: str = ""
    message: str = ""
    hint: str = ""
    path: str = ""

    @property
    def total(self) -> int:
        return self.model.size

    @property
    def share(self) -> float:
        """0 to 1."""
        return min(self.done / self.total, 1.0) if self.total else 0.0
