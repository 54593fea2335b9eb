"""The Hugging Face hub, as the rest of the program sees it: search, look into a repository, read a model's header."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.errors import ModelDamaged
from cpuchat.models.gguf.header import GGUFHeader, join_parts
from cpuchat.models.hub import answers, connection
from cpuchat.models.hub.address import parse_address
from cpuchat.models.hub.errors import too_slow
from cpuchat.models.hub.header_cache import HeaderCache
from cpuchat.models.hub.remote_header import read_remote_header
from cpuchat.models.hub.repository import FoundRepository, RepoModel, Repository

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ExpandModelProperty_T

_LONGEST = 60.0
"""Seconds after which no other part's header is asked for."""
MAIN = "main"
"""The branch of every repository that its newest commit is on."""
_FACTS: list[ExpandModelProperty_T] = ["downloads", "likes", "gated", "private", "lastModified", "gguf"]


class Hub:
    """All methods block, for up to two minutes on a bad line, and may be called from several threads at once.

    They raise `errors.HubError` or one of its kinds: HubOffline, RateLimited, NotOnHub, AccessDenied.
    """

    def __init__(self, cache: Path | None = None) -> None:
        """`cache` replaces the folder in which headers are kept."""
        self._kept = HeaderCache(cache)

    def search(self, query: str, *, limit: int = 30) -> list[FoundRepository]:
        """Repositories with GGUF files whose name contains the words, what is downloaded most first.

        The link of a repository's page finds that repository. `limit`: how many at most.
        """
        if "://" in query:
            query = parse_address(query).repo
        query = query.strip()
        return answers.found(
            connection.ask(
                lambda api: list(
                    api.list_models(search=query, filter="gguf", sort="downloads", limit=limit, expand=_FACTS)
                )
            )
        )

    def repository(self, repo_id: str, revision: str = MAIN) -> Repository:
        """What is in it at `revision`: a branch, a tag or a commit.

        Raises:
            UsageError: `repo_id` is no "owner/name".
        """
        repo, asked = parse_address(repo_id).repo, time.time()
        info = connection.ask(lambda api: api.model_info(repo, revision=revision, files_metadata=True), repo)
        return answers.repository(info, asked if revision == MAIN else 0.0)

    def header(self, repo: Repository, model: RepoModel) -> GGUFHeader:
        """Its header, with the tensors of all parts of a split one; only some MB are fetched, and kept for ever.

        Raises:
            ModelDamaged: no GGUF file, a contradictory header, or parts that are missing.
            TooSlow: it has so many parts, or comes so slowly, that it takes too long.
        """
        headers, until = [], time.monotonic() + _LONGEST
        for file in model.files:
            if time.monotonic() > until:
                raise too_slow()
            headers.append(read_remote_header(repo.id, repo.revision, file, self._kept))
        if not model.complete or headers[0].split_count != len(headers):
            raise ModelDamaged(f"{model.name}: parts of it are missing in {repo.id}.", "Choose another file.")
        return join_parts(headers)
