"""Tests what is to be expected of a repository's models: by their own headers, by their size where these cannot be
read."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.models.gguf.header import read_header
from cpuchat.models.hub.client import Hub
from cpuchat.models.hub.repository import choose_repo_model
from cpuchat.models.machine import Machine
from cpuchat.models.prediction import ModelPrediction, predict, predict_repository
from cpuchat.protocol.messages import LoadOptions
from tests.support.costs import reading
from tests.support.hub_server import Fault, HubServer

REPO = "some/Tiny-GGUF"
OPTIONS = LoadOptions(n_ctx=2048, kernels="llama.cpp")
MACHINE = Machine(available=8 << 30, total=16 << 30, profile=reading(35e9), source="measured")


def told(first: str = "") -> dict[str, ModelPrediction]:
    hub = Hub()
    repository = hub.repository(REPO)
    found = predict_repository(
        hub, repository, OPTIONS, MACHINE, first=choose_repo_model(repository, first) if first else None
    )
    return {predicted.model.name: predicted for predicted in found}


def test_a_model_on_the_hub_is_judged_as_the_same_file_here(hub_server: HubServer, tiny_model: Path) -> None:
    hub_server.add(REPO, {"Tiny-F32.gguf": tiny_model})
    assert told()["Tiny-F32"] == ModelPrediction(
        model=Hub().repository(REPO).models[0], prediction=predict(read_header(tiny_model), OPTIONS, MACHINE)
    )


def test_where_the_usual_header_cannot_be_read_the_next_one_is(hub_server: HubServer, tiny_model: Path) -> None:
    content = tiny_model.read_bytes()
    hub_server.add(REPO, {"Tiny-F16.gguf": content, "Tiny-Q8_0.gguf": content + bytes(1000)})
    hub_server.fault(REPO, "Tiny-Q8_0.gguf", Fault(status=500, times=-1))
    exact, unread = told().values()
    assert exact.model.name == "Tiny-F16" and exact.prediction.exact and not exact.problem
    assert not unread.prediction.exact and "server error" in unread.problem
    assert unread.prediction.need.kv == exact.prediction.need.kv
    assert unread.prediction.need.weights - exact.prediction.need.weights == pytest.approx(1000, abs=50)


def test_of_many_quantizations_one_header_is_read(hub_server: HubServer, tiny_model: Path) -> None:
    content = tiny_model.read_bytes()
    names = [f"Tiny-{name}.gguf" for name in ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q8_0", "BF16")]
    hub_server.add(REPO, {name: content + bytes(number) for number, name in enumerate(names)})
    found = told()
    assert len(found) == len(names)
    assert [one.model.name for one in found.values() if one.prediction.exact] == ["Tiny-Q4_K_M"]
    assert {name for name in names if hub_server.bytes_sent(name)} == {"Tiny-Q4_K_M.gguf"}
    assert {name for name, one in told("BF16").items() if one.prediction.exact} == {"Tiny-BF16"}


@pytest.mark.parametrize("is_there", [True, False])
def test_of_a_repository_without_end_a_few_headers_are_read(
    hub_server: HubServer, tiny_model: Path, is_there: bool
) -> None:
    content = tiny_model.read_bytes()
    hub_server.add(REPO, {f"m{n}-Q8_0.gguf": content for n in range(60)})
    if not is_there:
        for n in range(60):
            hub_server.fault(REPO, f"m{n}-Q8_0.gguf", Fault(where="hub", status=404, times=-1))
    assert len(told()) == 60
    asked = {request.file for request in hub_server.requests if request.file}
    assert len(asked) == (1 if is_there else 25)  # the same content is read once


def test_a_hub_that_asks_to_wait_is_not_asked_for_another_header(hub_server: HubServer) -> None:
    paths = [f"m{n}-Q8_0.gguf" for n in range(20)]
    hub_server.add(REPO, {path: path.encode() for path in paths})
    for path in paths:
        hub_server.fault(REPO, path, Fault(where="hub", status=429, times=-1))
    found = told()
    assert len(found) == 20
    assert [bool(one.problem) for one in found.values()].count(True) == 1
    assert len([request for request in hub_server.requests if request.file]) == 1


def test_without_a_hub_the_sizes_alone_are_told(hub_server: HubServer) -> None:
    hub_server.add(REPO, {"Tiny-F16.gguf": bytes(1000)})
    [predicted] = predict_repository(None, Hub().repository(REPO), OPTIONS, MACHINE)
    assert not predicted.prediction.exact and predicted.prediction.need.weights == 1000
