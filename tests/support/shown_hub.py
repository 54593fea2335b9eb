"""A hub with one repository, for pictures and for models that are too large to be made in a test.

What is asked of a real hub is tested with the real client against the hub server.
"""

from __future__ import annotations

from typing import Any

from cpuchat.base.errors import AccessDenied
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.hub.repository import RepoModel, Repository
from tests.support.big_headers import big_header
from tests.support.downloads import COMMIT, REPO, model

DRAFT_REPO = "owner/small-GGUF"
"""Its model can draft for the others, if the catalog says so."""


class ShownHub:
    """One repository whose files nobody could download here, and the headers that they would have; a draft model's."""

    def __init__(self, models: tuple[RepoModel, ...], **facts: Any) -> None:
        self.answer = Repository(id=REPO, revision=COMMIT, models=models, downloads=1_234_567, updated="2025-11-03",
                                 license="apache-2.0", base_model="Qwen/Qwen2.5-7B-Instruct", **facts)  # fmt: skip
        self.draft = Repository(id=DRAFT_REPO, revision=COMMIT, models=(model("Q8_0", 531_067_904, name="big-0.5b"),))
        self.read: list[str] = []
        self.refuses: AccessDenied | None = None

    def repository(self, repo: str, revision: str = "main") -> Repository:
        return self.draft if repo == DRAFT_REPO else self.answer

    def header(self, repository: Repository, wanted: RepoModel) -> GGUFHeader:
        if repository is self.draft:
            return big_header("0.5b", wanted.quantization)
        self.read.append(wanted.quantization)
        if self.refuses is not None:
            raise self.refuses
        return big_header("7b", wanted.quantization)
