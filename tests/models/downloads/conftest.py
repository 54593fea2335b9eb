"""A repository on the local hub, and downloads from it in this process and in processes of their own."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from cpuchat.models.downloads.child import fetch_model
from cpuchat.models.downloads.state import Download, DownloadProgress, Order, RetryPolicy
from cpuchat.models.hub.repository import HubFile, RepoModel
from tests.support.hub_server import Gate, HubServer

REPO = "somebody/model-GGUF"
NAME = "model-Q4_K_M.gguf"
CONTENT = random.Random(1).randbytes(1_500_000)
QUICK = RetryPolicy(first_wait=0.0, attempts=4)
"""Faults are borne without waiting."""


class Site:
    """The repository `REPO` with the file `NAME`, and the cache to download it to."""

    def __init__(self, hub: HubServer, cache: Path) -> None:
        self.hub = hub
        self.cache = cache
        self.reports: list[Download] = []
        self.files: tuple[HubFile, ...] = ()
        self.commit = ""
        self.put({NAME: CONTENT})

    def put(self, files: Mapping[str, bytes | Path], *, repo: str = REPO, **facts: bool) -> None:
        """Add files to the hub; from now on `order` and `model` refer to them."""
        self.commit, self.asked_at = self.hub.add(repo, files, **facts), time.time()
        rows = []
        for name, content in files.items():
            size = len(content) if isinstance(content, bytes) else content.stat().st_size
            rows.append(HubFile(path=name, size=size, sha256=self.hub.etag(repo, name)))
        self.files = tuple(rows)

    @property
    def model(self) -> RepoModel:
        return RepoModel(name="model-Q4_K_M", files=self.files, quantization="Q4_K_M")

    def order(self, *, repo: str = REPO, retry_policy: RetryPolicy = QUICK) -> Order:
        return Order(
            repo=repo,
            revision=self.commit,
            model=self.model,
            cache=str(self.cache),
            newest_at=self.asked_at,
            retry_policy=retry_policy,
        )

    def fetch(self, order: Order | None = None, verified: tuple[str, ...] = ()) -> Path:
        """Download in this process; progress goes to `reports`."""
        return fetch_model(
            DownloadProgress(Download(order=order or self.order(), verified=verified), self.reports.append)
        )

    @property
    def blobs(self) -> Path:
        return self.cache / f"models--{REPO.replace('/', '--')}" / "blobs"

    def part(self, number: int = 0) -> Path:
        return self.blobs / f"{self.files[number].etag}.incomplete"

    def wait_for_part(self, gate: Gate) -> None:
        """Wait until everything before the gate is on the disk: some of it may still be in transit."""
        gate.wait()
        while not self.part().exists() or self.part().stat().st_size < gate.at:
            os.sched_yield()

    def asked(self) -> list[str]:
        """Return the ranges requested from the content host, in order."""
        return [request.range for request in self.hub.requests if request.host == "content"]


@pytest.fixture
def site(hub_server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    # As in the process of a download; huggingface_hub has read the variable for this one already.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    return Site(hub_server, tmp_path / "hf_home" / "hub")
