"""Reads Ollama's stores, and names the files in them.

manifests/HOST/NAMESPACE/MODEL/TAG is JSON whose layer of type `…image.model` names a file of blobs/ by its SHA-256
(docs/faq.md and server/internal/manifest of ollama). `hf.co/…` are other hosts; newer versions write a second tree
beside manifests/.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.base.files import read_small
from cpuchat.base.files import walk as walk_files
from cpuchat.base.text import clean_line

_DEFAULT_HOSTS = ("registry.ollama.ai", "ollama.com")
_HUB_HOSTS = ("hf.co", "huggingface.co")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    """A name in a store. `path` is its file, which may be missing; the others are those of `LocalFile`."""

    path: Path
    alias: str
    repo: str
    projector: Path | None


class _Layer(msgspec.Struct):
    mediaType: str = ""
    digest: str = ""


class _Manifest(msgspec.Struct):
    layers: list[_Layer] = []


def is_content(path: Path) -> bool:
    """Return whether a file is named by its content, so that its name tells nothing."""
    return path.name.startswith("sha256")


@functools.lru_cache(256)
def ollama_name(path: Path) -> str:
    """Return the name by which Ollama keeps a model, whose file has none (`qwen2.5-coder:7b`); "" for others. It is
    read once: lines that are drawn often show it."""
    found = ollama_models(path.parent.parent) if is_content(path) else ()
    return next((model.alias for model in found if model.path == path), "")


def file_name(path: Path) -> str:
    """Return the file's name as messages have it: that of Ollama's for a content of its store."""
    return ollama_name(path) or clean_line(path.name)


def ollama_models(root: Path) -> Iterator[OllamaModel]:
    """Yield the models of the store in this folder, one for each name. Another folder is none."""
    for tree in sorted(root.glob("manifest*")):
        for folder, tags in walk_files(tree):
            for tag in tags:
                model = _ollama_model(root, (*folder.relative_to(tree).parts, tag), folder / tag)
                if model is not None:
                    yield model


def _ollama_model(root: Path, parts: tuple[str, ...], manifest: Path) -> OllamaModel | None:
    """Return what a manifest names; None when it is none, or has no GGUF file, as models on Ollama's servers."""
    if len(parts) < 3 or parts[-1].startswith("."):
        return None
    try:
        layers = msgspec.json.decode(read_small(manifest), type=prepared(_Manifest)).layers
    except (OSError, ValueError, RecursionError):  # not JSON, not UTF-8, or too deep
        return None
    contents = {one.mediaType.rpartition(".")[2]: _DIGEST.fullmatch(one.digest) for one in reversed(layers)}
    if (found := contents.get("model")) is None:
        return None
    host, *owner, model, tag = parts
    is_default = host in _DEFAULT_HOSTS
    prefix = () if is_default and owner == ["library"] else owner if is_default else (host, *owner)
    projector = contents.get("projector")
    return OllamaModel(
        path=_blob(root, found[1]),
        alias=clean_line(f"{'/'.join((*prefix, model))}:{tag}"),
        repo="/".join((*owner, model)) if host in _HUB_HOSTS else "",
        projector=_blob(root, projector[1]) if projector is not None else None,
    )


def _blob(root: Path, sha256: str) -> Path:
    older = root / "blobs" / f"sha256:{sha256}"  # before 0.1.30
    return older if older.exists() else root / "blobs" / f"sha256-{sha256}"
