"""Tests headers of models on the hub: read by ranges, kept, and read again only when they must be."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.base.errors import CpuchatError, HubError, HubOffline, ModelDamaged
from cpuchat.models.gguf.header import GGUFHeader, read_header, read_model
from cpuchat.models.hub.client import Hub
from tests.models.hub.model_files import write_model_file
from tests.support.hub_server import Fault, HubServer

REPO = "some/Tiny-GGUF"
NAME = "Tiny-F32.gguf"
MIB = 1 << 20


def read(hub: Hub | None = None) -> GGUFHeader:
    """Return the header of the only model of the repository."""
    hub = hub or Hub()
    found = hub.repository(REPO)
    return hub.header(found, found.models[0])


def same(one: GGUFHeader, other: GGUFHeader) -> bool:
    """Return whether both headers are equal, except for the file's path."""

    def told(header: GGUFHeader) -> object:
        metadata = {key: list(value) if hasattr(value, "first") else value for key, value in header.metadata.items()}
        return metadata, header.tensors, header.data_offset, header.file_size, header.version, header.alignment

    return told(one) == told(other)


def ranges(server: HubServer) -> list[str]:
    return [request.range for request in server.requests if request.host == "content"]


def test_a_long_header_is_read_in_growing_pieces_that_do_not_overlap(hub_server: HubServer, tmp_path: Path) -> None:
    file = write_model_file(tmp_path / NAME, n_tokens=70_000)
    hub_server.add(REPO, {NAME: file})
    assert same(read(), read_header(file))
    assert ranges(hub_server) == [
        f"bytes=0-{MIB - 1}",
        f"bytes={MIB}-{2 * MIB - 1}",
        f"bytes={2 * MIB}-{file.stat().st_size - 1}",
    ]


def test_the_last_headers_are_kept(hub_server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write_model_file(tmp_path / f"{number}-F32.gguf", n_tokens=300 + number) for number in range(9)]
    hub_server.add(REPO, {file.name: file for file in files})
    hub = Hub()
    found = hub.repository(REPO)
    read = [hub.header(found, model) for model in found.models]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [hub.header(found, model) for model in found.models[1:]] == read[1:]
    with pytest.raises(HubOffline):
        hub.header(found, found.models[0])


def test_a_split_model_has_the_tensors_of_all_parts(hub_server: HubServer, tmp_path: Path) -> None:
    names = [f"Big-F32-{part:05d}-of-00003.gguf" for part in (1, 2, 3)]
    files = {name: write_model_file(tmp_path / name, part=part, parts=3) for part, name in enumerate(names, 1)}
    hub_server.add(REPO, {f"F32/{name}": file for name, file in files.items()})
    header = read()
    assert [tensor.name for tensor in header.tensors] == [f"blk.{n}.attn_k.weight" for n in range(3)]
    assert same(header, read_model(files[names[0]]))


def test_a_part_under_the_name_of_a_whole_model_is_refused(hub_server: HubServer, tmp_path: Path) -> None:
    hub_server.add(REPO, {NAME: write_model_file(tmp_path / NAME, part=1, parts=2)})
    with pytest.raises(ModelDamaged, match="parts are missing"):
        read()


# Faults on the way.


@pytest.mark.parametrize(
    "fault",
    [Fault(cut_after=500_000), Fault(ignore_range=True, times=-1)],
    ids=["cut in the middle", "no ranges at all"],
)
def test_a_header_is_read_all_the_same(hub_server: HubServer, tmp_path: Path, fault: Fault) -> None:
    file = write_model_file(tmp_path / NAME, n_tokens=70_000)
    hub_server.add(REPO, {NAME: file})
    hub_server.fault(REPO, NAME, fault)
    assert same(read(), read_header(file))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (Fault(cut_after=100, times=-1), HubOffline),
        (Fault(page=b"<html>" + b"x" * 2 * MIB, times=-1), HubError),
        (Fault(content=b"GGUF too short"), HubError),
        (Fault(status=416), HubError),
    ],
    ids=["cut for ever", "a web page", "a short file", "416"],
)
def test_what_cannot_be_read_is_a_typed_error(
    hub_server: HubServer, tmp_path: Path, fault: Fault, kind: type[CpuchatError]
) -> None:
    hub_server.add(REPO, {NAME: write_model_file(tmp_path / NAME)})
    hub_server.fault(REPO, NAME, fault)
    with pytest.raises(kind):
        read()
    hub_server.forget_faults()
    assert read().architecture == "llama"
