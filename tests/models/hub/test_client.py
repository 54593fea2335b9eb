"""Tests the hub's client against a local hub: searching, looking into repositories, access."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cpuchat.base.errors import AccessDenied, HubError, HubOffline, NotOnHub, RateLimited
from cpuchat.models.hub.client import Hub
from tests.models.hub.model_files import write_model_file
from tests.support.hub_server import STRANGER, TOKEN, Fault, HubServer

REPO = "some/Tiny-GGUF"


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    return write_model_file(tmp_path / "Tiny-Q8_0.gguf")


def test_a_search_finds_gguf_repositories_what_is_downloaded_most_first(hub_server: HubServer) -> None:
    gguf = {"total": 8_190_735_360, "architecture": "qwen3", "context_length": 40960}
    hub_server.add("a/Qwen3-8B-GGUF", {"a.gguf": b"1"}, downloads=5, likes=3, gguf=gguf)
    hub_server.add(
        "b/Qwen3-8B-GGUF", {"b.gguf": b"2"}, downloads=70, gated=True, lastModified="2026-01-02T03:04:05.000Z"
    )
    hub_server.add("c/Qwen3-8B", {"model.safetensors": b"3"}, downloads=900)
    hub_server.add("d/Llama-GGUF", {"d.gguf": b"4"}, downloads=900)
    first, second = Hub().search("qwen3 8b")
    assert (first.id, first.downloads, first.gated, first.updated, first.n_params) == (
        "b/Qwen3-8B-GGUF", 70, True, "2026-01-02", 0,
    )  # fmt: skip
    assert (second.id, second.likes, second.gated, second.architecture, second.n_params) == (
        "a/Qwen3-8B-GGUF", 3, False, "qwen3", 8_190_735_360,
    )  # fmt: skip
    assert [found.id for found in Hub().search("qwen3 8b", limit=1)] == ["b/Qwen3-8B-GGUF"]
    assert Hub().search("nothing of that name") == []


def test_a_repository_lists_its_models_with_the_hashes_to_check_them_by(hub_server: HubServer) -> None:
    files: dict[str, bytes | Path] = {
        "Tiny-Q8_0.gguf": b"12345678",
        "Q4_K_M/Tiny-Q4_K_M-00002-of-00002.gguf": b"12",
        "Q4_K_M/Tiny-Q4_K_M-00001-of-00002.gguf": b"1",
        "mmproj-F16.gguf": b"1234",
        "README.md": b"# Tiny",
    }
    commit = hub_server.add(REPO, files, cardData={"license": "apache-2.0", "base_model": ["some/Tiny"], "tags": [1]})
    found = Hub().repository(REPO)
    assert (found.id, found.revision, found.license, found.base_model) == (REPO, commit, "apache-2.0", "some/Tiny")
    split, projector, whole = found.models
    assert (split.quantization, split.size, split.complete) == ("Q4_K_M", 3, True)
    assert (projector.kind, whole.quantization) == ("projector", "Q8_0")
    assert [file.etag for file in whole.files] == [hub_server.etag(REPO, "Tiny-Q8_0.gguf")]


def test_unsafe_names_and_files_in_pieces_are_left_out(hub_server: HubServer) -> None:
    evil = ("../../evil.gguf", "a\x1b[2J.gguf", "big.Q8_0.gguf.part1of2", "big.Q8_0.gguf.part2of2")
    hub_server.add(REPO, {**dict.fromkeys(evil, b"1"), "good.gguf": b"3"})
    assert [model.name for model in Hub().repository(REPO).models] == ["good"]


HOSTILE = {
    "no list": {"id": REPO},
    "an id with a page": [{"id": "a/b/../../c"}],
    "no date": [{"id": REPO, "lastModified": "yesterday"}],
    "lists in lists": json.loads("[" * 900 + "]" * 900),
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_search_answered_with_something_else_is_an_error(hub_server: HubServer, answer: object) -> None:
    hub_server.fault("", "", Fault(where="api", page=json.dumps(answer).encode()))
    with pytest.raises(HubError, match="invalid response"):
        Hub().search("tiny")


COMMIT = "0123456789abcdef0123456789abcdef01234567"
SIBLING = {"rfilename": "a.gguf", "size": 5, "blobId": COMMIT}
UNCHECKABLE = {
    "a hash that is a path": {**SIBLING, "lfs": {"sha256": "../../x", "size": 5, "pointerSize": 1}},
    "no hash": {"rfilename": "a.gguf", "size": 5},
    "a negative size": {**SIBLING, "size": -5},
}


@pytest.mark.parametrize("sibling", UNCHECKABLE.values(), ids=UNCHECKABLE.keys())
def test_a_file_that_could_not_be_checked_is_left_out(hub_server: HubServer, sibling: dict[str, object]) -> None:
    answer = {"id": REPO, "sha": COMMIT, "siblings": [sibling, {**SIBLING, "rfilename": "good.gguf"}]}
    hub_server.fault(REPO, "", Fault(where="api", page=json.dumps(answer).encode()))
    assert [model.name for model in Hub().repository(REPO).models] == ["good"]


# Access.


def test_a_missing_repository_and_a_private_one_look_the_same_without_a_token(hub_server: HubServer) -> None:
    hub_server.add("some/closed", {"a.gguf": b"1"}, private=True)
    for repo in ("some/closed", "some/missing"):
        with pytest.raises(NotOnHub) as caught:
            Hub().repository(repo)
        assert repo in caught.value.message
        assert "hf auth login" in caught.value.hint


@pytest.mark.parametrize("token", ["", STRANGER])
def test_a_gated_repository_can_be_listed_but_says_how_to_be_let_in(
    hub_server: HubServer, monkeypatch: pytest.MonkeyPatch, model_file: Path, token: str
) -> None:
    hub_server.add(REPO, {"Tiny-Q8_0.gguf": model_file}, gated=True)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    found = Hub().repository(REPO)
    assert found.gated
    with pytest.raises(AccessDenied) as caught:
        Hub().header(found, found.models[0])
    assert f"{hub_server.endpoint}/{REPO}" in caught.value.hint
    assert ("hf auth login" in caught.value.hint) == (not token)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert Hub().header(found, found.models[0]).architecture == "llama"


def test_an_unreadable_token_is_said(hub_server: HubServer, tmp_path: Path) -> None:
    (tmp_path / "hf_home" / "token").mkdir(parents=True)
    with pytest.raises(HubError) as caught:
        Hub().search("tiny")
    assert "hf auth login" in caught.value.hint


# Faults of the network.


def test_in_offline_mode_nothing_is_asked(hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for ask in (lambda: Hub().search("tiny"), lambda: Hub().repository(REPO)):
        with pytest.raises(HubOffline, match="HF_HUB_OFFLINE"):
            ask()
    assert hub_server.requests == []


def test_a_hub_that_is_not_there_is_offline(hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with HubServer() as gone:
        address = gone.endpoint
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(HubOffline) as caught:
        Hub().search("tiny")
    assert "cannot be reached" in caught.value.message
    assert "into ~/models" in caught.value.hint


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (Fault(where="api", status=429, retry_after="77"), RateLimited, "wait for 77 s"),
        (Fault(where="api", status=429, retry_after="9" * 400), RateLimited, "wait for over a day"),
        (Fault(where="api", status=503), HubError, "server error"),
        (Fault(where="api", page=b"<html>Welcome to the hotel</html>"), HubError, "login page"),
        (Fault(where="api", status=403), AccessDenied, "no access to"),
        (Fault(where="api", status=401), NotOnHub, "no repository"),
        (Fault(where="api", status=404), NotOnHub, "not found on"),
    ],
)
def test_what_the_hub_refuses_is_told_by_kind(
    hub_server: HubServer, fault: Fault, kind: type[HubError], words: str
) -> None:
    hub_server.add(REPO, {"a.gguf": b"1"})
    hub_server.fault(REPO, "", fault)
    with pytest.raises(kind, match=words) as caught:
        Hub().repository(REPO)
    assert type(caught.value) is kind
    assert caught.value.hint


def test_a_password_in_the_endpoint_is_not_shown(hub_server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub_server.endpoint.replace("://", "://user:secret@"))
    with pytest.raises(HubError) as caught:
        Hub().repository("some/missing")
    assert "secret" not in str(caught.value)
