"""Tests how the parts of a split model are found: by links to one of them, in capitals, with others missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.base.errors import ModelDamaged, ModelNotFound
from cpuchat.models.gguf.header import model_files, read_model
from cpuchat.models.library.library import Library
from tests.models.library.files import cached, part

NAMES = ("s-00001-of-00002.gguf", "s-00002-of-00002.gguf")


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """A split model in a folder of its own."""
    (tmp_path / "store").mkdir()
    return [part(tmp_path / "store" / name, no, 2) for no, name in enumerate(NAMES, 1)]


@pytest.mark.parametrize(("target", "name"), [(0, NAMES[0]), (1, "short"), (0, "s.gguf"), (1, NAMES[1])])
def test_a_link_to_one_part_finds_the_others_beside_its_target(
    target: int, name: str, parts: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / name
    link.symlink_to(parts[target])
    again = tmp_path / f"again-{name}"
    again.symlink_to(Path("links", name))
    for path in (link, again):
        assert model_files(path) == parts
        assert len(read_model(path).tensors) == 2
        assert Library().resolve(str(path)) == parts[0]


def test_a_link_into_a_snapshot_finds_its_siblings_there(tmp_path: Path) -> None:
    inside = [cached(tmp_path / "hub", "o/n", name, part(tmp_path / "p", no, 2)) for no, name in enumerate(NAMES, 1)]
    link = tmp_path / "m.gguf"
    link.symlink_to(inside[0])
    assert [path.name for path in model_files(link)] == list(NAMES)
    assert len(read_model(link).tensors) == 2


def test_a_part_that_is_missing_beside_the_target_is_named_with_its_folder(parts: list[Path], tmp_path: Path) -> None:
    parts[1].unlink()
    link = tmp_path / NAMES[0]
    link.symlink_to(parts[0])
    with pytest.raises(ModelDamaged, match=r"1 of 2 parts are missing \(s-00002-of-00002.gguf\)") as caught:
        read_model(link)
    assert str(parts[0].parent) in caught.value.hint


@pytest.mark.parametrize("spelling", ["S-0000{}-OF-00002.GGUF", "s-0000{}-Of-00002.gguf"])
def test_capitals_are_kept(spelling: str, tmp_path: Path) -> None:
    parts = [part(tmp_path / spelling.format(no), no, 2) for no in (1, 2)]
    assert model_files(parts[1]) == parts
    assert len(read_model(parts[1]).tensors) == 2
    parts[0].unlink()
    with pytest.raises(ModelDamaged) as caught:
        read_model(parts[1])
    assert spelling.format(1) in caught.value.message


def test_parts_in_different_spellings_are_one_model(tmp_path: Path) -> None:
    parts = [part(tmp_path / "a-00001-of-00002.gguf", 1, 2), part(tmp_path / "A-00002-OF-00002.GGUF", 2, 2)]
    assert model_files(parts[0]) == parts
    [model] = [one for one in Library([tmp_path], cache=tmp_path / "hub").local_models() if one.source == "folder"]
    assert model.parts == 2


@pytest.mark.parametrize("name", ["short.gguf", "s-00001-of-00003.gguf"])
def test_another_name_is_told_from_a_missing_part(name: str, parts: list[Path], tmp_path: Path) -> None:
    file = parts[0].rename(tmp_path / name)
    with pytest.raises(ModelDamaged, match="one of 2 parts, but its name does not say which") as caught:
        read_model(file)
    assert "*-00001-of-00002.gguf" in caught.value.hint and "llama-gguf-split" in caught.value.hint


def test_a_broken_link_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").symlink_to(tmp_path / "gone.gguf")
    with pytest.raises(ModelNotFound, match=r"is a broken link: its target .*gone.gguf does not exist"):
        Library().resolve(str(tmp_path / "m.gguf"))
