"""Tests what deleting takes away, what it leaves, and that it never leaves the places it may touch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir
from huggingface_hub.utils import WeakFileLock

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError
from cpuchat.models.library.deleting import Deletion, delete
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import LocalModel
from tests.models.library.files import REVISIONS, cached, part, share

pytestmark = pytest.mark.usefixtures("no_demo")


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """An empty Hugging Face cache."""
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


def named(library: Library, name: str) -> LocalModel:
    return next(model for model in library.local_models() if model.path.name == name)


def deletion(library: Library, name: str) -> Deletion:
    return library.deletion(named(library, name))


def used(folder: Path) -> int:
    """Return the bytes of all files below `folder`, shared content counted once."""
    books = (".refs", ".lock")  # of the store that repositories share
    found = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "refs"]
    found = [path for path in found if path.suffix not in books]
    files = {path.stat().st_ino: path.stat().st_size for path in found}
    return sum(files.values())


def freed(folder: Path, plan: Deletion) -> int:
    """Carry out `plan`; returns the bytes that were freed, which must equal the forecast."""
    before = used(folder)
    assert delete(plan) == plan.freed
    assert before - used(folder) == plan.freed
    return plan.freed


def test_the_last_model_of_a_repository_leaves_nothing(hub: Path, model: Path) -> None:
    library = Library(cache=hub)
    link = cached(hub, "o/n", "Q8_0/m.gguf", model)
    (hub / "models--o--n" / ".no_exist" / REVISIONS[0]).mkdir(parents=True)
    (hub / "models--o--n" / ".no_exist" / REVISIONS[0] / "config.json").touch()
    size, blob = link.stat().st_size, link.resolve()
    plan = deletion(library, "m.gguf")
    assert (plan.files, plan.freed, plan.stays, plan.refused) == ((blob, link), size, (), "")
    assert delete(plan) == size
    assert list(hub.iterdir()) == []
    assert library.local_models() == []


def test_revisions_that_share_a_blob_lose_it_together(hub: Path, model: Path) -> None:
    library = Library(cache=hub)
    new = cached(hub, "o/n", "m.gguf", model, REVISIONS[0], tail="same")
    old = cached(hub, "o/n", "m.gguf", model, REVISIONS[1], main=False, tail="same")
    cached(hub, "o/n", "README.md", model, REVISIONS[1], main=False)
    plan = deletion(library, "m.gguf")
    assert set(plan.files) == {new.resolve(), new, old}
    assert freed(hub, plan) > 2_000_000
    assert library.local_models() == []
    assert scan_cache_dir(hub).warnings == []  # refs/main named a revision that is gone
    assert not (hub / "models--o--n" / "refs").exists()


def test_an_older_version_stays_and_is_seen_from_then_on(hub: Path, model: Path) -> None:
    library = Library(cache=hub)
    cached(hub, "o/n", "m.gguf", model, REVISIONS[0])
    old = cached(hub, "o/n", "m.gguf", model, REVISIONS[1], main=False)
    plan = deletion(library, "m.gguf")
    assert plan.stays == ("Another revision's version of m.gguf stays.",)
    freed(hub, plan)
    assert [m.path for m in library.local_models()] == [old]


def test_a_blob_under_another_name_stays(hub: Path, model: Path) -> None:
    library = Library(cache=hub)
    cached(hub, "o/n", "a.gguf", model, tail="same")
    cached(hub, "o/n", "b.gguf", model, tail="same")
    plan = deletion(library, "a.gguf")
    assert (len(plan.files), plan.freed) == (1, 0)
    assert plan.stays == ("The content of a.gguf stays: b.gguf shares it.",)
    assert freed(hub, plan) == 0
    assert [m.path.name for m in library.local_models()] == ["b.gguf"]


def test_a_link_without_content_can_be_deleted(hub: Path, model: Path) -> None:
    link = cached(hub, "o/n", "m.gguf", model)
    link.resolve().unlink()
    assert freed(hub, deletion(Library(cache=hub), "m.gguf")) == 0
    assert list(hub.iterdir()) == []


def test_what_another_program_downloads_just_now_stays(hub: Path) -> None:
    library = Library(cache=hub)
    name = "s-00001-of-00002.gguf"
    cached(hub, "o/n", name, part(hub / name, 1, 2))
    (hub / name).unlink()
    lock = hub / ".locks" / "models--o--n" / f"{'1' * 64}.lock"
    lock.parent.mkdir(parents=True)
    with WeakFileLock(lock):  # of the other part
        assert "being downloaded" in deletion(library, name).refused
    assert freed(hub, deletion(library, name)) > 0


def test_tidying_follows_no_link_out_of_the_cache(hub: Path, tmp_path: Path, model: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    for precious in (outside / "letter.txt", outside / "deep" / "empty"):
        precious.touch()
    for name in ("refs", ".no_exist"):
        cached(hub, "o/n", "m.gguf", model, main=False)
        (hub / "models--o--n" / "refs").rmdir()
        (hub / "models--o--n" / name).symlink_to(outside)
        delete(deletion(Library(cache=hub), "m.gguf"))
        assert sorted(path.name for path in outside.rglob("*")) == ["deep", "empty", "letter.txt"]
        shutil.rmtree(hub / "models--o--n")


def test_all_parts_of_a_split_model_go(tmp_path: Path) -> None:
    cache, folder = tmp_path / "hub", tmp_path / "folder"
    folder.mkdir()
    names = [f"s-0000{no}-of-00003.gguf" for no in (1, 2, 3)]
    for no, name in enumerate(names, 1):
        cached(cache, "o/n", name, part(folder / name, no, 3))
    (folder / names[1]).unlink()  # a model that lost a part is deleted, too
    (folder / "other.txt").touch()
    library = Library([folder], cache=cache)
    plans = [library.deletion(model) for model in library.local_models()]
    assert [len(plan.files) for plan in plans] == [6, 2]
    for plan in plans:
        freed(tmp_path, plan)
    assert [path.name for path in folder.iterdir()] == ["other.txt"]
    assert list(cache.iterdir()) == []


def test_a_link_in_a_folder_goes_and_its_content_stays(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    mine = Path(shutil.copy(model, tmp_path / "mine.gguf"))
    (folder / "link.gguf").symlink_to(mine)
    plan = deletion(Library([folder], cache=tmp_path / "none"), "link.gguf")
    assert (plan.files, plan.freed) == ((folder / "link.gguf",), 0)
    assert plan.stays == (f"link.gguf is a link: its target {mine} stays.",)
    freed(tmp_path, plan)
    assert mine.exists()
    assert not os.path.lexists(folder / "link.gguf")


def test_nothing_outside_of_the_folders_is_deleted(tmp_path: Path, model: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    shutil.copy(model, outside / "m.gguf")
    (folder / "door").symlink_to(outside)
    plan = deletion(Library([folder], cache=tmp_path / "none"), "m.gguf")
    assert "is outside the Hugging Face cache" in plan.refused
    assert plan.files == ()
    with pytest.raises(CpuchatError, match="was not deleted"):
        delete(plan)
    assert (outside / "m.gguf").exists()


def test_a_folder_that_was_exchanged_meanwhile_is_left_alone(tmp_path: Path, model: Path) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    for place in (folder / "deep", outside):
        place.mkdir(parents=True)
        shutil.copy(model, place / "m.gguf")
    plan = deletion(Library([folder], cache=tmp_path / "none"), "m.gguf")
    shutil.rmtree(folder / "deep")
    (folder / "deep").symlink_to(outside)
    with pytest.raises(CpuchatError, match="is outside the Hugging Face cache"):
        delete(plan)
    assert (outside / "m.gguf").exists()


def test_what_repositories_share_stays_and_is_said_to_stay(hub: Path, model: Path) -> None:
    content = share(cached(hub, "o/n", "m.gguf", model), "c" * 64)
    plan = deletion(Library(cache=hub), "m.gguf")
    assert "`hf cache prune` frees it" in plan.stays[0]
    assert freed(hub, plan) == 0 and content.exists()
    assert scan_cache_dir(hub).repos == frozenset()


def test_the_demo_models_and_what_is_loaded_stay(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library([model.parent], cache=tmp_path / "none")
    [mine] = library.local_models()
    assert "in use" in library.deletion(mine, in_use=[model]).refused
    link = tmp_path / "link.gguf"
    link.symlink_to(model)
    assert "in use" in library.deletion(mine, in_use=[link]).refused
    demo = LocalModel(path=paths.demo_dir() / "x.gguf", name="demo", source="demo")
    assert "part of cpuchat" in library.deletion(demo).refused
