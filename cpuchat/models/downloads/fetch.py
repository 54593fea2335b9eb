"""Fetches all files of one model, one after the other: space checked, received, hashed, put in their place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from cpuchat.errors import ChecksumMismatch
from cpuchat.models.downloads.hashing import FollowingHash
from cpuchat.models.downloads.hf_cache import (
    add_to_snapshot,
    blob_path,
    bytes_here,
    content_path,
    locked,
    move_to_blob,
    part_path,
    size_of,
    update_main,
)
from cpuchat.models.downloads.progress import Progress
from cpuchat.models.downloads.retrying import with_retries
from cpuchat.models.downloads.space import check_space, write_error
from cpuchat.models.downloads.state import Order
from cpuchat.models.downloads.transfer import transfer
from cpuchat.models.hub import errors
from cpuchat.models.hub.environment import is_offline
from cpuchat.models.hub.repository import HubFile
from cpuchat.models.hub.validation import check_names

T = TypeVar("T")


def fetch_model(order: Order, progress: Progress) -> Path:
    """Download and check all files of a model. Returns the first one, by its name in the cache.

    Raises:
        CpuchatError: that failed; whatever arrived intact is kept.
    """
    check_names(order.repo, order.revision, order.files)
    if is_offline():
        raise errors.offline_mode()
    cache = Path(order.cache)
    here = bytes_here(cache, order.repo, order.files)
    try:
        check_space(cache, sum(file.size for file in order.files) - here, order.reserved)
        named = [_FileFetch(order, file, progress).run() for file in order.files]
        if order.newest_at:
            update_main(cache, order.repo, order.revision, order.newest_at)
    except OSError as error:
        raise write_error(error, cache) from None
    return named[0]


class _FileFetch:
    """The download of one file."""

    def __init__(self, order: Order, file: HubFile, progress: Progress) -> None:
        self._order = order
        self._file = file
        self._progress = progress
        self._cache = Path(order.cache)
        self._part = part_path(self._cache, order.repo, file)
        self._blob = blob_path(self._cache, order.repo, file)

    def run(self) -> Path:
        """Return the file's name in the snapshot."""
        order, file = self._order, self._file
        here = bytes_here(self._cache, order.repo, [file])
        self._progress.begin_file(bytes_here(self._cache, order.repo, order.files) - here, here)
        with locked(self._cache, order.repo, file, self._progress):
            content = self._checked_copy() or self._receive()
            named = add_to_snapshot(self._cache, order.repo, order.revision, file, content)
        if file.etag not in self._progress.verified:
            self._progress.verified.append(file.etag)
        self._progress.finish_file()
        return named

    def _checked_copy(self) -> Path | None:
        """Return the whole file if it is here and correct: the program that wrote it may not have checked it."""
        content = content_path(self._cache, self._order.repo, self._file)
        if content is None:
            return None
        self._progress.here = self._file.size
        if content == self._blob and self._file.etag in self._order.verified:
            return content
        with self._hashing(content) as following:
            return content if self._retry(partial(self._is_correct, following)) else None

    def _receive(self) -> Path:
        """Download the file; returns the blob. Raises ChecksumMismatch when it is wrong a second time."""
        for _ in range(2):
            self._progress.begin_file(self._progress.others, size_of(self._part))
            self._progress.enter("running")
            with self._hashing(self._part) as following:
                self._retry(partial(self._transfer, following))
                if self._retry(partial(self._is_correct, following)):
                    self._retry(partial(move_to_blob, self._part, self._blob))
                    return self._blob
            self._retry(self._part.unlink)
        raise ChecksumMismatch(
            f"{Path(self._file.path).name} failed its checksum twice and was discarded.",
            "Try again later, without a proxy if there is one, or choose another repository.",
        )

    def _transfer(self, following: FollowingHash) -> None:
        def on_written(size: int) -> None:
            following.on_written(size)
            self._progress.here = size

        order, timeout = self._order, self._order.retry_policy.idle_timeout
        transfer(order.repo, order.revision, self._file, self._part, idle_timeout=timeout, on_written=on_written)

    def _retry(self, act: Callable[[], T]) -> T:
        return with_retries(act, self._order, self._progress)

    def _hashing(self, path: Path) -> FollowingHash:
        def on_hashed(count: int) -> None:
            self._progress.hashed = count

        return FollowingHash(path, self._file, on_hashed)

    def _is_correct(self, following: FollowingHash) -> bool:
        """Wait for the hash of the whole file. Raises OSError when the file cannot be read."""
        following.on_written(self._file.size)
        self._progress.enter("checking")
        return following.digest() == self._file.etag
