"""What the app and the process of one download say to each other: one JSON line each way at a time."""

from __future__ import annotations

from cpuchat.models.downloads.state import State
from cpuchat.models.hub.repository import Data, HubFile


class Patience(Data, frozen=True):
    """How long faults of the network are borne; all in seconds but `tries`.

    The wait before the next try doubles from `first` to `longest`. What a server asks for (Retry-After) is waited for
    up to `told`. `silence` without a byte, or with hardly any, counts as a broken connection. `tries` in a row
    that bring hardly a byte end the download.
    """

    first: float = 1.0
    longest: float = 60.0
    told: float = 600.0
    silence: float = 10.0
    tries: int = 10


class Order(Data, frozen=True):
    """The first and only line on the process's standard input, which then stays open: its end means "stop".

    `revision` is a commit, `newest_at` see `Repository`. `verified` are the etags of files that have passed their check
    in an earlier run.
    `reserved` bytes of the free space belong to other downloads.
    """

    repo: str
    revision: str
    files: tuple[HubFile, ...]
    cache: str
    newest_at: float = 0.0
    verified: tuple[str, ...] = ()
    reserved: int = 0
    patience: Patience = Patience()


class Report(Data, frozen=True):
    """A line on its standard output. The fields are those of `Download`; `verified` as in `Order`.

    The last one has the state `done`, `failed` or `paused`.
    """

    state: State
    done: int = 0
    checked: int = 0
    attempt: int = 1
    retry_in: float = 0.0
    code: str = ""
    message: str = ""
    hint: str = ""
    path: str = ""
    verified: tuple[str, ...] = ()
