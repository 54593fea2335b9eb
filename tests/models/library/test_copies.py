"""Tests caches whose links have become files: by `cp -rL`, on file systems without links, as hard links."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from cpuchat.models.library.deleting import delete
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import LocalModel
from tests.models.library.files import REVISIONS, cached
from tests.models.library.test_verifying import flip_a_bit

pytestmark = pytest.mark.usefixtures("no_demo")


def copied(cache: Path, out: Path) -> Path:
    """Copy a cache with what its links lead to in place of the links."""
    return Path(shutil.copytree(cache, out, symlinks=False))


def only(cache: Path) -> LocalModel:
    [model] = Library(cache=cache).local_models()
    return model


@pytest.fixture
def copy(tmp_path: Path, model: Path) -> Path:
    """A copied cache with one model in two revisions."""
    for number, revision in enumerate(REVISIONS):
        cached(tmp_path / "hub", "o/n", "Q8_0/m.gguf", model, revision, main=not number, tail="same")
    return copied(tmp_path / "hub", tmp_path / "copy")


def test_it_is_listed_once_and_verified(copy: Path) -> None:
    model = only(copy)
    assert (model.state, model.repo) == ("", "o/n")
    assert Library(cache=copy).verify(model).words == "SHA-256 matches"


@pytest.mark.parametrize("place", ["snapshots", "blobs"])
def test_damage_of_the_copy_is_found_and_that_of_the_blob_does_not_matter(place: str, copy: Path) -> None:
    model = only(copy)
    flip_a_bit(model.path if place == "snapshots" else next((copy / "models--o--n" / "blobs").iterdir()))
    assert only(copy).path == model.path
    found = Library(cache=copy).verify(model)
    assert found.state == ("damaged" if place == "snapshots" else "verified")


def test_deleting_frees_the_copies_and_the_blob(copy: Path) -> None:
    library = Library(cache=copy)
    plan = library.deletion(only(copy))
    assert plan.freed == sum(
        file.stat().st_size for file in copy.rglob("*") if file.is_file() and "refs" not in file.parts
    )
    assert (plan.stays, delete(plan)) == ((), plan.freed)
    assert list(copy.rglob("*")) == []


def test_hard_links_count_once(tmp_path: Path, model: Path) -> None:
    link = cached(tmp_path, "o/n", "m.gguf", model)
    blob = link.resolve()
    link.unlink()
    os.link(blob, link)
    library = Library(cache=tmp_path)
    assert library.verify(only(tmp_path)).state == "verified"
    plan = library.deletion(only(tmp_path))
    assert (plan.freed, plan.stays) == (blob.stat().st_size, ())
    delete(plan)
    assert not blob.exists() and not link.exists()


def test_a_file_without_a_blob_is_no_unfinished_download_and_is_said_to_be_unchecked(
    tmp_path: Path, model: Path
) -> None:
    link = cached(tmp_path, "o/n", "m.gguf", model)
    link.resolve().replace(link)
    library = Library(cache=tmp_path)
    found = library.verify(only(tmp_path))
    assert (only(tmp_path).state, found.state) == ("", "unchecked")
    assert "no checksum known" in found.words and "not in the Hugging Face cache" not in found.words
    delete(library.deletion(only(tmp_path)))
    assert library.local_models() == []


def test_two_copies_of_one_size_have_each_its_blob(tmp_path: Path, model: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        cached(tmp_path / "hub", "o/n", name, model)
    copy = copied(tmp_path / "hub", tmp_path / "copy")
    library = Library(cache=copy)
    assert [library.verify(one).state for one in library.local_models()] == ["verified"] * 2
    delete(library.deletion(library.local_models()[0]))
    assert library.verify(only(copy)).state == "verified"
    assert len(list((copy / "models--o--n" / "blobs").iterdir())) == 1


@pytest.mark.parametrize("age", [10.0, -10.0])
def test_a_download_to_a_folder_is_verified_by_its_record_unless_it_was_changed_since(
    age: float, tmp_path: Path, model: Path
) -> None:
    content = cached(tmp_path / "hub", "o/n", "m.gguf", model).resolve()
    file = tmp_path / "folder" / "Q8_0" / "m.gguf"
    record = tmp_path / "folder" / ".cache/huggingface/download/Q8_0/m.gguf.metadata"
    for one in (file, record):
        one.parent.mkdir(parents=True)
    shutil.copy(content, file)
    record.write_text(f"{REVISIONS[0]}\n{content.name}\n{time.time() + age}\n")
    library = Library([tmp_path / "folder"], cache=tmp_path / "none")
    [found] = library.local_models()
    assert library.verify(found).state == ("verified" if age > 0 else "unchecked")


def test_a_link_to_a_content_of_ollama_is_verified_by_its_name(tmp_path: Path, model: Path) -> None:
    content = cached(tmp_path / "hub", "o/n", "m.gguf", model).resolve()
    blob = tmp_path / "ollama" / "blobs" / f"sha256-{content.name}"
    blob.parent.mkdir(parents=True)
    shutil.copy(content, blob)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "m.gguf").symlink_to(blob)
    library = Library([tmp_path / "folder"], cache=tmp_path / "none")
    [found] = library.local_models()
    assert library.verify(found).state == "verified"


def test_what_macos_keeps_beside_a_file_is_no_model(tmp_path: Path, model: Path) -> None:
    shutil.copy(model, tmp_path / "m.gguf")
    (tmp_path / "._m.gguf").write_bytes(b"\x00\x05\x16\x07" + bytes(4092))
    (tmp_path / "._mmproj-m.gguf").write_bytes(b"\x00\x05\x16\x07" + bytes(4092))
    [found] = Library([tmp_path], cache=tmp_path / "none").local_models()
    assert (found.path.name, found.projector) == ("m.gguf", None)
    assert Library().resolve(str(tmp_path)) == found.path
