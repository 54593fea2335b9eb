"""Repositories of GGUF files on the hub as plain data, made of the hub's responses as huggingface_hub hands them out,
and the choice of the model that a user means.

huggingface_hub validates nothing, and nothing here is trusted: names, hashes, sizes and ids are validated before they
become names of files and folders of the cache.

File names are those that publishers really use: `Model-Q4_K_M.gguf` (bartowski, lmstudio-community), `Model-UD-Q4_K_XL`
and `BF16/Model-BF16-00001-of-00002` (unsloth), `Model.i1-IQ3_M` and `Model.mmproj-f16` (mradermacher),
`model-mxfp4` and `mmproj-model-f16` (ggml-org), `model-q4_0` (Qwen, Google).
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec

from cpuchat.base.errors import HubError, NotOnHub, UsageError
from cpuchat.base.text import clean_line
from cpuchat.models.file_names import Role, quantization_of, rank, role_of, without_prefix, without_quantization
from cpuchat.models.hub.errors import invalid_response

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo
    from huggingface_hub.hf_api import RepoSibling


class ModelData(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the plain data of `models`."""


class RepositoryFacts(ModelData, frozen=True):
    """Base of both. `downloads` of the last 30 days; `updated` as `2025-11-03`, "" when not known."""

    id: str
    downloads: int = 0
    likes: int = 0
    gated: bool = False
    private: bool = False
    updated: str = ""


class FoundRepository(RepositoryFacts, frozen=True):
    """One hit of a search."""

    architecture: str = ""
    n_params: int = 0


class HubFile(ModelData, frozen=True):
    """One file of a repository at one revision. `size` in bytes.

    `path` is relative to the repository and has passed `safe_path`. `sha256` (64 hex digits) is announced for files in
    large file storage, `git_sha1` (of the git blob) for the others."""

    path: str
    size: int
    sha256: str = ""
    git_sha1: str = ""

    @property
    def etag(self) -> str:
        """Return the name under which the Hugging Face cache keeps its content."""
        return self.sha256 or self.git_sha1


class RepoModel(ModelData, frozen=True):
    """One model of a repository: a GGUF file, or all parts of a split one, in order.

    `name` is the file's name without folder, `.gguf` and the part number. `quantization` as the name says it, upper
    case ("Q4_K_M", "UD-Q4_K_XL"); "" when it doesn't. `kind` see `file_names`: only a "model" can be loaded. `complete`
    is False when parts are missing in the repository."""

    name: str
    files: tuple[HubFile, ...]
    quantization: str = ""
    kind: Role = "model"
    complete: bool = True

    @property
    def key(self) -> str:
        """Return the path of its first file, which is unique in the repository."""
        return self.files[0].path

    @property
    def size(self) -> int:
        """Return bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def base(self) -> str:
        """Return the name without the quantization: the same for all quantizations of one model."""
        return without_quantization(self.name)


class Repository(RepositoryFacts, frozen=True, kw_only=True):
    """A repository at one revision (`revision`: the commit, 40 hex digits), its models the smallest first.

    `newest_at`: when the hub reported this as its newest commit, in seconds since 1970; 0 for another commit."""

    revision: str
    newest_at: float = 0.0
    models: tuple[RepoModel, ...] = ()
    license: str = ""
    base_model: str = ""


_REPO = re.compile(r"(?!.*(--|\.\.))\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)  # the rules of validate_repo_id
_HASH = re.compile(r"[0-9a-f]+")
_DEVICE = re.compile(r"(CON|PRN|AUX|NUL|COM\d|LPT\d)(\.|$)", re.IGNORECASE)  # Windows: names of devices
_MAX_PART = 255  # bytes of one name on every usual file system
_MAX_PATH = 1024
_MAX_SIZE = 1 << 53  # what JSON can carry; 9 PB


def is_repo(text: object) -> bool:
    """Return whether it is "owner/name"."""
    return isinstance(text, str) and _REPO.fullmatch(text) is not None


def is_hash(text: object, *n_digits: int) -> bool:
    """Return whether it is a hash in hex digits: 40 of git's, of a commit or a small file, or 64 of SHA-256."""
    return isinstance(text, str) and len(text) in n_digits and _HASH.fullmatch(text) is not None


