"""What we make of the hub's answers, as huggingface_hub hands them out.

It checks nothing of what is in them, and nothing in them is trusted: names, hashes and ids become names of files and
folders of the cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from cpuchat.errors import HubError
from cpuchat.models.hub.errors import garbage
from cpuchat.models.hub.listing import models_of
from cpuchat.models.hub.names import is_repo, is_sha1, is_sha256, is_size, safe_path
from cpuchat.models.hub.repository import FoundRepository, HubFile, Repository

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo
    from huggingface_hub.hf_api import RepoSibling

_MOST_FILES = 5_000
"""Model files of one repository: more is none that could be chosen from."""
_MOST_PROBLEMS = 10
_MOST_WORDS = 200
_PIECE = re.compile(r"\.gguf\.?(part\d+of\d+|-?split-[a-z])$", re.IGNORECASE)


def found(infos: Iterable[ModelInfo]) -> list[FoundRepository]:
    """The hits of a search that have a proper id.

    Raises:
        HubError: none has.
    """
    hits = list(infos)
    proper = [info for info in hits if is_repo(info.id)]
    if hits and not proper:
        raise garbage()
    return [_hit(info) for info in proper]


def _hit(info: ModelInfo) -> FoundRepository:
    facts = info.gguf if isinstance(info.gguf, dict) else {}  # of its first GGUF file; total: parameters
    return FoundRepository(
        id=info.id,
        downloads=_count(info.downloads),
        likes=_count(info.likes),
        gated=bool(info.gated),
        private=bool(info.private),
        updated=_day(info),
        architecture=_words(facts.get("architecture")),
        n_params=_count(facts.get("total")),
    )


def repository(info: ModelInfo, newest_at: float = 0.0) -> Repository:
    """A repository with its models. `newest_at` see `Repository`.

    Raises:
        HubError: its id or commit is none.
    """
    files, problems = _files(info.siblings or [])
    return Repository(
        id=_checked(is_repo, info.id),
        revision=_checked(is_sha1, info.sha),
        newest_at=newest_at,
        models=models_of(files),
        gated=bool(info.gated),
        private=bool(info.private),
        downloads=_count(info.downloads),
        likes=_count(info.likes),
        updated=_day(info),
        license=_words(getattr(info.card_data, "license", None)),
        base_model=_words(getattr(info.card_data, "base_model", None)),
        problems=tuple(problems),
    )


def _files(siblings: Iterable[RepoSibling]) -> tuple[list[HubFile], list[str]]:
    """The model files that can be downloaded and checked, and why others can't."""
    files: list[HubFile] = []
    problems: list[str] = []
    pieces = 0
    for sibling in siblings:
        try:
            path = safe_path(str(sibling.rfilename))
        except HubError as error:
            problems.append(error.message)
            continue
        if path.lower().endswith(".gguf"):
            file = _file(path, sibling)
            if file is not None:
                files.append(file)
                if len(files) == _MOST_FILES:
                    problems.insert(0, f"It lists more model files than the first {_MOST_FILES:,}, which are shown.")
                    break
            else:
                problems.append(f"The hub tells no size or hash of {path}, so it cannot be checked.")
        pieces += _PIECE.search(path) is not None
    if len(problems) > _MOST_PROBLEMS:
        problems[_MOST_PROBLEMS:] = [f"{len(problems) - _MOST_PROBLEMS} more files like these are left out, too."]
    if pieces:
        problems.append(f"{pieces} files are pieces that must be joined by hand before they are models.")
    return files, problems


def _file(path: str, sibling: RepoSibling) -> HubFile | None:
    """None when it could not be checked after a download."""
    large = sibling.lfs
    if large is not None:
        file = HubFile(path=path, size=large.size, sha256=large.sha256)
        return file if is_size(file.size) and is_sha256(file.sha256) else None
    if not is_size(sibling.size) or not is_sha1(sibling.blob_id):
        return None
    return HubFile(path=path, size=sibling.size or 0, git_sha1=sibling.blob_id or "")


def _checked(is_proper: Callable[[object], bool], text: Any) -> str:
    if not is_proper(text):
        raise garbage()
    return text


def _day(info: ModelInfo) -> str:
    return f"{info.last_modified:%Y-%m-%d}" if info.last_modified else ""


def _count(value: Any) -> int:
    return value if is_size(value) else 0


def _words(value: Any) -> str:
    """A card's fields hold a text, or a list of them."""
    values = value if isinstance(value, list) else [value]
    return ", ".join(one for one in values if isinstance(one, str))[:_MOST_WORDS]
