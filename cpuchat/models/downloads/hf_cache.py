"""The files of a download in the Hugging Face cache: partial file, lock, blob, name in a snapshot, `refs/main`.

Locks, links and references are those of huggingface_hub, so that its programs can use the same cache at the same time.
`models--OWNER--NAME/blobs/ETAG` is a file's content, `ETAG.incomplete` the beginning of it: huggingface_hub before 1.0
named and resumed partial files so, too. Since then it calls its own `ETAG.RANDOM.incomplete` and never resumes them.
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
from cpuchat.models.downloads.progress import Progress
from cpuchat.models.downloads.space import write_error
from cpuchat.models.hub.environment import is_set
from cpuchat.models.hub.repository import HubFile
from cpuchat.models.hub.validation import checked_etag
from cpuchat.models.library.places import INCOMPLETE, repo_folder

_POLL_SECONDS = 0.2
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors of file systems without symbolic links."""


def blob_path(cache: Path, repo: str, file: HubFile) -> Path:
    """Return where the whole content belongs.

    Raises:
        HubError: the etag that the hub announced is not a hash, so it must not become a file name.
    """
    return repo_folder(cache, repo) / "blobs" / checked_etag(file.etag)


def part_path(cache: Path, repo: str, file: HubFile) -> Path:
    """Return where the partial file is kept. Raises HubError as `blob_path`."""
    blob = blob_path(cache, repo, file)
    return blob.with_name(blob.name + INCOMPLETE)


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 when there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def bytes_here(cache: Path, repo: str, files: Iterable[HubFile]) -> int:
    """Return how many bytes of these files are on the disk, finished or not. Raises HubError as `blob_path`."""

    def here(file: HubFile) -> int:
        whole = content_path(cache, repo, file) is not None
        return file.size if whole else min(size_of(part_path(cache, repo, file)), file.size)

    return sum(map(here, files))


def content_path(cache: Path, repo: str, file: HubFile) -> Path | None:
    """Return the whole file, not yet checked: its blob, or a copy in a snapshot where the cache has no links.

    Raises HubError as `blob_path`.
    """
    blob = blob_path(cache, repo, file)
    if blob.is_file() and size_of(blob) == file.size:
        return blob
    try:
        snapshots = list((repo_folder(cache, repo) / "snapshots").iterdir())
    except OSError:
        return None
    copies = (snapshot / file.path for snapshot in snapshots)
    return next((c for c in copies if c.is_file() and not c.is_symlink() and size_of(c) == file.size), None)


@contextmanager
def locked(cache: Path, repo: str, file: HubFile, progress: Progress) -> Iterator[None]:
    """Hold the lock that every huggingface_hub takes for this file; it ends with its process.

    While another program holds it, the state is `waiting`, and `here` follows what that program has written.

    Raises:
        DownloadFailed: the cache cannot be written.
    """
    part = part_path(cache, repo, file)
    busy = DownloadFailed("Another program is downloading this file.", "Continues when it has finished.")
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
    """Return the lock of huggingface_hub. Entering it raises TimeoutError while another program holds it."""
    from huggingface_hub.utils import WeakFileLock

    lock = cache / ".locks" / repo_folder(cache, repo).name / f"{file.etag}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    return WeakFileLock(lock, timeout=_POLL_SECONDS)


def move_to_blob(part: Path, blob: Path) -> None:
    """Sync a checked partial file to the disk and rename it to its blob.

    Raises:
        OSError: that failed; the partial file stays.
    """
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(blob)


def add_to_snapshot(cache: Path, repo: str, revision: str, file: HubFile, content: Path) -> Path:
    """Give the checked `content` its name in the snapshot of `revision`, a commit; returns that path.

    As huggingface_hub does it: a relative link to the blob. Where links are impossible (FAT, some network file systems)
    or `HF_HUB_DISABLE_SYMLINKS` is set, the blob itself is moved there, or copied if other snapshots link to it.

    Raises:
        OSError: that failed; the content stays.
    """
    snapshots = repo_folder(cache, repo) / "snapshots"
    named = snapshots / revision / file.path
    if named.exists() and named.samefile(content):
        return named
    named.parent.mkdir(parents=True, exist_ok=True)
    fresh = named.parent / f".{file.etag}.{os.getpid()}"  # renamed in one step: others may read the cache
    fresh.unlink(missing_ok=True)
    is_blob = content == blob_path(cache, repo, file)
    try:
        if not (is_blob and _link(content, fresh)):
            if is_blob and not _links_to(content, snapshots):
                return content.replace(named)
            shutil.copyfile(content, fresh)
        return fresh.replace(named)
    finally:
        fresh.unlink(missing_ok=True)


def _link(blob: Path, link: Path) -> bool:
    """Create a relative link; False where that is impossible or not wanted."""
    if is_set("HF_HUB_DISABLE_SYMLINKS"):
        return False
    try:
        link.symlink_to(os.path.relpath(blob, link.parent))
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    return True


def update_main(cache: Path, repo: str, revision: str, newest_at: float) -> None:
    """Point `refs/main` to `revision`, the newest commit at `newest_at` (seconds since 1970).

    Not if another program has written it since: that has seen the same or a newer state.

    Raises:
        OSError: that failed.
    """
    reference = repo_folder(cache, repo) / "refs" / "main"
    try:
        if reference.stat().st_mtime > newest_at or reference.read_bytes() == revision.encode():
            return
    except FileNotFoundError:
        pass
    write_atomically(reference, revision, mode=0o644)


def discard(cache: Path, repo: str, files: Iterable[HubFile]) -> None:
    """Delete what there is of a model that was never complete: partial files, and files that are finished.

    What another program is downloading stays, and so does content that has other names in the cache, and all of a model
    that was complete before it was requested again.
    """
    snapshots = repo_folder(cache, repo) / "snapshots"
    links = {file: _links_to(blob_path(cache, repo, file), snapshots) for file in files}
    is_complete = all(links.values())
    for file, names in links.items():
        with suppress(OSError), _lock(cache, repo, file):
            part_path(cache, repo, file).unlink(missing_ok=True)
            mine = all(path.relative_to(snapshots).as_posix().partition("/")[2] == file.path for path in names)
            if mine and not is_complete:
                for path in (*names, blob_path(cache, repo, file)):
                    path.unlink(missing_ok=True)


def _links_to(blob: Path, snapshots: Path) -> list[Path]:
    """Return the links of all snapshots that lead to this content."""
    if not blob.is_file():
        return []
    return [path for path in snapshots.rglob("*") if path.is_symlink() and path.resolve() == blob.resolve()]
