"""Tests the content of a file against the hash that it was published with."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from cpuchat.models.library.library import Library
from cpuchat.models.library.places import LocalModel
from tests.models.library.files import cached, part

pytestmark = pytest.mark.usefixtures("no_demo")


def flip_a_bit(path: Path) -> None:
    """Flip a bit in the middle and keep the modification time, as a failing disk does."""
    real, status = path.resolve(), path.stat()
    content = bytearray(real.read_bytes())
    content[len(content) // 2] ^= 1
    real.write_bytes(content)
    os.utime(real, ns=(status.st_atime_ns, status.st_mtime_ns))


def only(library: Library) -> LocalModel:
    [model] = library.local_models()
    return model


def test_damage_in_the_middle_is_found_and_remembered_until_it_is_mended(tmp_path: Path, model: Path) -> None:
    path = cached(tmp_path, "o/n", "m.gguf", model)
    sound = path.read_bytes()
    flip_a_bit(path)
    assert only(Library(cache=tmp_path)).damaged is None
    result = Library(cache=tmp_path).verify(only(Library(cache=tmp_path)))
    assert result.state == "damaged"
    assert "m.gguf is damaged: its checksum differs" in result.words
    assert only(Library(cache=tmp_path)).damaged == result.words  # in the next run, too
    path.resolve().write_bytes(sound)
    assert only(Library(cache=tmp_path)).damaged is None


def test_small_files_have_a_git_hash(tmp_path: Path, model: Path) -> None:
    path = cached(tmp_path, "o/n", "m.gguf", model)
    content = path.read_bytes()
    name = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    blob = path.resolve().rename(path.resolve().with_name(name))
    path.unlink()
    path.symlink_to(blob)
    library = Library(cache=tmp_path)
    assert library.verify(only(library)).words == "git hash matches"


def test_every_part_of_a_split_model_is_read(tmp_path: Path) -> None:
    links = [
        cached(tmp_path, "o/n", f"s-0000{no}-of-00002.gguf", part(tmp_path / f"{no}.gguf", no, 2)) for no in (1, 2)
    ]
    library = Library(cache=tmp_path)
    assert library.verify(only(library)).state == "verified"
    flip_a_bit(links[1])
    assert "s-00002-of-00002.gguf is damaged" in library.verify(only(library)).words
    links[1].resolve().unlink()
    result = library.verify(only(library))
    assert (result.state, result.words) == ("damaged", "1 of 2 parts are missing (s-00002-of-00002.gguf).")


def test_what_has_no_hash_is_said_to_be_unchecked(tmp_path: Path, model: Path) -> None:
    library = Library([tmp_path / "folder"], cache=tmp_path / "none")
    (tmp_path / "folder").mkdir()
    path = Path(shutil.copy(model, tmp_path / "folder" / "m.gguf"))
    assert library.verify(only(library)).state == "unchecked"
    path.write_bytes(path.read_bytes()[:-100])
    result = library.verify(only(library))
    assert result.state == "damaged"
    assert "truncated" in result.words
