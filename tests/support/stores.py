"""Models as Ollama, LM Studio and llama.cpp keep them, in a home folder."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

_TYPE = "application/vnd.ollama.image."


def ollama(root: Path, name: str, source: Path, host: str = "registry.ollama.ai/library", **layers: Path) -> Path:
    """Put `source` into the store `root` as `ollama pull NAME` does; returns its blob."""
    described, blob = [], root
    for kind, file in {"template": source, **layers, "model": source}.items():
        digest = hashlib.sha256(file.read_bytes() if kind != "template" else b"{{ .Prompt }}").hexdigest()
        blob = root / "blobs" / f"sha256-{digest}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        if kind != "template":
            shutil.copy(file, blob)
        described.append({"mediaType": f"{_TYPE}{kind}", "digest": f"sha256:{digest}", "size": 1})
    model, _, tag = name.partition(":")
    manifest = root / "manifests" / host / model / tag
    manifest.parent.mkdir(parents=True, exist_ok=True)
    config = {"mediaType": "application/vnd.docker.container.image.v1+json", "digest": "sha256:0", "size": 1}
    manifest.write_text(json.dumps({"schemaVersion": 2, "config": config, "layers": described}))
    return blob


def lmstudio(home: Path, repo: str, name: str, source: Path) -> Path:
    file = home / ".lmstudio" / "models" / repo / name
    file.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(source, file))


def llama_cpp(cache: Path, repo: str, name: str, source: Path) -> Path:
    """Put `source` into the cache as `llama-cli -hf REPO` does."""
    cache.mkdir(parents=True, exist_ok=True)
    owner, _, model = repo.partition("/")
    (cache / f"manifest={owner}={model}=latest.json").write_text("{}")
    return Path(shutil.copy(source, cache / f"{owner}_{model}_{name}"))
