"""All files of one model, one after the other: found room for, received, checked, put in their place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from cpuchat.errors import ChecksumMismatch
from cpuchat.models.downloads.hashing import FollowingHash
from cpuchat.models.downloads.layout import blob_path, bytes_here, content_path, part_path, size_of
from cpuchat.models.downloads.placing import locked, name, place, point_main
from cpuchat.models.downloads.progress import Progress
from cpuchat.models.downloads.retrying import with_retries
from cpuchat.models.downloads.space import check_space, write_error
from cpuchat.models.downloads.transfer import transfer
from cpuchat.models.downloads.wire import Order
from cpuchat.models.hub import errors
from cpuchat.models.hub.environment import is_offline
from cpuchat.models.hub.names import check_names
from cpuchat.models.hub.repository import HubFile

T = TypeVar("T")


def fetch_model(order: Order, progress: Progress) -> Path:
    """Download and check all files of a model. Returns the first one, as it is named in the cache.

    Raises:
        CpuchatError: it cannot be had; what arrived and was not wrong is kept.
    """
    check_names(order.repo, order.revision, order.files)
    if is_offline():
        raise errors.offline_mode()
    cache = Path(order.cache)
    here = bytes_here(cache, order.repo, order.files)
    try:
        check_space(cache, sum(file.size for file in order.files) - here, order.reserved)
        named = [_File(order, file, progress).fetch() for file in order.files]
        if order.newest_at:
            point_main(cache, order.repo, order.revision, order.newest_at)
    except OSError as error:
        raise write_error(error, cache) from None
    return named[0]


class _File:
    """One file on its way through all of it."""

    def __init__(self, order: Order, file: HubFile, progress: Progress) -> None:
        self._order = order
        self._file = file
        self._progress = progress
        self._cache = Path(order.cache)
        self._part = part_path(self._cache, order.repo, file)
        self._blob = blob_path(self._cache, order.repo, file)

    def fetch(self) -> Path:
        here = bytes_here(self._cache, self._order.repo, [self._file])
        self._progress.begin_file(bytes_here(self._cache, self._order.repo, self._order.files) - here, here)
        with locked(self._cache, self._order.repo, self._file, self._progress):
            content = self._in_place() or self._receive()
            named = name(self._cache, self._order.repo, self._order.revision, self._file, content)
        if self._file.etag not in self._progress.verified:
            self._progress.verified.append(self._file.etag)
        self._progress.finish_file()
        return named

    def _in_place(self) -> Path | None:
        """The whole file, if it is here and is what it should be: who put it there may not have looked."""
        content = content_path(self._cache, self._order.repo, self._file)
        if content is None:
            return None
        self._progress.here = self._file.size
        if content == self._blob and self._file.etag in self._order.verified:
            return content
        with self._hashing(content) as following:
            return content if self._patiently(partial(self._is_right, following)) else None

    def _receive(self) -> Path:
        """Returns the blob. Raises ChecksumMismatch when it is wrong a second time."""
        for _ in range(2):
            self._progress.begin_file(self._progress.others, size_of(self._part))
            self._progress.enter("running")
            with self._hashing(self._part) as following:
                self._patiently(partial(self._transfer, following))
                if self._patiently(partial(self._is_right, following)):
                    self._patiently(partial(place, self._part, self._blob))
                    return self._blob
            self._patiently(self._part.unlink)
        raise ChecksumMismatch(
            f"{Path(self._file.path).name} arrived twice with other content than the hub announced.",
            "It was thrown away. Try again later, without a proxy if there is one; or choose another repository.",
        )

    def _transfer(self, following: FollowingHash) -> None:
        def grown(size: int) -> None:
            following.grown(size)
            self._progress.here = size

        silence = self._order.patience.silence
        transfer(self._order.repo, self._order.revision, self._file, self._part, silence=silence, grown=grown)

    def _patiently(self, act: Callable[[], T]) -> T:
        return with_retries(act, self._order, self._progress)

    def _hashing(self, path: Path) -> FollowingHash:
        def hashed(count: int) -> None:
            self._progress.hashed = count

        return FollowingHash(path, self._file, hashed)

    def _is_right(self, following: FollowingHash) -> bool:
        """Waits for the hash of the whole file. Raises OSError when the file cannot be read."""
        following.grown(self._file.size)
        self._progress.enter("checking")
        return following.digest() == self._file.etag
