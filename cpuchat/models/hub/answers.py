"""What we make of the hub's answers, as huggingface_hub hands them out.

It checks nothing of what is in them, and nothing in them is trusted: names, hashes and ids become names of files and
folders of the cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cpuchat.errors import HubError
from cpuchat.models.hub.errors import garbage
from cpuchat.models.hub.listing import models_of, safe_path
from cpuchat.models.hub.repository import FoundRepository, HubFile, Repository

if TYPE_CHECKING:
    from huggingface_hub import ModelInfo
    from huggingface_hub.hf_api import RepoSibling

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_REPO = re.compile(r"(?!.*(--|\.\.))\w[\w.-]*/\w[\w.-]*", re.ASCII)  # the rules of validate_repo_id
_PIECE = re.compile(r"\.gguf\.?(part\d+of\d+|-?split-[a-z])$", re.IGNORECASE)


def found(infos: Iterable[ModelInfo]) -> list[FoundRepository]:
    """The hits of a search that have a proper id.

    Raises:
        HubError: none has.
    """
    hits = list(infos)
    proper = [info for info in hits if isinstance(info.id, str) and _REPO.fullmatch(info.id)]
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


def repository(info: ModelInfo) -> Repository:
    """A repository with its models.

    Raises:
        HubError: its id or commit is none.
    """
    files, problems = _files(info.siblings or [])
    return Repository(
        id=_checked(_REPO, info.id),
        revision=_checked(_SHA1, info.sha),
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
            else:
                problems.append(f"The hub tells no size or hash of {path}, so it cannot be checked.")
        pieces += _PIECE.search(path) is not None
    if pieces:
        problems.append(f"{pieces} files are pieces that must be joined by hand before they are models.")
    return files, problems


def _file(path: str, sibling: RepoSibling) -> HubFile | None:
    """None when it could not be checked after a download."""
    large = sibling.lfs
    size, pattern, digest = (large.size, _SHA256, large.sha256) if large else (sibling.size, _SHA1, sibling.blob_id)
    if not isinstance(size, int) or size < 0 or not isinstance(digest, str) or not pattern.fullmatch(digest):
        return None
    return HubFile(path=path, size=size, sha256=digest) if large else HubFile(path=path, size=size, git_sha1=digest)


def _checked(pattern: re.Pattern[str], text: Any) -> str:
    if not isinstance(text, str) or pattern.fullmatch(text) is None:
        raise garbage()
    return text


def _day(info: ModelInfo) -> str:
    return f"{info.last_modified:%Y-%m-%d}" if info.last_modified else ""


def _count(value: Any) -> int:
    return max(value, 0) if isinstance(value, int) else 0


def _words(value: Any) -> str:
    """A card's fields hold a text, or a list of them."""
    values = value if isinstance(value, list) else [value]
    return ", ".join(one for one in values if isinstance(one, str))
