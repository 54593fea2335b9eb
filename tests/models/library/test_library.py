"""Tests finding models: the package, the Hugging Face cache as its own library lays it out, the user's folders."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from cpuchat.models.gguf.header import read_header
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import hub_cache
from tests.models.library.files import REVISIONS, cached, part
from tests.support.tiny_gguf import finish

pytestmark = pytest.mark.usefixtures("no_demo")


def test_the_cache_is_read_as_its_library_reads_it(tmp_path: Path, model: Path) -> None:
    from huggingface_hub import scan_cache_dir

    cache = tmp_path / "hub"
    first = cached(cache, "some-one/a-b-GGUF", "a-Q8_0.gguf", model)
    nested = cached(cache, "some-one/a-b-GGUF", "Q4_K_M/a-Q4_K_M.gguf", model)
    cached(cache, "some-one/a-b-GGUF", "README.md", model)
    cached(cache, "some-one/a-b-GGUF", "mmproj-a-F16.gguf", model)
    repos = {repo.repo_id: repo for repo in scan_cache_dir(cache).repos}
    models = Library(cache=cache).local_models()
    assert {m.repo for m in models} == set(repos) == {"some-one/a-b-GGUF"}
    assert {m.path for m in models} == {first, nested}
    files = {file.file_path for revision in repos["some-one/a-b-GGUF"].revisions for file in revision.files}
    assert {m.path for m in models} <= files
    [found] = [m for m in models if m.path == first]
    assert (found.source, found.architecture, found.quantization) == ("huggingface", "qwen2", "Q8_0")
    assert found.name == "synthetic tiny Q8_0"
    assert found.size == first.stat().st_size
    assert found.n_params > 2_000_000
    assert found.damaged is None
    assert found.projector == first.with_name("mmproj-a-F16.gguf")
    assert (found.parts, found.has_template, found.last_used) == (1, True, 0.0)


def test_the_current_revision_wins(tmp_path: Path, model: Path) -> None:
    cache = tmp_path / "hub"
    new = cached(cache, "o/n", "m.gguf", model, REVISIONS[0])
    cached(cache, "o/n", "m.gguf", model, REVISIONS[1], main=False)
    old = cached(cache, "o/n", "gone.gguf", model, REVISIONS[1], main=False)
    assert {m.path for m in Library(cache=cache).local_models()} == {new, old}


def test_the_cache_is_where_its_library_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    code = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    for name, value in (("XDG_CACHE_HOME", "/c"), ("HF_HOME", "$HOME/z"), ("HUGGINGFACE_HUB_CACHE", "~/y")):
        monkeypatch.setenv(name, value)  # each goes before those that are set already
        theirs = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert str(hub_cache()) == theirs.stdout.strip()


def test_folders_are_searched_deep_and_circles_end(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "models"
    (folder / "deep" / "er").mkdir(parents=True)
    deep = Path(shutil.copy(model, folder / "deep" / "er" / "deep.gguf"))
    (folder / "deep" / "circle").symlink_to(folder)
    (folder / "deep" / "er" / "again.gguf").symlink_to(deep)
    (folder / ".hidden").mkdir()
    shutil.copy(model, folder / ".hidden" / "h.gguf")
    part(folder / "big-00001-of-00002.gguf", 1, 2)
    part(folder / "big-00002-of-00002.gguf", 2, 2)
    (folder / "notes.txt").write_text("no model")
    (folder / "broken.gguf").write_bytes(model.read_bytes()[:-5000])
    (folder / "gone.gguf").symlink_to(folder / "nowhere")
    models = {m.path.name: m for m in Library([str(folder), folder], cache=tmp_path / "none").local_models()}
    assert set(models) - {"deep.gguf", "again.gguf"} == {"big-00001-of-00002.gguf", "broken.gguf", "gone.gguf"}
    assert len(models) == 4
    assert all(m.source == "folder" for m in models.values())
    big = models["big-00001-of-00002.gguf"]
    assert (big.n_params, big.parts, big.has_template) == (256, 2, False)
    assert "truncated" in (models["broken.gguf"].damaged or "")
    assert models["gone.gguf"].damaged


@pytest.mark.parametrize(("architecture", "layer", "n_heads"), [("eagle3", 0, 0), ("qwen35", 24, 1)])
def test_a_head_in_a_file_of_its_own_is_listed_as_one(
    tmp_path: Path, model: Path, architecture: str, layer: int, n_heads: int
) -> None:
    """Whatever its name: a plain one is that of a model."""
    writer = reference.GGUFWriter(tmp_path / "m-Q8_0.gguf", architecture)
    writer.add_block_count(layer + 1)
    if n_heads:
        writer.add_uint32(f"{architecture}.nextn_predict_layers", n_heads)
    writer.add_tensor(f"blk.{layer}.attn_k.weight", np.zeros((4, 32), np.float32))
    finish(writer)
    library = Library([tmp_path], cache=tmp_path / "none")
    [only] = [found for found in library.local_models() if found.path.name == "m-Q8_0.gguf"]
    assert (only.kind, only.architecture) == ("head", architecture)
    assert "draft head" in (only.damaged or "")
    assert library.verify(only).state == "unchecked"
    assert read_header(only.path).other == "a draft head"


def test_what_is_missing_is_said(tmp_path: Path, model: Path) -> None:
    cache, folder = tmp_path / "hub", tmp_path / "folder"
    folder.mkdir()
    (gone := cached(cache, "o/n", "gone.gguf", model)).resolve().unlink()
    for no in (2, 3):
        part(folder / f"a-0000{no}-of-00003.gguf", no, 3)
    part(folder / "b-00001-of-00002.gguf", 1, 2)
    found = {m.path.name: m for m in Library([folder], cache=cache).local_models()}
    assert {name: m.damaged for name, m in found.items()} == {
        "gone.gguf": f"gone.gguf is a broken link: {gone.readlink()} is missing.",
        "a-00002-of-00003.gguf": "1 of 3 parts are missing (a-00001-of-00003.gguf).",
        "b-00001-of-00002.gguf": "1 of 2 parts are missing (b-00002-of-00002.gguf).",
    }
    assert found["a-00002-of-00003.gguf"].parts == 3


def test_a_folder_around_the_cache_does_not_make_its_files_the_users(tmp_path: Path, model: Path) -> None:
    cache = tmp_path / "hub"
    cached(cache, "o/n", "m.gguf", model)
    cached(cache, "o/n", "m.gguf", model, REVISIONS[1], main=False)
    beside = Path(shutil.copy(model, cache / "beside.gguf"))
    found = Library([tmp_path], cache=cache).local_models()
    assert [(m.source, m.path.name) for m in found] == [("huggingface", "m.gguf"), ("folder", beside.name)]


def test_headers_are_read_once(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    path = Path(shutil.copy(model, folder / "m.gguf"))
    before = path.stat()
    [first] = Library([folder], cache=tmp_path / "none").local_models()
    # As long and as old as before: only who reads the header again sees that it is none now.
    path.write_bytes(bytes(before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert Library([folder], cache=tmp_path / "none").local_models() == [first]
    path.touch()
    assert Library([folder], cache=tmp_path / "none").local_models()[0].damaged
