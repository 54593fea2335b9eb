"""Tests reader and writer against the `gguf` package and ggml, for every type of tensor and of value."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import gguf as reference
import llama_cpp.llama_cpp as llama

from cpuchat.base import paths
from cpuchat.models.gguf.header import read_header
from cpuchat.models.gguf.parse import FILE_TYPES, TYPES, LazyArray
from tests.support.tiny_gguf import finish

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


def written_by_the_package(path: Path) -> Path:
    writer = reference.GGUFWriter(path, "llama")
    for kind, values in VALUES.items():
        for i, value in enumerate(values):
            writer.add_key_value(f"{kind.name}.{i}", value, kind)
        writer.add_key_value(f"{kind.name}.all", values, Value.ARRAY, sub_type=kind)
    finish(writer)
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


def test_sizes_are_those_of_ggml() -> None:
    folder = paths.engine_libraries()
    library = ctypes.CDLL(str(next(folder.glob("libggml-base.*"))))

    def function(name: str, result: Any) -> Any:
        found = library[name]  # an object of our own: the package's prototypes stay as they are
        found.restype = result
        return found

    name = function("ggml_type_name", ctypes.c_char_p)
    block, size = function("ggml_blck_size", ctypes.c_int64), function("ggml_type_size", ctypes.c_size_t)
    for number in range(max(TYPES) + 1):
        kind = TYPES.get(number)
        if kind is None:
            assert size(number) == 0  # removed from ggml
        else:
            assert (name(number).decode().upper(), block(number), size(number)) == (kind.name, kind.block, kind.nbytes)


def test_file_types_are_those_of_llama_cpp() -> None:
    prefix = "LLAMA_FTYPE_"
    known = {getattr(llama, name): name.removeprefix(prefix) for name in dir(llama) if name.startswith(prefix)}
    del known[llama.LLAMA_FTYPE_GUESSED]
    ours = {number: f"{'ALL' if name == 'F32' else 'MOSTLY'}_{name}" for number, name in FILE_TYPES.items()}
    assert ours | {38: "MOSTLY_MXFP4_MOE"} == known
