"""Tests headers of models on the hub: read by ranges, kept, and read again only when they must be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, HubError, HubOffline, ModelDamaged
from cpuchat.models.gguf.header import GGUFHeader, read_header, read_model
from cpuchat.models.hub.client import HeaderCache, Hub
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


def test_a_header_that_was_read_is_kept_and_needs_no_hub_any_more(
    hub_server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_model_file(tmp_path / NAME, n_tokens=30_000)
    hub_server.add(REPO, {NAME: file})
    found = Hub().repository(REPO)
    Hub().header(found, found.models[0])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert same(Hub().header(found, found.models[0]), read_header(file))
    [kept] = paths.headers_dir().iterdir()
    assert kept.stat().st_size < read_header(file).data_offset


@pytest.mark.parametrize("damage", [b"no zlib", "cut", "other"])
def test_a_kept_header_that_is_damaged_is_read_again(
    hub_server: HubServer, tmp_path: Path, damage: bytes | str
) -> None:
    file = write_model_file(tmp_path / NAME)
    hub_server.add(REPO, {NAME: file})
    read()
    [kept] = paths.headers_dir().iterdir()
    if damage == "other":  # sound, but not this file's
        HeaderCache().put(hub_server.etag(REPO, NAME), b"GGUF of something else")
    else:
        kept.write_bytes(kept.read_bytes()[:-9] if isinstance(damage, str) else damage)
    assert same(read(), read_header(file))
    assert len(ranges(hub_server)) == 2
    assert same(read(), read_header(file))
    assert len(ranges(hub_server)) == 2


def test_the_headers_used_longest_ago_make_room_for_new_ones(tmp_path: Path) -> None:
    a, b, c = (letter * 64 for letter in "abc")
    kept = HeaderCache(tmp_path, keep=2)
    for age, etag in enumerate((a, b)):
        kept.put(etag, etag.encode())
        file = next(path for path in tmp_path.iterdir() if path.name.startswith(etag))
        os.utime(file, ns=(age, age))
    assert kept.get(a) == a.encode()  # used now, so b is the oldest
    kept.put(c, c.encode())
    assert [etag for etag in (a, b, c) if kept.get(etag) is not None] == [a, c]


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
    [
        Fault(cut_after=500_000),
        Fault(ignore_range=True, times=-1),
    ],
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
def test_what_cannot_be_read_is_a_typed_error_and_nothing_is_kept(
    hub_server: HubServer, tmp_path: Path, fault: Fault, kind: type[CpuchatError]
) -> None:
    hub_server.add(REPO, {NAME: write_model_file(tmp_path / NAME)})
    hub_server.fault(REPO, NAME, fault)
    with pytest.raises(kind):
        read()
    assert not paths.headers_dir().exists()
    hub_server.forget_faults()
    assert read().architecture == "llama"
