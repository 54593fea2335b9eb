"""Downloads that are not done, kept on the disk: the next run goes on with them, whatever ended this one."""

from __future__ import annotations

from cpuchat import paths
from cpuchat.files import JsonCache
from cpuchat.models.downloads.state import RUNNING, Download
from cpuchat.models.hub.repository import Data

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
        self._cache = JsonCache(
            paths.downloads_file(), Unfinished, version=_VERSION, max_entries=_MOST, max_bytes=_MAX_BYTES
        )

    def read(self) -> list[Unfinished]:
        """The oldest first; empty when the file is damaged."""
        return list(self._cache.read().values())

    def find(self, id: str) -> Unfinished | None:
        return self._cache.read().get(id)

    def write(self, download: Download, verified: tuple[str, ...]) -> None:
        """Remember it, or forget it when it is done."""
        if download.state == "done":
            self.forget(download.id)
        else:
            unfinished = Unfinished(download=download, verified=verified)
            self._cache.update(lambda entries: entries.update({download.id: unfinished}))

    def forget(self, id: str) -> None:
        self._cache.remove(id)


def was_running(unfinished: Unfinished) -> bool:
    """Whether nobody paused it and nothing stopped it but the end of the program."""
    return unfinished.download.state in RUNNING
