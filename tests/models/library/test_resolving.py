"""Tests what people call a model, and the file that is meant."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import pytest

from cpuchat.base.errors import ModelNotFound
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import DEMO_FILES
from tests.models.library.files import cached, part


def test_resolve_a_path(no_demo: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(cache=tmp_path / "none")
    assert library.resolve(str(model)) == library.resolve(f"file://{model}") == model
    assert library.resolve(str(model.parent)) == model
    monkeypatch.setenv("HOME", str(model.parent))
    assert library.resolve("~/m.gguf") == model
    monkeypatch.chdir(model.parent)
    assert library.resolve("m.gguf") == library.resolve("./m.gguf") == model  # from another folder, too
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ModelNotFound, match="no model"):
        library.resolve("m.gguf")
    parts = [part(tmp_path / f"p-0000{no}-of-00002.gguf", no, 2) for no in (1, 2)]
    assert library.resolve(str(parts[1])) == parts[0]
    with pytest.raises(ModelNotFound, match="has 0 models"):
        library.resolve(str(no_demo))
    (empty := tmp_path / "work" / "m").mkdir(parents=True)
    monkeypatch.chdir(empty.parent)
    assert Library([model.parent], cache=tmp_path / "none").resolve("m") == model  # no folder that is there by chance
    for spec in ("m", "./m"):
        with pytest.raises(ModelNotFound, match="has 0 models"):
            library.resolve(spec)
    for at in range(8):
        (no_demo / f"{at}").mkdir()
        (no_demo / f"{at}" / "m.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"has 8 models: (\d/m\.gguf, ){5}\d/m\.gguf and 2 more\."):
        library.resolve(str(no_demo))
    with pytest.raises(ModelNotFound, match=f"There is no file {no_demo}/gone.gguf"):
        library.resolve(f"{no_demo}/gone.gguf")


def test_resolve_the_demo_models(no_demo: Path, tmp_path: Path) -> None:
    library = Library(cache=tmp_path / "none")
    with pytest.raises(ModelNotFound, match="The file of demo is gone"):
        library.resolve("demo")
    for name, file in DEMO_FILES.items():
        (no_demo / file).touch()
        assert library.resolve(name) == library.resolve(name.upper()) == no_demo / file


def test_resolve_a_repository(no_demo: Path, tmp_path: Path, model: Path) -> None:
    cache = tmp_path / "hub"
    q8 = cached(cache, "Qwen/Qwen2.5-0.5B-GGUF", "qwen-q8_0.gguf", model)
    library = Library(cache=cache)
    assert library.resolve("Qwen/Qwen2.5-0.5B-GGUF") == q8
    k_m = cached(cache, "Qwen/Qwen2.5-0.5B-GGUF", "qwen-q4_k_m.gguf", model)
    told: list[str] = []
    assert library.resolve("Qwen/Qwen2.5-0.5B-GGUF", told.append) == k_m
    assert re.fullmatch(r"Qwen/Qwen2.5-0.5B-GGUF is \S+, one of 2 files. The other: \S+", told.pop())
    assert library.resolve("Qwen/Qwen2.5-0.5B-GGUF:Q8_0") == q8
    assert library.resolve("Qwen/Qwen2.5-0.5B-GGUF:q4_k_m") == k_m
    assert library.resolve("qwen/qwen2.5-0.5b-gguf") in (q8, k_m)
    assert library.resolve("qwen-q8_0") == library.resolve("QWEN-Q8_0.gguf") == q8
    assert library.resolve("Qwen/Qwen2.5-0.5B-GGUF:Q4_K") == k_m  # the only one that begins so
    with pytest.raises(ModelNotFound, match=r"not as Q5_0\. Available: qwen-q4_k_m, .*q8_0"):
        library.resolve("Qwen/Qwen2.5-0.5B-GGUF:Q5_0")
    with pytest.raises(ModelNotFound, match="models download Qwen/Other-GGUF"):
        library.resolve("Qwen/Other-GGUF")
    with pytest.raises(ModelNotFound, match=r"Did you mean qwen/qwen2\.5-0\.5b-gguf"):
        library.resolve("Qwen/Qwen2.5-0.5-GGUF")


def test_a_head_is_never_taken_for_the_model(no_demo: Path, tmp_path: Path, model: Path) -> None:
    head = cached(tmp_path, "o/n", "eagle3-m-Q8_0.gguf", model)
    cached(tmp_path, "o/n", "mtp-m-Q4_K_M.gguf", model)
    library = Library(cache=tmp_path)
    for spec in ("o/n", "o/n:Q8_0"):
        with pytest.raises(ModelNotFound, match=f"only its companion files. Download the model: .*{spec}"):
            library.resolve(spec)
    q6 = cached(tmp_path, "o/n", "m-Q6_K.gguf", model)
    assert library.resolve("o/n") == q6
    assert library.resolve("o/n:Q8_0") == q6  # as its header says
    with pytest.raises(ModelNotFound, match=r"not as Q4_K_M\. Available: m-Q6_K\."):
        library.resolve("o/n:Q4_K_M")
    assert library.resolve("O/N") == q6  # another way to write it: found by its name
    assert library.resolve(str(head)) == head
    assert library.resolve(str(q6.parent)) == q6


@pytest.mark.parametrize("spec", ["", "a" * 5000, "models--x/../../etc", "\0"])
def test_odd_specifications_are_refused(no_demo: Path, tmp_path: Path, spec: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        Library(cache=tmp_path / "none").resolve(spec)
    assert spec or "Did you mean" not in caught.value.hint


def test_a_very_deep_folder_ends_no_search(no_demo: Path, tmp_path: Path, model: Path) -> None:
    """`os.walk` of Python 3.11 calls itself once a level: RecursionError."""
    (folder := tmp_path / "models").mkdir()
    there = folder / model.name
    there.write_bytes(model.read_bytes())
    with contextlib.chdir(folder):
        for _ in range(1500):
            Path("d").mkdir()
            os.chdir("d")
    try:
        assert Library(cache=tmp_path / "none").resolve(str(folder)) == there
        assert [one.path for one in Library([folder], cache=tmp_path / "none").local_models()] == [there]
    finally:  # neither shutil nor pytest can delete it
        with contextlib.chdir(folder):
            for _ in range(1500):
                os.chdir("d")
            for _ in range(1500):
                os.chdir("..")
                Path("d").rmdir()
