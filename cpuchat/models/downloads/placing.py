"""A file's place in the Hugging Face cache: the lock around it, the move there, the links that name it.

The locks, links and references are those of huggingface_hub, so that its programs and this one can use one cache at
the same time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from cpuchat.errors import DownloadFailed, HubError
from cpuchat.models.downloads.layout import blob_path, part_path, size_of
from cpuchat.models.downloads.progress import Progress
from cpuchat.models.downloads.space import write_error
from cpuchat.models.hub.environment import endpoint, host
from cpuchat.models.hub.repository import HubFile
from cpuchat.models.library.places import repo_folder

_LOOK_SECONDS = 0.2
_BRANCH = "main"


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


def link(cache: Path, repo: str, revision: str, file: HubFile) -> Path:
    """Have huggingface_hub name the blob in the snapshot of `revision`, a commit; nothing is downloaded.

    While that commit is the newest one, `refs/main` is set to it, too.

    Raises:
        HubError: the hub has changed its mind about this file.
        What huggingface_hub raises: see `errors.translate`.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import RemoteEntryNotFoundError, RevisionNotFoundError

    try:
        named = _BRANCH
        facts = get_hf_file_metadata(hf_hub_url(repo, file.path, revision=_BRANCH, endpoint=endpoint()))
    except (RemoteEntryNotFoundError, RevisionNotFoundError):
        facts = None
    if facts is None or facts.commit_hash != revision:
        named = revision
        facts = get_hf_file_metadata(hf_hub_url(repo, file.path, revision=revision, endpoint=endpoint()))
    if facts.etag != file.etag:
        raise HubError(f"{host()} offers another {file.path} than it listed.", "Try again.")
    return Path(hf_hub_download(repo, file.path, revision=named, cache_dir=cache, endpoint=endpoint()))


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
