"""Repositories of GGUF files on the hub, as plain data."""

from __future__ import annotations

import msgspec

from cpuchat.models.file_names import Role, without_quantization


class Data(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the plain data of `models`."""


class FoundRepository(Data, frozen=True):
    """One hit of a search. `downloads` of the last 30 days; `updated` as `2025-11-03`, "" when not known."""

    id: str
    downloads: int = 0
    likes: int = 0
    gated: bool = False
    private: bool = False
    updated: str = ""
    architecture: str = ""
    n_params: int = 0


class HubFile(Data, frozen=True):
    """One file of a repository at one revision. `size` in bytes.

    `path` is relative to the repository and has passed `safe_path`. `sha256` (64 hex digits) is announced for files in
    large file storage, `git_sha1` (of the git blob) for the others.
    """

    path: str
    size: int
    sha256: str = ""
    git_sha1: str = ""

    @property
    def etag(self) -> str:
        """Return the name under which the Hugging Face cache keeps its content."""
        return self.sha256 or self.git_sha1


class RepoModel(Data, frozen=True):
    """One model of a repository: a GGUF file, or all parts of a split one, in order.

    `name` is the file's name without folder, `.gguf` and the part number. `quantization` as the name says it, upper
    case ("Q4_K_M", "UD-Q4_K_XL"); "" when it doesn't. `kind` see `file_names`: only a "model" can be loaded. `complete`
    is False when parts are missing in the repository.
    """

    name: str
    files: tuple[HubFile, ...]
    quantization: str = ""
    kind: Role = "model"
    complete: bool = True

    @property
    def size(self) -> int:
        """Return bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def base(self) -> str:
        """Return the name without the quantization: the same for all quantizations of one model."""
        return without_quantization(self.name)


class Repository(Data, frozen=True):
    """A repository at one revision (`revision`: the commit, 40 hex digits), its models the smallest first.

    `newest_at`: when the hub reported this as its newest commit, in seconds since 1970; 0 for another commit.
    `problems`: what was left out of `models` and why, one sentence each.
    """

    id: str
    revision: str
    newest_at: float = 0.0
    models: tuple[RepoModel, ...] = ()
    gated: bool = False
    private: bool = False
    downloads: int = 0
    likes: int = 0
    updated: str = ""
    license: str = ""
    base_model: str = ""
    problems: tuple[str, ...] = ()
