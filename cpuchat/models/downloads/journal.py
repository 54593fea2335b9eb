"""Downloads that are not done, kept on the disk: the next run goes on with them, whatever ended this one."""

from __future__ import annotations

import contextlib

from cpuchat import paths
from cpuchat.models.downloads.state import RUNNING, Download
from cpuchat.models.hub.repository import Data
from cpuchat.models.library.kept import Kept

_VERSION = 1
_MOST = 200
_MAX_BYTES = 8 << 20


class Unfinished(Data, frozen=True):
    """A download as it was when its state last changed. `verified` see `wire.Order`."""

    download: Download
    verified: tuple[str, ...] = ()


class Journal:
    """`downloads.json` in the data folder. Several programs may write it: each changes only its own downloads."""

    def __init__(self) -> None:
        self._kept = Kept(paths.downloads_file(), Unfinished, version=_VERSION, most=_MOST, max_bytes=_MAX_BYTES)

    def read(self) -> list[Unfinished]:
        """The oldest first; empty when the file is damaged."""
        return list(self._kept.read().values())

    def find(self, id: str) -> Unfinished | None:
        return self._kept.read().get(id)

    def write(self, download: Download, verified: tuple[str, ...]) -> None:
        """Remember it, or forget it when it is done."""

        with contextlib.suppress(OSError):  # the folder of the chats: nobody else's business
            paths.data_dir().mkdir(mode=0o700, parents=True, exist_ok=True)

        def change(entries: dict[str, Unfinished]) -> None:
            if download.state == "done":
                entries.pop(download.id, None)
            else:
                entries[download.id] = Unfinished(download=download, verified=verified)

        self._kept.change(change)

    def forget(self, id: str) -> None:
        def change(entries: dict[str, Unfinished]) -> None:
            entries.pop(id, None)

        self._kept.change(change)


def was_running(unfinished: Unfinished) -> bool:
    """Whether nobody paused it and nothing stopped it but the end of the program."""
    return unfinished.download.state in RUNNING
