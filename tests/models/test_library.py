"""Finding models: the package, the Hugging Face cache as its own library lays it out, the user's folders."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from cpuchat import paths
from cpuchat.errors import ModelNotFound
from cpuchat.models.library import DEMO_FILES, Library, hub_cache
from cpuchat.models.synthetic import write_model

REVISIONS = ("a" * 40, "b" * 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", "tiny", "Q8_0")


@pytest.fixture
def no_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in place of the package's demo models."""
    monkeypatch.setattr(paths, "demo_dir", lambda: tmp_path / "demo")
    (tmp_path / "demo").mkdir()
    return tmp_path / "demo"


def cached(cache: Path, repo: str, name: str, source: Path, revision: str = REVISIONS[0], main: bool = True) -> Path:
    """Put `source` into the cache as a download does: a blob, and a link to it."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    blob = folder / "blobs" / f"{abs(hash((name, revision))):064x}"
    link = folder / "snapshots" / revision / name
    for parent in (blob.parent, link.parent, folder / "refs"):
        parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, blob)
    link.symlink_to(os.path.relpath(blob, link.parent))
    if main:
        (folder / "refs" / "main").write_text(revision)
    return link


def part(path: Path, no: int, count: int) -> Path:
    writer = reference.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", count)
    writer.add_block_count(1)
    writer.add_tensor(f"blk.0.part{no}.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_cache_is_read_as_its_library_reads_it(no_demo: Path, tmp_path: Path, model: Path) -> None:
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
    found = models[0]
    assert (found.source, found.architecture, found.quantization) == ("huggingface", "qwen2", "Q8_0")
    assert found.name == "synthetic tiny Q8_0"
    assert found.size == first.stat().st_size
    assert found.n_params > 2_000_000
    assert found.damaged is None


def test_the_current_revision_wins(no_demo: Path, tmp_path: Path, model: Path) -> None:
    cache = tmp_path / "hub"
    new = cached(cache, "o/n", "m.gguf", model, REVISIONS[0])
    cached(cache, "o/n", "m.gguf", model, REVISIONS[1], main=False)
    old = cached(cache, "o/n", "gone.gguf", model, REVISIONS[1], main=False)
    assert {m.path for m in Library(cache=cache).local_models()} == {new, old}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HF_HUB_CACHE": "/x/hub"},
        {"HUGGINGFACE_HUB_CACHE": "~/y"},
        {"HF_HOME": "$HOME/z"},
        {"XDG_CACHE_HOME": "/c"},
    ],
)
def test_the_cache_is_where_its_library_has_it(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
    environment = {k: v for k, v in os.environ.items() if k not in names} | variables
    code = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    theirs = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(hub_cache()) == theirs.stdout.strip()


def test_folders_are_searched_deep_and_circles_end(no_demo: Path, tmp_path: Path, model: Path) -> None:
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
    assert models["big-00001-of-00002.gguf"].n_params == 256
    assert "cut short" in (models["broken.gguf"].damaged or "")
    assert models["gone.gguf"].damaged


def test_what_is_no_language_model_is_left_out(no_demo: Path, tmp_path: Path) -> None:
    for name, architecture in (("vision.gguf", "clip"), ("vocabulary.gguf", "llama")):
        writer = reference.GGUFWriter(tmp_path / name, architecture)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    [only] = Library([tmp_path], cache=tmp_path / "none").local_models()
    assert only.path.name == "vocabulary.gguf"
    assert "no weights" in (only.damaged or "")


def test_a_changed_file_is_read_again(no_demo: Path, tmp_path: Path, model: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    library = Library([tmp_path], cache=tmp_path / "none")
    assert library.local_models()[0].damaged
    shutil.copy(model, path)
    assert library.local_models()[0].damaged is None


def test_resolve_a_path(no_demo: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(cache=tmp_path / "none")
    assert library.resolve(str(model)) == model
    assert library.resolve(str(model.parent)) == model
    monkeypatch.setenv("HOME", str(model.parent))
    assert library.resolve("~/m.gguf") == model
    parts = [part(tmp_path / f"p-0000{no}-of-00002.gguf", no, 2) for no in (1, 2)]
    assert library.resolve(str(parts[1])) == parts[0]
    with pytest.raises(ModelNotFound, match="holds 0 models"):
        library.resolve(str(no_demo))


def test_resolve_the_demo_models(no_demo: Path, tmp_path: Path) -> None:
    library = Library(cache=tmp_path / "none")
    with pytest.raises(ModelNotFound, match="demo model"):
        library.resolve("demo")
    for name, file in DEMO_FILES.items():
        (no_demo / file).touch()
        assert library.resolve(name) == no_demo / file


def test_resolve_a_repository(no_demo: Path, tmp_path: Path, model: Path) -> None:
    cache = tmp_path / "hub"
    q8 = cached(cache, "Qwen/Qwen2.5-0.5B-GGUF", "qwen-q8_0.gguf", model)
    library = Library(cache=cache)
    assert library.resolve("Qwen/Qwen2.5-0.5B-GGUF") == q8
    k_m = cached(cache, "Qwen/Qwen2.5-0.5B-GGUF", "qwen-q4_k_m.gguf", model)
    assert library.resolve("Qwen/Qwen2.5-0.5B-GGUF") == k_m
    assert library.resolve("Qwen/Qwen2.5-0.5B-GGUF:Q8_0") == q8
    assert library.resolve("Qwen/Qwen2.5-0.5B-GGUF:q4_k_m") == k_m
    assert library.resolve("qwen/qwen2.5-0.5b-gguf") in (q8, k_m)
    assert library.resolve("qwen-q8_0") == library.resolve("QWEN-Q8_0.gguf") == q8
    with pytest.raises(ModelNotFound, match=r"not as Q4_K\. There is .*qwen-q8_0\.gguf"):
        library.resolve("Qwen/Qwen2.5-0.5B-GGUF:Q4_K")
    with pytest.raises(ModelNotFound, match="hf download Qwen/Other-GGUF"):
        library.resolve("Qwen/Other-GGUF")
    with pytest.raises(ModelNotFound, match=r"Did you mean qwen/qwen2\.5-0\.5b-gguf"):
        library.resolve("Qwen/Qwen2.5-0.5-GGUF")


@pytest.mark.parametrize("spec", ["", "nothing", "../..//x", "a" * 5000, "models--x/../../etc", "\0", "/no/such.gguf"])
def test_odd_specifications_are_refused(no_demo: Path, tmp_path: Path, spec: str) -> None:
    with pytest.raises(ModelNotFound):
        Library(cache=tmp_path / "none").resolve(spec)


def test_importing_the_library_stays_cheap() -> None:
    code = "import sys, cpuchat.models.library; print([m for m in ('numpy', 'huggingface_hub') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
