"""Where a download lies in the Hugging Face cache while it is on its way.

`models--OWNER--NAME/blobs/ETAG` is a file's content, `ETAG.incomplete` the beginning of it, from its first byte on:
huggingface_hub before 1.0 named and resumed them so, too. Since then it calls its own `ETAG.RANDOM.incomplete` and
never comes back to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from cpuchat.models.hub.names import checked_etag
from cpuchat.models.hub.repository import HubFile
from cpuchat.models.library.places import INCOMPLETE, repo_folder


def blob_path(cache: Path, repo: str, file: HubFile) -> Path:
    """Where the whole content belongs.

    Raises:
        HubError: what the hub announced as its hash is none, so it makes no file name.
    """
    return repo_folder(cache, repo) / "blobs" / checked_etag(file.etag)


def part_path(cache: Path, repo: str, file: HubFile) -> Path:
    """Where its beginning is kept. Raises HubError as `blob_path` does."""
    blob = blob_path(cache, repo, file)
    return blob.with_name(blob.name + INCOMPLETE)


def size_of(path: Path) -> int:
    """Bytes of a file; 0 when there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def bytes_here(cache: Path, repo: str, files: Iterable[HubFile]) -> int:
    """How much of these files is on the disk already, finished or not. Raises HubError as `blob_path` does."""
    return sum(_here(cache, repo, file) for file in files)


def content_path(cache: Path, repo: str, file: HubFile) -> Path | None:
    """Where all of it lies, unchecked: the blob, or a file of a snapshot, where the cache is without links; else None.
    Raises HubError as `blob_path` does."""
    blob = blob_path(cache, repo, file)
    if blob.is_file() and size_of(blob) == file.size:
        return blob
    try:
        snapshots = list((repo_folder(cache, repo) / "snapshots").iterdir())
    except OSError:
        return None
    copies = (snapshot / file.path for snapshot in snapshots)
    return next((copy for copy in copies if _is_file(copy) and size_of(copy) == file.size), None)


def _is_file(path: Path) -> bool:
    """Whether it is a file and no link to one."""
    return path.is_file() and not path.is_symlink()


def _here(cache: Path, repo: str, file: HubFile) -> int:
    if content_path(cache, repo, file) is not None:
        return file.size
    return min(size_of(part_path(cache, repo, file)), file.size)
