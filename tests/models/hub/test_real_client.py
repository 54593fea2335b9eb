"""Tests the local hub, asked by huggingface_hub itself: what it understands is what the hub says.

Without this the other tests could agree with a server that no real client would.
"""

from __future__ import annotations

import hashlib

import pytest
from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoFile

from cpuchat.models.hub.client import Hub
from tests.support.hub_server import HubServer

REPO, NAME = "some/Tiny-GGUF", "Tiny-F32.gguf"


@pytest.fixture
def api(hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> HfApi:
    # Else it asks the public hub in which program it may be running.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)
    return HfApi(endpoint=hub_server.endpoint, token=False)


def test_searches_and_repositories_are_what_the_real_client_makes_of_them(hub_server: HubServer, api: HfApi) -> None:
    content = b"GGUF of a large file"
    hub_server.add("other/Tiny", {"a.safetensors": b"1"}, downloads=9)
    hub_server.add("other/Tiny-GGUF", {"b.gguf": b"2"}, downloads=3)
    commit = hub_server.add(REPO, {NAME: content, "sub/README.md": b"# Tiny"}, downloads=5)

    found = list(api.list_models(search="tiny", filter="gguf", sort="downloads", limit=5))
    assert [one.id for one in found] == [one.id for one in Hub().search("tiny")] == [REPO, "other/Tiny-GGUF"]
    info = api.model_info(REPO, files_metadata=True)
    assert info.sha == commit == Hub().repository(REPO).revision
    large = next(one for one in info.siblings or [] if one.rfilename == NAME).lfs
    assert large is not None
    assert (large.size, large.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    tree = {one.path: one for one in api.list_repo_tree(REPO, recursive=True) if isinstance(one, RepoFile)}
    assert set(tree) == {NAME, "sub/README.md"}
    assert [file.size for file in Hub().repository(REPO).models[0].files] == [tree[NAME].size]
