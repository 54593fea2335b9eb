"""Models as they lie in caches and folders."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import gguf as reference
import numpy as np
from huggingface_hub.utils._shared_blobs import publish_blob_to_shared_store, try_link_from_shared_store

from cpuchat.models.library.places import linked
from tests.support.tiny_gguf import finish

REVISIONS = ("a" * 40, "b" * 40)


def cached(
    cache: Path, repo: str, name: str, source: Path, revision: str = REVISIONS[0], main: bool = True, tail: str = "name"
) -> Path:
    """Put `source` into the cache as a download does: a blob named by its hash, and a link to it. `tail` is put at the
    end of the content, where no reader of models looks: same tail, same blob."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    content = source.read_bytes() + (name + revision if tail == "name" else tail).encode()
    blob = folder / "blobs" / hashlib.sha256(content).hexdigest()
    link = folder / "snapshots" / revision / name
    for parent in (blob.parent, link.parent, folder / "refs"):
        parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    link.symlink_to(os.path.relpath(blob, link.parent))
    if main:
        (folder / "refs" / "main").write_text(revision)
    return link


def share(link: Path, xet_hash: str) -> Path:
    """Move the content of a file of the cache into the store that repositories share, as huggingface_hub does."""
    blob, size = linked(link), link.stat().st_size
    cache = blob.parents[2]
    arguments = {"blob_path": str(blob), "xet_hash": xet_hash, "cache_dir": cache, "expected_size": size}
    if not try_link_from_shared_store(**arguments):
        publish_blob_to_shared_store(**arguments)
    return cache / "blobs" / xet_hash[:2] / xet_hash


def part(path: Path, no: int, count: int) -> Path:
    """Write one part of a split model."""
    writer = reference.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", count)
    writer.add_block_count(1)
    writer.add_tensor(f"blk.0.part{no}.weight", np.zeros((4, 32), np.float32))
    finish(writer)
    return path
