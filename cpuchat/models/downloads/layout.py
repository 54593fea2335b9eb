"""Where a download lies in the Hugging Face cache while it is on its way.

`models--OWNER--NAME/blobs/ETAG` is a file's content, `ETAG.incomplete` the beginning of it, from its first byte on:
huggingface_hub before 1.0 named and resumed them so, too. Since then it calls its own `ETAG.RANDOM.incomplete` and
never comes back to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from cpuchat.errors import HubError
from cpuchat.models.hub.repository import HubFile
from cpuchat.models.library.places import INCOMPLETE, repo_folder

_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def blob_path(cache: Path, repo: str, file: HubFile) -> Path:
    """Where the whole content belongs.

    Raises:
        HubError: what the hub announced as its hash is none, so it makes no file name.
    """
    if _ETAG.fullmatch(file.etag) is None:
        raise HubError("The hub announced no hash for this file.", "Try again later, or choose another repository.")
    return repo_folder(cache, repo) / "blobs" / file.etag


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


def _here(cache: Path, repo: str, file: HubFile) -> int:
    if size_of(blob_path(cache, repo, file)) == file.size:
        return file.size
    return min(size_of(part_path(cache, repo, file)), file.size)
