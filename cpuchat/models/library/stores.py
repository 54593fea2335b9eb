"""Finds the models that other programs keep: Ollama, LM Studio and llama.cpp. Nothing there is ever changed.

- Ollama: manifests/HOST/NAMESPACE/MODEL/TAG is JSON whose layer of type `…image.model` names a file of blobs/ by
  its SHA-256 (docs/faq.md and server/internal/manifest of ollama). The installer's service keeps them in the home of
  the user `ollama`, packages of distributions in /var/lib/ollama. `hf.co/…` are other hosts; newer versions write a
  second tree beside manifests/.
- LM Studio: PUBLISHER/REPOSITORY/FILE.gguf below its folder, which its settings may have moved.
- llama.cpp: OWNER_REPOSITORY_FILE.gguf beside manifest=OWNER=REPOSITORY=TAG.json; newer versions use the Hugging
  Face cache, or make one of LLAMA_CACHE (common/download.cpp and common/hf-cache.cpp of llama.cpp).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from cpuchat.base import paths
from cpuchat.base.decoding import prepared
from cpuchat.base.files import read_small, walk
from cpuchat.base.text import clean_line

Store = Literal["ollama", "lmstudio", "llama.cpp"]
Source = Literal["demo", "huggingface", "folder"] | Store
STORES: dict[Store, str] = {"ollama": "Ollama", "lmstudio": "LM Studio", "llama.cpp": "llama.cpp"}
"""What people call these programs."""

_OLLAMA_SERVICES = ("/usr/share/ollama/.ollama/models", "/var/lib/ollama/models", "/var/lib/ollama")
_DEFAULT_HOSTS = ("registry.ollama.ai", "ollama.com")
_HUB_HOSTS = ("hf.co", "huggingface.co")
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_MANIFEST = re.compile(r"manifest=([^=]+)=([^=]+)=.*\.json")


class _Layer(msgspec.Struct):
    mediaType: str = ""
    digest: str = ""


class _Manifest(msgspec.Struct):
    layers: list[_Layer] = []


class _Settings(msgspec.Struct):
    downloadsFolder: str = ""


class LocalFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that may be a model. `root` is the folder under which it was found: nothing outside is ever deleted.

    `alias` is the name that Ollama lists (`qwen2.5-coder:7b`), or that of a demo model; `repo` "owner/name" on Hugging
    Face, where that is known. Of Ollama's, the file may be missing.
    """

    path: Path
    source: Source
    root: Path
    repo: str = ""
    alias: str = ""
    projector: Path | None = None

    @property
    def name_in_repo(self) -> str:
        """`Q8_0/m.gguf` for a file in the Hugging Face cache, whatever its revision."""
        if self.source != "huggingface":
            return self.path.name
        return str(Path(*self.path.relative_to(self.root / "snapshots").parts[1:]))


def ollama_stores() -> list[Path]:
    """Return the folders that may hold manifests and blobs, whether they exist or not."""
    named = os.environ.get("OLLAMA_MODELS")
    folders = [paths.expanded(named)] if named else [paths.expanded("~/.ollama/models")]
    return [*folders, *map(Path, _OLLAMA_SERVICES)]


def ollama_models(roots: Iterable[Path]) -> Iterator[LocalFile]:
    """Yield the models of the stores in these folders, one for each name. Other folders are none."""
    for root in roots:
        for tree in sorted(root.glob("manifest*")):
            for folder, tags in walk(tree):
                for tag in tags:
                    model = _ollama_model(root, (*folder.relative_to(tree).parts, tag), folder / tag)
                    if model is not None:
                        yield model


def _ollama_model(root: Path, parts: tuple[str, ...], manifest: Path) -> LocalFile | None:
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
    return LocalFile(
        path=_blob(root, found[1]),
        source="ollama",
        root=root,
        alias=clean_line(f"{'/'.join((*prefix, model))}:{tag}"),
        repo="/".join((*owner, model)) if host in _HUB_HOSTS else "",
        projector=_blob(root, projector[1]) if projector is not None else None,
    )


def _blob(root: Path, sha256: str) -> Path:
    older = root / "blobs" / f"sha256:{sha256}"  # before 0.1.30
    return older if older.exists() else root / "blobs" / f"sha256-{sha256}"


def lmstudio_folders() -> list[Path]:
    """Return the folders in which LM Studio keeps models, whether they exist or not."""
    folders = [paths.expanded("~/.lmstudio/models"), paths.expanded("~/.cache/lm-studio/models")]
    for home in ("~/.lmstudio", "~/.cache/lm-studio"):
        try:
            chosen = msgspec.json.decode(read_small(paths.expanded(home) / "settings.json"), type=prepared(_Settings))
        except (OSError, ValueError, RecursionError):
            continue
        if chosen.downloadsFolder and "\0" not in chosen.downloadsFolder:
            folders.append(paths.expanded(chosen.downloadsFolder))
    return folders


def llama_cache() -> Path:
    """Return the cache of llama.cpp, found as it finds it."""
    if named := os.environ.get("LLAMA_CACHE"):
        return paths.expanded(named)
    if sys.platform == "darwin":
        return paths.expanded("~/Library/Caches/llama.cpp")
    return paths.expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "llama.cpp"


def repo_in_store(store: Store, folder: Path, path: Path) -> str:
    """Return "owner/name" of a file that LM Studio or llama.cpp has from Hugging Face, "" where that is not known."""
    if store == "lmstudio":
        parts = path.relative_to(folder).parts
        return "/".join(parts[:2]) if len(parts) > 2 else ""
    for manifest in folder.glob("manifest=*.json"):
        found = _MANIFEST.fullmatch(manifest.name)
        if found is not None and path.name.startswith(f"{found[1]}_{found[2]}_"):
            return f"{found[1]}/{found[2]}"
    return ""


def store_folders() -> list[Path]:
    """Return all folders that are searched, whether they exist or not."""
    return list(dict.fromkeys((*ollama_stores(), *lmstudio_folders(), llama_cache())))


def unreadable() -> list[Path]:
    """Return the stores that exist and may not be read by this user: Ollama's service runs as another one."""
    found: list[Path] = []
    for folder in store_folders():
        try:
            os.scandir(folder).close()
        except PermissionError:
            found.append(folder)
        except OSError:
            continue
    return found
