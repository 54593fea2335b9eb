"""Turns the hub's responses, as huggingface_hub hands them out, into plain data.

huggingface_hub validates nothing, and nothing here is trusted: names, hashes and ids become names of files and folders
of the cache.

File names are those that publishers really use: `Model-Q4_K_M.gguf` (bartowski, lmstudio-community), `Model-UD-Q4_K_XL`
and `BF16/Model-BF16-00001-of-00002` (unsloth), `Model.i1-IQ3_M` and `Model.mmproj-f16` (mradermacher),
`model-mxfp4` and `mmproj-model-f16` (ggml-org), `model-q4_0` (Qwen, Google).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from cpuchat.base.errors import HubError
from cpuchat.models.file_names import quantization_of, role_of
from cpuchat.models.hub.errors import invalid_response
from cpuchat.models.hub.repository import (
    FoundRepository,
    HubFile,
    RepoModel,
    Repository,
    is_repo,
    is_sha1,
    is_sha256,
    is_size,
    safe_path,
)

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo
    from huggingface_hub.hf_api import RepoSibling


_MAX_FILES = 5_000
_MAX_PROBLEMS = 10
_MAX_TEXT = 200
_SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})$", re.IGNORECASE)
_FRAGMENT = re.compile(r"\.gguf\.?(part\d+of\d+|-?split-[a-z])$", re.IGNORECASE)


def listed_repositories(infos: Iterable[ModelInfo]) -> list[FoundRepository]:
    """Return the hits of a search that have a valid id. Raises HubError: none has."""
    hits = list(infos)
    valid = [info for info in hits if is_repo(info.id)]
    if hits and not valid:
        raise invalid_response()
    found: list[FoundRepository] = []
    for info in valid:
        gguf = info.gguf if isinstance(info.gguf, dict) else {}  # of its first GGUF file; total: parameters
        architecture, n_params = _text(gguf.get("architecture")), _count(gguf.get("total"))
        found.append(FoundRepository(**_facts(info), architecture=architecture, n_params=n_params))
    return found


def repository(info: ModelInfo, newest_at: float = 0.0) -> Repository:
    """Return a repository with its models; `newest_at` see there. Raises HubError: its id or commit is invalid."""
    if not is_repo(info.id) or not is_sha1(info.sha):
        raise invalid_response()
    files, problems = _files(info.siblings or [])
    return Repository(
        **_facts(info),
        revision=info.sha or "",
        newest_at=newest_at,
        models=models_of(files),
        license=_text(getattr(info.card_data, "license", None)),
        base_model=_text(getattr(info.card_data, "base_model", None)),
        problems=tuple(problems),
    )


def _files(siblings: Iterable[RepoSibling]) -> tuple[list[HubFile], list[str]]:
    """Return the model files that can be downloaded and verified, and why others cannot."""
    files: list[HubFile] = []
    problems: list[str] = []
    fragments = 0
    for sibling in siblings:
        try:
            path = safe_path(str(sibling.rfilename))
        except HubError as error:
            problems.append(error.message)
            continue
        if path.lower().endswith(_SUFFIX):
            large = sibling.lfs
            size = large.size if large is not None else sibling.size
            hashes = {"git_sha1": sibling.blob_id or ""} if large is None else {"sha256": large.sha256}
            if is_size(size) and (is_sha1(sibling.blob_id) if large is None else is_sha256(large.sha256)):
                files.append(HubFile(path=path, size=size or 0, **hashes))
                if len(files) == _MAX_FILES:
                    problems.insert(0, f"Only the first {_MAX_FILES:,} model files are listed.")
                    break
            else:
                problems.append(f"Hugging Face publishes no size or hash of {path}, so it cannot be verified.")
        fragments += _FRAGMENT.search(path) is not None
    if len(problems) > _MAX_PROBLEMS:
        problems[_MAX_PROBLEMS:] = [f"{len(problems) - _MAX_PROBLEMS} more files were skipped for the same reasons."]
    if fragments:
        problems.append(f"{fragments} files are fragments that must be joined by hand.")
    return files, problems


def models_of(files: Iterable[HubFile]) -> tuple[RepoModel, ...]:
    """Return the GGUF models among a repository's files, the smallest first; all parts of a split one are one model."""
    groups: dict[tuple[str, int], dict[int, HubFile]] = {}
    for file in files:
        if not file.path.lower().endswith(_SUFFIX):
            continue
        stem, number, count = file.path[: -len(_SUFFIX)], 1, 1
        part = _PART.match(stem)
        if part is not None:
            stem, number, count = part["stem"], int(part["number"]), int(part["count"])
        groups.setdefault((stem, count), {})[number] = file
    models = [
        RepoModel(
            name=PurePosixPath(stem).name,
            files=tuple(parts[number] for number in sorted(parts)),
            quantization=quantization_of(stem),
            kind=role_of(stem),
            complete=len(parts) == count and min(parts) == 1 and max(parts) == count,
        )
        for (stem, count), parts in groups.items()
    ]
    return tuple(sorted(models, key=lambda model: (model.size, model.name)))


def _facts(info: ModelInfo) -> dict[str, Any]:
    """Return the fields of `RepositoryFacts`."""
    day = f"{info.last_modified:%Y-%m-%d}" if info.last_modified else ""
    counts = {"downloads": _count(info.downloads), "likes": _count(info.likes)}
    return {"id": info.id, **counts, "gated": bool(info.gated), "private": bool(info.private), "updated": day}


def _count(value: Any) -> int:
    return value if is_size(value) else 0


def _text(value: Any) -> str:
    """Return a field of a model card: a text, or a list of them."""
    values = value if isinstance(value, list) else [value]
    return ", ".join(one for one in values if isinstance(one, str))[:_MAX_TEXT]
