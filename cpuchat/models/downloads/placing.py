"""A file's place in the Hugging Face cache: the lock around it, the move there, the links that name it.

The locks, links and references are as those of huggingface_hub, so that its programs and this one can use one cache at
the same time.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from cpuchat.errors import DownloadFailed
from cpuchat.files import write_atomically
from cpuchat.models.downloads.layout import blob_path, part_path, size_of
from cpuchat.models.downloads.progress import Progress
from cpuchat.models.downloads.space import write_error
from cpuchat.models.hub.environment import is_set
from cpuchat.models.hub.repository import HubFile
from cpuchat.models.library.places import repo_folder

_LOOK_SECONDS = 0.2
_BRANCH = "main"
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""What file systems without symbolic links say when one is to be made."""


@contextmanager
def locked(cache: Path, repo: str, file: HubFile, progress: Progress) -> Iterator[None]:
    """Holds the lock that every huggingface_hub takes for this file; the lock ends with whoever holds it.

    While another program has it, the state is `waiting`, and `here` follows what that one has written.

    Raises:
        DownloadFailed: the cache cannot be written.
    """
    part = part_path(cache, repo, file)
    busy = DownloadFailed("Another program downloads this file.", "This goes on by itself when that one ends.")
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(_lock(cache, repo, file))
                break
            except TimeoutError:
                progress.here = size_of(part)
                progress.enter("waiting", error=busy)
            except OSError as error:
                raise write_error(error, cache) from None
        progress.enter("running")
        yield


def _lock(cache: Path, repo: str, file: HubFile) -> AbstractContextManager[object]:
    """The lock of huggingface_hub. Entering it raises TimeoutError when another program has it."""
    from huggingface_hub.utils import WeakFileLock

    lock = cache / ".locks" / repo_folder(cache, repo).name / f"{file.etag}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    return WeakFileLock(lock, timeout=_LOOK_SECONDS)


def place(part: Path, blob: Path) -> None:
    """Move a checked file to its place, in one step, after it has reached the disk.

    Raises:
        OSError: that failed; the part stays.
    """
    handle = os.open(part, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    part.replace(blob)


def name(cache: Path, repo: str, revision: str, file: HubFile, content: Path) -> Path:
    """Give the checked `content` its name in the snapshot of `revision`, a commit; returns that.

    As huggingface_hub lays out its cache: a relative link to the blob. Where links are impossible (FAT, some network
    file systems) or `HF_HUB_DISABLE_SYMLINKS` is set, the blob itself moves there, or a copy of it if it has other
    names. Nothing is asked of the hub: what was checked is what gets the name.

    Raises:
        OSError: that failed; the content stays.
    """
    snapshots = repo_folder(cache, repo) / "snapshots"
    named = snapshots / revision / file.path
    if named.exists() and named.samefile(content):
        return named
    named.parent.mkdir(parents=True, exist_ok=True)
    fresh = named.parent / f".{file.etag}.{os.getpid()}"  # in one step to its name: others may read the cache
    fresh.unlink(missing_ok=True)
    is_blob = content == blob_path(cache, repo, file)
    try:
        if not (is_blob and _link(content, fresh)):
            if is_blob and not _names(snapshots, content):
                return content.replace(named)
            shutil.copyfile(content, fresh)
        return fresh.replace(named)
    finally:
        fresh.unlink(missing_ok=True)


def _link(blob: Path, link: Path) -> bool:
    """Make a relative link; False where that is impossible or not wanted."""
    if is_set("HF_HUB_DISABLE_SYMLINKS"):
        return False
    try:
        link.symlink_to(os.path.relpath(blob, link.parent))
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    return True


def point_main(cache: Path, repo: str, revision: str, newest_at: float) -> None:
    """Have `refs/main` name `revision`, which was the newest commit at `newest_at` (seconds since 1970).

    Unless somebody has written it since: that one has seen a newer state of the hub, or the same.

    Raises:
        OSError: that failed.
    """
    reference = repo_folder(cache, repo) / "refs" / _BRANCH
    try:
        if reference.stat().st_mtime > newest_at or reference.read_bytes() == revision.encode():
            return
    except FileNotFoundError:
        pass
    write_atomically(reference, revision, mode=0o644)


def discard(cache: Path, repo: str, files: Iterable[HubFile]) -> None:
    """Delete what there is of a model that never became whole: the beginnings of files, and files that are finished.

    What another program downloads at the moment stays, and so does content that other names in the cache stand for,
    and all of a model that was whole before somebody asked for it again.
    """
    snapshots = repo_folder(cache, repo) / "snapshots"
    named = {file: _names(snapshots, blob_path(cache, repo, file)) for file in files}
    is_whole = all(named.values())
    for file, names in named.items():
        with suppress(OSError), _lock(cache, repo, file):
            part_path(cache, repo, file).unlink(missing_ok=True)
            mine = all(path.relative_to(snapshots).as_posix().partition("/")[2] == file.path for path in names)
            if mine and not is_whole:
                for path in (*names, blob_path(cache, repo, file)):
                    path.unlink(missing_ok=True)


def _names(snapshots: Path, blob: Path) -> list[Path]:
    """The links that stand for this content."""
    if not blob.is_file():
        return []
    return [path for path in snapshots.rglob("*") if path.is_symlink() and path.resolve() == blob.resolve()]
