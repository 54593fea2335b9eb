"""Tests the header reader: right on sound files, a typed error on everything else."""

from __future__ import annotations

import os
import shutil
import struct
import tracemalloc
from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from cpuchat.base.errors import ModelDamaged, ModelNotFound, ModelUnsupported
from cpuchat.models.gguf.header import read_header, read_model, split_parts, telling_name
from cpuchat.models.gguf.parse import LazyArray
from tests.models.library.files import part
from tests.support.tiny_gguf import finish


def write_reference(path: Path) -> Path:
    """Write a file with every kind of value and several tensor types, with the reference implementation."""
    writer = reference.GGUFWriter(path, "qwen2")
    writer.add_name("Tëst model")
    writer.add_file_type(15)
    writer.add_block_count(2)
    writer.add_context_length(4096)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv([2, 1])
    writer.add_chat_template("{{ messages }}")
    writer.add_bool("test.bool", True)
    writer.add_int8("test.int8", -5)
    writer.add_uint64("test.uint64", 1 << 40)
    writer.add_float64("test.float64", 0.25)
    writer.add_token_list(["<unk>", "a", "ä", "", "🙂"])
    writer.add_token_scores([0.0, -1.5, 2.0, 3.0, 4.0])
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((6, 256), dtype=np.float32)
    writer.add_tensor("token_embd.weight", weights.astype(np.float16))
    for kind in ("Q8_0", "Q4_0", "Q5_1"):
        quantised = reference.quants.quantize(weights, reference.GGMLQuantizationType[kind])
        writer.add_tensor(f"blk.0.{kind}.weight", quantised, raw_dtype=reference.GGMLQuantizationType[kind])
    for kind, size in (("Q4_K", 144), ("Q6_K", 210), ("IQ4_XS", 136)):
        raw = rng.integers(0, 255, (6, size), dtype=np.uint8)
        writer.add_tensor(f"blk.1.{kind}.weight", raw, raw_dtype=reference.GGMLQuantizationType[kind])
    writer.add_tensor("output_norm.weight", np.ones(5, np.float32))
    finish(writer)
    return path


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reference(tmp_path_factory.mktemp("gguf") / "sound.gguf")


def patched(path: Path, at: int, data: bytes, folder: Path) -> Path:
    copy = Path(shutil.copy(path, folder / "patched.gguf"))
    with copy.open("r+b") as file:
        file.seek(at)
        file.write(data)
    return copy


def test_agrees_with_the_reference_reader(sound: Path) -> None:
    header, other = read_header(sound), reference.GGUFReader(sound)
    assert header.data_offset == other.data_offset
    assert [(t.name, t.shape, t.type, t.nbytes) for t in header.tensors] == [
        (t.name, tuple(int(n) for n in t.shape), t.tensor_type.name, t.n_bytes) for t in other.tensors
    ]
    assert [header.data_offset + t.offset for t in header.tensors] == [t.data_offset for t in other.tensors]
    for key, value in header.metadata.items():
        expected = other.fields[key].contents()
        if isinstance(value, LazyArray):
            assert list(value) == expected, key
        else:
            assert value == expected, key
    assert set(other.fields) - set(header.metadata) == {"GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"}


def test_a_name_that_tells_nothing_gives_way_to_that_of_the_file() -> None:
    for name in ("", "gguf", ".", "../out/", "KL0.099", "Hf Model", "/work/7"):
        assert telling_name(name, "Qwen3.5-27B-Q8_0") == "Qwen3.5-27B-Q8_0"
    for name, file in (("Phi 2", "phi-2.Q4_K_M"), ("Hermes", "small"), ("Qwen3 8B", "m-7b"), ("模型", "m")):
        assert telling_name(name, file) == name
    assert telling_name("/data/hermes-13b", "m-13b") == "hermes-13b"


