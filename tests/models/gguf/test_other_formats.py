"""Tests that files which are not what their name says are called what they are, with where the real one comes from."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path

import pytest

from cpuchat.base.errors import ModelDamaged, ModelUnsupported
from cpuchat.models.gguf.header import read_header, read_model

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 4683073184\n"
DENIED = b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>AccessDenied</Code><Message>Request has expired</Message>'


def zipped(name: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(name, "x" * 100)
    return stream.getvalue()


FILES = {
    "lfs": (LFS, "a Git LFS pointer", "git lfs pull"),
    "link": (b"../../blobs/" + b"0" * 64, "a symbolic link that was copied as a text", "rsync -aL"),
    "html": (b"\n<!DOCTYPE html><html><head><title>Log in</title>", "a web page.*'Log in'", "/resolve/"),
    "text": (b"Entry not found", "a text.*'Entry not found'", "models download"),
    "xml": (DENIED, "an XML text.*'AccessDenied'", "new address"),
    "zip": (zipped("m.gguf"), "a compressed file or an archive", "Unpack"),
    "safetensors": (struct.pack("<Q", 90) + b'{"__metadata__":{}}', "in safetensors format", "convert_hf_to_gguf"),
    "pytorch": (zipped("archive/data.pkl"), "PyTorch's pickle format", "models search"),
    "imatrix": (struct.pack("<ii", 1, 18) + b"blk.0.attn_q.weight", "an importance matrix", "model's own"),
    "zeros": (bytes(5000), "filled with zeros", "Download it again"),
    "unknown": (b"\xf0\x00\x01\x02" * 20, "bad magic 0xf0000102", "Choose a .gguf file"),
}


@pytest.mark.parametrize("name", FILES)
def test_it_is_called_what_it_is(name: str, tmp_path: Path) -> None:
    content, what, hint = FILES[name]
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelDamaged, match=f"m.gguf is not a GGUF file: .*{what}") as caught:
        read_header(file)
    assert hint in caught.value.hint
    assert ("Download it again" in caught.value.hint) == (name == "zeros")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("m.gguf", "Download it again"),
        ("m.gguf.part", "resume it"),
        ("m.Q8_0.gguf.part1of2", "join them"),
        ("m.gguf-split-a", "join them"),
    ],
)
def test_a_part_of_a_file_says_how_it_becomes_whole(name: str, hint: str, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(tiny_model.read_bytes()[:-1000])
    with pytest.raises(ModelDamaged, match="truncated") as caught:
        read_header(tmp_path / name)
    assert hint in caught.value.hint


def test_a_file_that_aria2_has_not_filled_yet_is_incomplete_at_its_full_length(
    tiny_model: Path, tmp_path: Path
) -> None:
    (file := tmp_path / "m.gguf").write_bytes(tiny_model.read_bytes()[:100_000])
    os.truncate(file, tiny_model.stat().st_size)
    (control := tmp_path / "m.gguf.aria2").touch()
    with pytest.raises(ModelDamaged, match="not downloaded to its end") as caught:
        read_model(file)
    assert "resume it" in caught.value.hint
    control.unlink()
    assert read_model(file).path == file


@pytest.mark.parametrize(
    ("version", "what"), [(3 << 24, "big-endian"), (2 << 24, "big-endian"), (1, "version 1"), (4, "version 4")]
)
def test_another_version_is_no_damage(version: int, what: str, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<I", version) + tiny_model.read_bytes()[8:])
    with pytest.raises(ModelUnsupported, match=what) as caught:
        read_header(tmp_path / "m.gguf")
    assert "again" not in caught.value.hint