def is_size(value: object) -> bool:
    """Return whether it can be the size of a file in bytes."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_SIZE


def check_names(repo: str, revision: str, files: Iterable[HubFile]) -> None:
    """Check everything that becomes the name of a file or a folder. Raises UsageError: the repository or the revision
    is malformed; HubError: a file has an unsafe name, no hash, or no size."""
    if not is_repo(repo):
        raise UsageError(f"{repo!r} is not a repository name.", "Write it as OWNER/NAME.")
    if not is_hash(revision, 40):
        raise UsageError(f"{revision!r} is not a commit hash.", "Refresh the repository.")
    for file in files:
        safe_path(file.path)
        if not is_hash(file.etag, 40, 64) or not is_size(file.size):
            raise HubError(f"Hugging Face publishes no hash or size for {file.path}.", "Choose another file.")


def safe_path(path: str) -> str:
    """Return `path` if it names a file inside the folder it will be put into, on any operating system. Raises HubError:
    it is unsafe: absolute, `..`, a drive, backslashes, control or invisible characters, device names, too long. The
    message says which."""
    parts, encoded = path.split("/"), path.encode("utf-8", "replace")
    faults = {
        "control or invisible characters": not path.isprintable(),
        "a backslash or colon": "\\" in path or ":" in path,
        "an absolute path": path.startswith("/"),
        "outside its folder": any(part in ("", ".", "..") for part in parts),
        "a name reserved by Windows": any(part != part.rstrip(" .") or _DEVICE.match(part) for part in parts),
        "too long": len(encoded) > _MAX_PATH or any(len(part) > _MAX_PART for part in encoded.split(b"/")),
    }
    if fault := next((fault for fault, is_found in faults.items() if is_found), ""):
        raise HubError(
            f"The repository contains a file with an unsafe name ({fault}): {clean_line(path)[:100]!r}.",
            "Don't trust this repository; choose another one.",
        )
    return path


KINDS = {"head": "a draft head", "projector": "a multimodal projector", "imatrix": "an importance matrix"}
"""Names of files that are not models."""


def choose_repo_model(repository: Repository, wanted: str = "", *, heads: bool = False) -> RepoModel:
    """Return the model that `wanted` names: a quantization, a model's or a file's name; "" is the usual trade-off.

    A quantization without its prefix finds `UD-` and `QAT-` forms when there is no plain one. Of several models of
    the same quantization, the largest outside of folders is meant: the others belong to it. `heads`: the name of a
    draft head is one, too. Raises NotOnHub: there is no such model; the hint lists those there are."""
    listed = loadable(repository.models)
    models = usual_first(listed)
    available = f"Available: {', '.join(dict.fromkeys(clean_line(one.quantization or one.name) for one in listed))}."
    if models and not wanted:
        return models[0]
    for model in models:
        if wanted.lower() in {model.quantization.lower(), *_names(model)}:
            return model
    for model in models:
        if wanted.upper() == without_prefix(model.quantization):
            return model
    for model in repository.models:
        if wanted.lower() in _names(model) - {model.quantization.lower()} and model.kind != "model":
            if heads and model.kind == "head" and model.complete:
                return model
            raise NotOnHub(f"{clean_line(model.name)} is {KINDS[model.kind]}, not a model.", available)
    if not models:
        kinds = dict.fromkeys(model.kind for model in repository.models if model.kind != "model")
        others = ", ".join(KINDS[kind].partition(" ")[2] + "s" for kind in kinds)
        raise NotOnHub(
            f"{repository.id} has no GGUF model{f', only {others}' if others else ''}.",
            f"See `cpuchat models search {repository.id.rpartition('/')[2]}`.",
        )
    raise NotOnHub(f"{repository.id} has no {clean_line(wanted)}.", available)


def loadable(models: Iterable[RepoModel]) -> list[RepoModel]:
    """Return the models without heads, projectors and the like, and without those of which parts are missing."""
    return [model for model in models if model.kind == "model" and model.complete]


def usual_first(models: Iterable[RepoModel]) -> list[RepoModel]:
    """Sort by preference when no quantization was named."""
    return sorted(models, key=lambda one: (rank(one.quantization), one.files[0].path.count("/"), -one.size))


def _names(model: RepoModel) -> set[str]:
    """Return the names of a model and of its files, in lower case."""
    return {name.lower() for name in (model.name, f"{model.name}.gguf", *(file.path for file in model.files)) if name}


_MAX_FILES = 5_000
_MAX_TEXT = 200
_SUFFIX = ".gguf"
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})$", re.IGNORECASE)


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


def repository_of(info: ModelInfo, newest_at: float = 0.0) -> Repository:
    """Return a repository with its models; `newest_at` see there. Raises HubError: its id or commit is invalid."""
    if not is_repo(info.id) or not is_hash(info.sha, 40):
        raise invalid_response()
    return Repository(
        **_facts(info),
        revision=info.sha or "",
        newest_at=newest_at,
        models=models_of(itertools.islice(_files(info.siblings or []), _MAX_FILES)),
        license=_text(getattr(info.card_data, "license", None)),
        base_model=_text(getattr(info.card_data, "base_model", None)),
    )


def _files(siblings: Iterable[RepoSibling]) -> Iterator[HubFile]:
    """Yield the model files that can be downloaded and verified: with a safe name, a size and a hash."""
    for sibling in siblings:
        with contextlib.suppress(HubError):
            if (path := safe_path(str(sibling.rfilename))).lower().endswith(_SUFFIX):
                large = sibling.lfs
                size = large.size if large is not None else sibling.size
                hashes = {"git_sha1": sibling.blob_id or ""} if large is None else {"sha256": large.sha256}
                if is_size(size) and (is_hash(sibling.blob_id, 40) if large is None else is_hash(large.sha256, 64)):
                    yield HubFile(path=path, size=size or 0, **hashes)


def models_of(files: Iterable[HubFile]) -> tuple[RepoModel, ...]:
    """Return the models in these GGUF files, the smallest first; all parts of a split one are one model."""
    groups: dict[tuple[str, int], dict[int, HubFile]] = {}
    for file in files:
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