def test_what_it_says_about_the_model(sound: Path) -> None:
    header = read_header(sound)
    assert header.architecture == "qwen2"
    assert header.name == "Tëst model"
    assert header.quantization == "Q4_K_M"
    assert header.n_vocab == 5
    assert header.n_ctx_train == 4096
    assert header.n_layer == 2
    assert header.heads_kv == [2, 1]
    assert header.key_length == header.value_length == 16
    assert header.chat_template == "{{ messages }}"
    assert header.n_params == 7 * 6 * 256 + 5
    assert header.size == sum(t.nbytes for t in header.tensors) < header.file_size == sound.stat().st_size
    assert header.split_count == 1
    assert not header.is_projector


def test_every_truncation_is_noticed(sound: Path, tmp_path: Path) -> None:
    data = sound.read_bytes()
    header = read_header(sound)
    last = header.tensors[-1]
    end = header.data_offset + last.offset + last.nbytes
    copy = tmp_path / "short.gguf"
    for size in [*range(0, header.data_offset, 7), *range(header.data_offset, end, 997), end - 1]:
        copy.write_bytes(data[:size])
        with pytest.raises(ModelDamaged):
            read_header(copy)
    copy.write_bytes(data[:end])
    assert read_header(copy).tensors == header.tensors


@pytest.mark.parametrize("number", [31, 200])  # Q4_0_4_4, which was removed; and none
def test_types_that_ggml_does_not_have_are_named(number: int, sound: Path, tmp_path: Path) -> None:
    at = sound.read_bytes().index(b"blk.0.Q4_0.weight") + len("blk.0.Q4_0.weight") + 4 + 16
    with pytest.raises(ModelUnsupported, match=f"type {number}, which") as caught:
        read_header(patched(sound, at, struct.pack("<I", number), tmp_path))
    assert "use a standard file" in caught.value.hint


_KEY, _HUGE = struct.pack("<Q", 1) + b"k", (1 << 63) - 1
LYING = {
    "settings": struct.pack("<4sIQQ", b"GGUF", 3, 0, _HUGE),
    "tensors": struct.pack("<4sIQQ", b"GGUF", 3, _HUGE, 0),
    "string": struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + _KEY + struct.pack("<IQ", 8, _HUGE),
    "array": struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + _KEY + struct.pack("<IIQ", 9, 5, _HUGE),
    "strings": struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + _KEY + struct.pack("<IIQ", 9, 8, _HUGE),
    "key": struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", _HUGE),
    "nested": struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + _KEY + struct.pack("<IIQ", 9, 9, 2),
    "type": struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + _KEY + struct.pack("<I", 99),
    "shape": struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + _KEY + struct.pack("<I4QIQ", 4, *[_HUGE] * 4, 0, 0),
    "negative": struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + _KEY + struct.pack("<I2QIQ", 2, 1 << 63, 0, 0, 0),
    "dimensions": struct.pack("<4sIQQ", b"GGUF", 3, 1, 0) + _KEY + struct.pack("<I4QIQ", 1 << 30, 1, 1, 1, 1, 0, 0),
}
"""Headers whose lengths exceed the file."""


@pytest.mark.parametrize("kind", LYING)
def test_lengths_are_checked_before_memory_is_taken(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "lying.gguf"
    path.write_bytes(LYING[kind] + bytes(1000))
    tracemalloc.start()
    try:
        with pytest.raises(ModelDamaged):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_split_models(sound: Path, tmp_path: Path) -> None:
    first = part(tmp_path / "big-00001-of-00002.gguf", 1, 2)
    with pytest.raises(ModelDamaged, match="1 of 2 parts are missing"):
        read_model(first)
    second = part(tmp_path / "big-00002-of-00002.gguf", 2, 2)
    whole = read_model(second)
    assert [t.name for t in whole.tensors] == ["blk.0.part1.weight", "blk.0.part2.weight"]
    assert whole.path == first
    assert whole.file_size == first.stat().st_size + second.stat().st_size
    assert split_parts(first) == [first, second]
    assert split_parts(sound) is None
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelDamaged, match="one of 2 parts"):
        read_model(renamed)
    assert read_model(sound).tensors == read_header(sound).tensors


def test_only_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "pipe.gguf", tmp_path, Path("/dev/zero")):
        with pytest.raises(ModelNotFound, match="not a regular file"):
            read_header(path)
