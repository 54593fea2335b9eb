"""Tests reader and writer against the `gguf` package and ggml, for every type of tensor and of value."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import gguf as reference
import llama_cpp.llama_cpp as llama
import numpy as np

from cpuchat.models.gguf.header import read_header
from cpuchat.models.gguf.parse import BY_NAME, FILE_TYPES, RETIRED, TYPES, GGMLType, LazyArray, TensorInfo
from cpuchat.models.synthetic.model import TensorSource, write_gguf

_ROWS = 3
# The package has an old size for it: ggml-common.h says 36 bytes, which test_sizes_are_those_of_ggml checks.
_KINDS = [kind for kind in reference.GGML_QUANT_SIZES if kind.name != "Q8_1"]
Value = reference.GGUFValueType

# The extremes of every type of value.
VALUES: dict[reference.GGUFValueType, list[Any]] = {
    Value.UINT8: [0, 255],
    Value.INT8: [-128, 127],
    Value.UINT16: [0, 65_535],
    Value.INT16: [-32_768, 32_767],
    Value.UINT32: [0, 4_294_967_295],
    Value.INT32: [-2_147_483_648, 2_147_483_647],
    Value.UINT64: [0, 18_446_744_073_709_551_615],
    Value.INT64: [-9_223_372_036_854_775_808, 9_223_372_036_854_775_807],
    Value.FLOAT32: [-0.5, 3.4028234663852886e38, -math.inf],
    Value.FLOAT64: [0.1, 1.7976931348623157e308, 5e-324],
    Value.BOOL: [True, False],
    Value.STRING: ["", "Grüße 🙂\n\0", "x" * 70_000],
}


def content(kind: GGMLType) -> np.ndarray[Any, Any]:
    """Return random bytes for `_ROWS` rows of two blocks."""
    rng = np.random.default_rng(kind.id)
    return rng.integers(0, 256, (_ROWS, 2 * kind.nbytes), dtype=np.uint8)


def data_of(path: Path, tensor: TensorInfo, data_offset: int) -> bytes:
    start = data_offset + tensor.offset
    return path.read_bytes()[start : start + tensor.nbytes]


def written_by_the_package(path: Path) -> Path:
    writer = reference.GGUFWriter(path, "llama")
    for kind, values in VALUES.items():
        for i, value in enumerate(values):
            writer.add_key_value(f"{kind.name}.{i}", value, kind)
        writer.add_key_value(f"{kind.name}.all", values, Value.ARRAY, sub_type=kind)
    for kind in _KINDS:
        writer.add_tensor(kind.name, content(TYPES[kind.value]), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_type_of_value_that_the_package_writes(tmp_path: Path) -> None:
    assert set(VALUES) == set(Value) - {Value.ARRAY}
    metadata = read_header(written_by_the_package(tmp_path / "m.gguf")).metadata
    for kind, values in VALUES.items():
        found = [metadata[f"{kind.name}.{i}"] for i in range(len(values))]
        assert found == values and [type(value) for value in found] == [type(value) for value in values]
        array = metadata[f"{kind.name}.all"]
        assert isinstance(array, LazyArray) and array.value_type == kind.value
        assert (array.first(1), list(array), len(array)) == (values[:1], values, len(values))


def test_every_type_of_tensor_that_the_package_writes(tmp_path: Path) -> None:
    path = written_by_the_package(tmp_path / "m.gguf")
    header = read_header(path)
    assert [tensor.name for tensor in header.tensors] == [kind.name for kind in _KINDS]
    for tensor in header.tensors:
        kind = BY_NAME[tensor.name]
        expected = content(kind)
        assert (tensor.type, tensor.shape) == (kind.name, (2 * kind.block, _ROWS))
        assert data_of(path, tensor, header.data_offset) == expected.tobytes()


def test_every_type_of_tensor_that_we_write(tmp_path: Path) -> None:
    def source(kind: GGMLType) -> TensorSource:
        return TensorSource(kind.name, (2 * kind.block, _ROWS), kind.name, lambda: (content(kind),))

    sources = [source(TYPES[kind.value]) for kind in _KINDS]
    path = write_gguf(tmp_path / "m.gguf", {"general.architecture": "llama"}, sources)
    reader = reference.GGUFReader(path)
    assert [tensor.name for tensor in reader.tensors] == [kind.name for kind in _KINDS]
    for tensor in reader.tensors:
        kind = BY_NAME[tensor.name]
        assert tensor.tensor_type.name == kind.name
        assert tuple(int(n) for n in tensor.shape) == (2 * kind.block, _ROWS)
        assert tensor.data.tobytes() == content(kind).tobytes()


def test_every_type_of_value_that_we_write(tmp_path: Path) -> None:
    singles: dict[str, tuple[Any, reference.GGUFValueType]] = {
        "bool": (True, Value.BOOL),
        "small": (4_294_967_295, Value.UINT32),
        "large": (4_294_967_296, Value.UINT64),
        "negative": (-2_147_483_648, Value.INT32),
        "factor": (0.5, Value.FLOAT32),
        "text": ("Grüße 🙂\n", Value.STRING),
    }
    arrays: dict[str, tuple[Any, reference.GGUFValueType]] = {
        "strings": (["", "ü", "🙂"], Value.STRING),
        "ints": ([-1, 2], Value.INT32),
        "floats": ([0.5, -2.0], Value.FLOAT32),
        "unsigned": (np.array([1, 4_294_967_295], np.uint32), Value.UINT32),
        "flags": (np.array([True, False]), Value.BOOL),
    }
    written = {"general.architecture": "llama"} | {key: value for key, (value, _) in (singles | arrays).items()}
    fields = reference.GGUFReader(write_gguf(tmp_path / "m.gguf", written, [])).fields
    for key, (value, kind) in singles.items():
        assert (fields[key].types, fields[key].contents()) == ([kind], value)
    for key, (value, kind) in arrays.items():
        assert (fields[key].types, fields[key].contents()) == ([Value.ARRAY, kind], list(value))


def test_sizes_are_those_of_ggml() -> None:
    def function(name: str, result: Any) -> Any:
        found = llama._lib[name]  # an object of our own: the package's prototypes stay as they are
        found.restype = result
        return found

    name = function("ggml_type_name", ctypes.c_char_p)
    block, size = function("ggml_blck_size", ctypes.c_int64), function("ggml_type_size", ctypes.c_size_t)
    for number in range(max(TYPES) + 1):
        kind = TYPES.get(number)
        if kind is None:
            assert size(number) == 0  # removed from ggml
            assert number not in RETIRED or RETIRED[number] in name(number).decode()
        else:
            assert (name(number).decode().upper(), block(number), size(number)) == (kind.name, kind.block, kind.nbytes)


def test_file_types_are_those_of_llama_cpp() -> None:
    prefix = "LLAMA_FTYPE_"
    known = {getattr(llama, name): name.removeprefix(prefix) for name in dir(llama) if name.startswith(prefix)}
    del known[llama.LLAMA_FTYPE_GUESSED]
    ours = {number: f"{'ALL' if name == 'F32' else 'MOSTLY'}_{name}" for number, name in FILE_TYPES.items()}
    assert ours | {38: "MOSTLY_MXFP4_MOE"} == known
