"""Interface to the Hugging Face Hub: search, list a repository, read a model's header."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.errors import ModelDamaged
from cpuchat.models.gguf.header import GGUFHeader, join_parts
from cpuchat.models.hub import connection, responses
from cpuchat.models.hub.address import parse_address
from cpuchat.models.hub.errors import too_slow
from cpuchat.models.hub.header_cache import HeaderCache
from cpuchat.models.hub.remote_header import read_remote_header
from cpuchat.models.hub.repository import FoundRepository, RepoModel, Repository

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ExpandModelProperty_T

_MAX_SECONDS = 60.0
"""Seconds after which no further part's header is requested."""
MAIN = "main"
"""The default branch of every repository."""
_FACTS: list[ExpandModelProperty_T] = ["downloads", "likes", "gated", "private", "lastModified", "gguf"]


class Hub:
    """Client of the Hub. All methods block, up to two minutes on a bad connection, are thread-safe, and raise
    `errors.HubError` or one of its kinds: HubOffline, RateLimited, NotOnHub, AccessDenied.
    """

    def __init__(self, cache: Path | None = None) -> None:
        """`cache` replaces the folder of cached headers."""
        self._headers = HeaderCache(cache)

    def search(self, query: str, *, limit: int = 30) -> list[FoundRepository]:
        """Return at most `limit` repositories with GGUF files whose name contains the words, most downloads first.

        The link of a repository's page finds that repository.
        """
        if "://" in query:
            query = parse_address(query).repo
        query = query.strip()
        return responses.found(
            connection.ask(
                lambda api: list(
                    api.list_models(search=query, filter="gguf", sort="downloads", limit=limit, expand=_FACTS)
                )
            )
        )

    def repository(self, repo_id: str, revision: str = MAIN) -> Repository:
        """Return its models at `revision`: a branch, a tag or a commit.

        Raises:
            UsageError: `repo_id` is not "owner/name".
        """
        repo, asked = parse_address(repo_id).repo, time.time()
        info = connection.ask(lambda api: api.model_info(repo, revision=revision, files_metadata=True), repo)
        return responses.repository(info, asked if revision == MAIN else 0.0)

    def header(self, repo: Repository, model: RepoModel) -> GGUFHeader:
        """Return the header of a model, with the tensors of all parts of a split one; fetches and caches some MB.

        Raises:
            ModelDamaged: not a GGUF file, a contradictory header, or missing parts.
            TooSlow: too many parts, or too slow a connection.
        """
        headers, until = [], time.monotonic() + _MAX_SECONDS
        for file in model.files:
            if time.monotonic() > until:
                raise too_slow()
            headers.append(read_remote_header(repo.id, repo.revision, file, self._headers))
        if not model.complete or headers[0].split_count != len(headers):
            raise ModelDamaged(f"{model.name}: parts are missing in {repo.id}.", "Choose another file.")
        return join_parts(headers)
