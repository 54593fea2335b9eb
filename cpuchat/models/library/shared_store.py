"""The store of contents that repositories of the Hugging Face cache share: the folder `blobs/` beside them.

Files that came through Xet lie there, and `blobs/` of a repository holds links to them. Which repository needs which
content is noted there too; huggingface_hub is asked, because only it knows how.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path


def freed_by(cache: Path, blobs: Collection[Path]) -> dict[Path, int]:
    """Contents of the store that nothing needs any more once the links `blobs` of repositories are gone, with their
    sizes in bytes."""
    if not blobs:
        return {}
    try:
        from huggingface_hub.utils import _shared_blobs as store  # there is no public way to ask for single files
    except ImportError:  # another release: what it cannot be asked about stays
        return {}
    if not store.is_shared_blobs_dir(store.shared_blobs_dir(cache)):
        return {}
    # As the library writes the names of the links.
    going = {Path(os.path.normpath(cache.absolute()), *blob.parts[-3:]) for blob in blobs}
    contents = {content for blob in going if (content := store.shared_blob_target(blob, cache)) is not None}
    sizes = {
        content: store.expected_shared_blob_freed_size(content, blob_paths_to_delete=going, cache_dir=cache)
        for content in contents
    }
    return {content: size for content, size in sizes.items() if size}


def sweep(cache: Path, contents: Collection[Path]) -> int:
    """Delete those of `contents`, as of `freed_by`, that no link leads to now; returns the bytes that stay."""
    if not contents:
        return 0
    from huggingface_hub.utils import _shared_blobs as store

    sizes = {content: content.stat().st_size for content in contents if content.exists()}
    return sum(size - store.sweep_shared_blob(content, cache_dir=cache) for content, size in sizes.items())
