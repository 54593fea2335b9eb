"""All files of one model, one after the other: found room for, received, checked, put in their place."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from cpuchat.errors import ChecksumMismatch, HubError, UsageError
from cpuchat.models.downloads.hashing import FollowingHash
from cpuchat.models.downloads.layout import blob_path, bytes_here, part_path, size_of
from cpuchat.models.downloads.placing import link, locked, place
from cpuchat.models.downloads.progress import Progress
from cpuchat.models.downloads.retrying import with_retries
from cpuchat.models.downloads.space import check_space, write_error
from cpuchat.models.downloads.transfer import transfer
from cpuchat.models.downloads.wire import Order
from cpuchat.models.hub import errors
from cpuchat.models.hub.environment import is_offline
from cpuchat.models.hub.listing import safe_path
from cpuchat.models.hub.repository import HubFile

T = TypeVar("T")

_REPO = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def check_names(repo: str, revision: str, files: tuple[HubFile, ...]) -> None:
    """Everything that becomes the name of a file or a folder.

    Raises:
        UsageError: the repository or the revision is none.
        HubError: a file has a name that leads out of its folder, no hash, or no size.
    """
    if _REPO.fullmatch(repo) is None or ".." in repo or "--" in repo:
        raise UsageError(f"{repo!r} is no repository.", "Write it as OWNER/NAME.")
    if _COMMIT.fullmatch(revision) is None:
        raise UsageError(f"{revision!r} is no commit.", "Ask the hub for the repository's newest one.")
    for file in files:
        safe_path(file.path)
        blob_path(Path(), repo, file)
        if file.size < 0:
            raise HubError(f"The hub announced no size for {file.path}.", "Choose another file.")


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
            if not self._is_in_place():
                self._receive()
        if self._file.etag not in self._progress.verified:
            self._progress.verified.append(self._file.etag)
        named = self._patiently(partial(link, self._cache, self._order.repo, self._order.revision, self._file))
        self._progress.finish_file()
        return named

    def _is_in_place(self) -> bool:
        """Whether the whole file is there and is what it should be: who put it there may not have looked."""
        if not self._blob.is_file() or size_of(self._blob) != self._file.size:
            return False
        self._progress.here = self._file.size
        if self._file.etag in self._order.verified:
            return True
        with self._hashing(self._blob) as following:
            return self._patiently(partial(self._is_right, following))

    def _receive(self) -> None:
        """Raises ChecksumMismatch when it is wrong a second time."""
        for _ in range(2):
            self._progress.begin_file(self._progress.others, size_of(self._part))
            self._progress.enter("running")
            with self._hashing(self._part) as following:
                self._patiently(partial(self._transfer, following))
                if self._patiently(partial(self._is_right, following)):
                    self._patiently(partial(place, self._part, self._blob))
                    return
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
