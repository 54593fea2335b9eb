"""The files of a download in the Hugging Face cache: partial file, lock, blob, name in a snapshot, disk space.

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
from dataclasses import dataclass
from pathlib import Path

from cpuchat.base.errors import CpuchatError, DiskFull, DownloadFailed
from cpuchat.base.files import write_atomically
from cpuchat.base.paths import shown
from cpuchat.models.downloads.state import DownloadProgress
from cpuchat.models.fit import gigabytes
from cpuchat.models.hub.errors import is_set
from cpuchat.models.hub.repository import HubFile
from cpuchat.models.library.places import INCOMPLETE, repo_folder

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_ELSEWHERE = "set HF_HUB_CACHE to a folder on another disk."


def check_space(cache: Path, missing: int, reserved: int) -> None:
    """Raise DiskFull when `missing` bytes do not fit beside the `reserved` ones of other downloads."""
    folder = next(one for one in (cache, *cache.parents) if one.exists())
    free = shutil.disk_usage(folder).free
    if not missing or missing + reserved <= free:
        return
    others = f" and {gigabytes(reserved)} GB for other downloads" if reserved else ""
    raise DiskFull(
        f"Not enough disk space: {gigabytes(missing)} GB needed{others}, {gigabytes(free)} GB free in {shown(cache)}.",
        f"Delete models you don't use (`cpuchat models delete`), or {_ELSEWHERE}",
    )


def write_error(error: OSError, cache: Path, missing: int = 0) -> CpuchatError:
    """Return the typed error for a failed write to the cache, with `missing` bytes still to download."""
    if error.errno in _NO_SPACE:
        still = f", {gigabytes(missing)} GB still to download" if missing else ""
        return DiskFull(f"Disk full: {shown(cache)}{still}.", "Free some space, then resume: the partial file is kept.")
    if error.errno == errno.EFBIG:  # FAT ends at 4 GB
        limit = f"The file is too large for the file system of {shown(cache)}."
        return DiskFull(limit, f"Raise the file size limit, or {_ELSEWHERE}")
    where = shown(Path(error.filename or cache))
    return DownloadFailed(
        f"Cannot write {where}: {error.strerror}.",
        "Check that folder, or set HF_HUB_CACHE to another one; then resume.",
    )


_POLL_SECONDS = 0.2
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors of file systems without symbolic links."""


def size_of(path: Path) -> int:
    """Return the size of a file in bytes; 0 when there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def bytes_here(cache: Path, repo: str, files: Iterable[HubFile]) -> int:
    """Return how many bytes of these files are on the disk, finished or not."""
    return sum(CachedFile(cache, repo, file).here for file in files)


@dataclass(frozen=True)
class CachedFile:
    """A file of a repository in the cache, which has passed `check_names`: its hash becomes a file name."""

    cache: Path
    repo: str
    file: HubFile

    @property
    def snapshots(self) -> Path:
        return repo_folder(self.cache, self.repo) / "snapshots"

    @property
    def blob(self) -> Path:
        """Return where the whole content belongs."""
        return repo_folder(self.cache, self.repo) / "blobs" / self.file.etag

    @property
    def part(self) -> Path:
        """Return where the partial file is kept."""
        return self.blob.with_name(self.blob.name + INCOMPLETE)

    @property
    def here(self) -> int:
        """Return how many bytes of it are on the disk."""
        return self.file.size if self.content is not None else min(size_of(self.part), self.file.size)

    @property
    def content(self) -> Path | None:
        """Return the whole file, not yet checked: its blob, or a copy in a snapshot where the cache has no links."""
        if self.blob.is_file() and size_of(self.blob) == self.file.size:
            return self.blob
        try:
            copies = [snapshot / self.file.path for snapshot in self.snapshots.iterdir()]
        except OSError:
            return None
        whole = (copy for copy in copies if copy.is_file() and not copy.is_symlink())
        return next((copy for copy in whole if size_of(copy) == self.file.size), None)

    def lock(self) -> AbstractContextManager[object]:
        """Return the lock of huggingface_hub. Entering it raises TimeoutError while another program holds it."""
        from huggingface_hub.utils import WeakFileLock

        lock = self.cache / ".locks" / repo_folder(self.cache, self.repo).name / f"{self.file.etag}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        return WeakFileLock(lock, timeout=_POLL_SECONDS)

    @contextmanager
    def locked(self, progress: DownloadProgress) -> Iterator[None]:
        """Hold the lock that every huggingface_hub takes for this file; it ends with its process. While another program
        holds it, the state is `waiting`, and `here` follows what that program has written. Raises DownloadFailed: the
        cache cannot be written."""
        busy = DownloadFailed("Another program is downloading this file.", "Continues when it has finished.")
        with ExitStack() as held:
            while True:
                try:
                    held.enter_context(self.lock())
                    break
                except TimeoutError:
                    progress.here[self.file.etag] = size_of(self.part)
                    progress.enter("waiting", error=busy)
                except OSError as error:
                    raise write_error(error, self.cache) from None
            progress.enter("running")
            yield

    def move_to_blob(self) -> None:
        """Sync the checked partial file to the disk and rename it to its blob. Raises OSError; the file stays then."""
        with self.part.open("rb") as file:
            os.fsync(file.fileno())
        self.part.replace(self.blob)

    def add_to_snapshot(self, revision: str, content: Path) -> Path:
        """Give the checked `content` its name in the snapshot of `revision`, a commit; returns that path.

        As huggingface_hub does it: a relative link to the blob. Where links are impossible (FAT, some network file
        systems) or `HF_HUB_DISABLE_SYMLINKS` is set, the blob itself is moved there, or copied if other snapshots link
        to it. Raises OSError: that failed; the content stays."""
        named = self.snapshots / revision / self.file.path
        if named.exists() and named.samefile(content):
            return named
        named.parent.mkdir(parents=True, exist_ok=True)
        fresh = named.parent / f".{self.file.etag}"  # renamed in one step: others may read the cache
        fresh.unlink(missing_ok=True)
        is_blob, is_linked = content == self.blob, False
        try:
            if is_blob and not is_set("HF_HUB_DISABLE_SYMLINKS"):
                try:
                    fresh.symlink_to(os.path.relpath(content, fresh.parent))
                    is_linked = True
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
            if is_blob and not is_linked and not self.links():
                return content.replace(named)
            if not is_linked:
                shutil.copyfile(content, fresh)
            return fresh.replace(named)
        finally:
            fresh.unlink(missing_ok=True)

    def links(self) -> list[Path]:
        """Return the links of all snapshots that lead to its blob."""
        if not self.blob.is_file():
            return []
        content = self.blob.resolve()
        return [path for path in self.snapshots.rglob("*") if path.is_symlink() and path.resolve() == content]


def update_main(cache: Path, repo: str, revision: str, newest_at: float) -> None:
    """Point `refs/main` to `revision`, the newest commit at `newest_at` (seconds since 1970). Not if another program
    has written it since: that has seen the same or a newer state. Raises OSError: that failed."""
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
    that was complete before it was requested again."""
    links = {file: file.links() for file in (CachedFile(cache, repo, file) for file in files)}
    is_complete = all(links.values())
    for file, names in links.items():
        with suppress(OSError), file.lock():
            file.part.unlink(missing_ok=True)
            inside = {path.relative_to(file.snapshots).as_posix().partition("/")[2] for path in names}
            if inside <= {file.file.path} and not is_complete:
                for path in (*names, file.blob):
                    path.unlink(missing_ok=True)
