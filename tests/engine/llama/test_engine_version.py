"""Tests that what the program knows of llama.cpp's version is what is installed: by its headers, its symbols and its
texts. docs/engine.md names the rest."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable
from functools import cache
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Final

import pytest

from cpuchat.base import paths
from cpuchat.engine.llama import bindings
from cpuchat.engine.llama.bindings import ThreadPoolParams, llama
from cpuchat.engine.llama.vocab import CONTROL_NAMES
from cpuchat.hardware.placement.placement import MAX_CPUS
from cpuchat.models import engine_version, support
from cpuchat.models.engine_version import CXX_NAMES, STRUCTS
from cpuchat.models.file_names import engine_knows
from cpuchat.models.gguf.parse import FILE_TYPES, TYPES

ROOT: Final = Path(__file__).parents[3]
LIBRARIES: Final = paths.engine_libraries()
assert LIBRARIES is not None
HEADERS: Final = LIBRARIES.parents[1] / "include"
needs_headers: Final = pytest.mark.skipif(
    not (HEADERS / "llama.h").is_file() or shutil.which("g++") is None, reason="needs the engine's headers and g++"
)


@cache
def headers() -> str:
    """Return llama.h and the public headers of ggml, without comments."""
    names = ("llama.h", "ggml.h", "ggml-cpu.h", "ggml-backend.h")
    return re.sub(r"//.*|/\*.*?\*/", "", "\n".join((HEADERS / name).read_text("utf-8") for name in names))


def compiled(expressions: Iterable[str], folder: Path) -> dict[str, int]:
    """Return what integer expressions are for a C++ compiler that knows the headers."""
    wanted = list(expressions)
    lines = [f'std::printf("%lld\\n", static_cast<long long>({one}));' for one in wanted]
    source = ["#include <cstddef>", "#include <cstdio>", '#include "llama.h"', '#include "ggml-cpu.h"']
    (folder / "ask.cpp").write_text("\n".join([*source, "int main() {", *lines, "}"]))
    compiler = ["g++", "-w", "-I", str(HEADERS), str(folder / "ask.cpp"), "-o", str(folder / "ask")]
    subprocess.run(compiler, check=True, timeout=120)
    said = subprocess.run([str(folder / "ask")], check=True, capture_output=True, text=True, timeout=60).stdout
    return dict(zip(wanted, map(int, said.split()), strict=True))


def ask(function: str, result: Any, *arguments: Any) -> Any:
    """Return a function that only tests call."""
    return bindings._function(function, result, *arguments)


@needs_headers
def test_every_field_of_the_structs_is_where_the_headers_say(tmp_path: Path) -> None:
    """Another order of fields can have the same size."""
    structs: dict[str, Any] = {name: getattr(llama, name) for name in STRUCTS}
    structs["ggml_threadpool_params"] = ThreadPoolParams
    expected = {f"sizeof({name})": ctypes.sizeof(struct) for name, struct in structs.items()}
    for name, struct in structs.items():
        places = {field: one.offset for field, one in vars(struct).items() if hasattr(one, "offset")}
        named = {"val_i64" if field == "value" else field: place for field, place in places.items()}  # of a union
        expected |= {f"offsetof({name}, {field})": place for field, place in named.items()}
    assert compiled(expected, tmp_path) == expected


@needs_headers
def test_numbers_of_enumerations_are_those_of_the_headers(tmp_path: Path) -> None:
    sources = "".join(file.read_text("utf-8") for file in (ROOT / "cpuchat/engine").rglob("*.py"))
    expected = {name: getattr(llama, name) for name in re.findall(r"llama\.(LLAMA_\w+)", sources)}
    assert len(expected) > 15
    expected |= {"GGML_LOG_LEVEL_ERROR": engine_version.LOG_ERROR, "GGML_LOG_LEVEL_CONT": engine_version.LOG_CONTINUED}
    expected |= {
        "GGML_MAX_N_THREADS": MAX_CPUS,
        "GGML_DEFAULT_N_THREADS": llama.llama_context_default_params().n_threads,
    }
    expected |= {f"GGML_TYPE_{kind.name}": kind.id for kind in TYPES.values()}
    special = {"F32": "LLAMA_FTYPE_ALL_F32", "MXFP4": "LLAMA_FTYPE_MOSTLY_MXFP4_MOE"}
    expected |= {special.get(name, f"LLAMA_FTYPE_MOSTLY_{name}"): number for number, name in FILE_TYPES.items()}
    assert compiled(expected, tmp_path) == expected


def test_types_of_tensors_are_those_of_the_library() -> None:
    values, nbytes = (ask(f"ggml_{name}", ctypes.c_size_t, ctypes.c_int) for name in ("blck_size", "type_size"))
    for kind in TYPES.values():
        assert bindings.tensor_type_name(kind.id).decode().upper() == kind.name
        assert (values(kind.id), nbytes(kind.id)) == (kind.block, kind.nbytes)


_C_TYPES: Final = {
    "void": None, "bool": ctypes.c_bool, "int": ctypes.c_int, "int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32,
    "size_t": ctypes.c_size_t, "const char *": ctypes.c_char_p, "struct ggml_threadpool_params": ThreadPoolParams,
}  # fmt: skip
_POINTERS: Final = (ctypes.c_void_p, ctypes.POINTER(ThreadPoolParams))


def fits(declared: str, bound: Any) -> bool:
    """Return whether a type in a declaration, with the name of a parameter or not, is what ctypes passes."""
    words = " ".join(declared.replace("*", " * ").split())
    if words.startswith("enum"):
        return bound is ctypes.c_int
    if words.startswith("const char *"):
        return bound is ctypes.c_char_p
    if "*" in words or re.match(r"ggml_\w+_t\b", words):  # handles are pointers
        return bound in _POINTERS
    known = next((name for name in sorted(_C_TYPES, key=len, reverse=True) if re.match(rf"{name}\b", words)), "")
    return bool(known) and _C_TYPES[known] is bound


def bound_functions() -> list[Any]:
    found = [one for one in vars(bindings).values() if hasattr(one, "argtypes") and hasattr(one, "__name__")]
    assert len(found) > 20
    return [one for one in found if one.argtypes is not None]


@needs_headers
def test_functions_are_bound_as_the_headers_declare_them() -> None:
    cxx = {symbol: name for name, symbol in CXX_NAMES.items()}
    for function in bound_functions():
        name = cxx.get(function.__name__, function.__name__)
        declared = re.search(rf"(?:LLAMA|GGML|GGML_BACKEND)_API\s+([\w\s*]+?)\b{name}\s*\(([^)]*)\)", headers())
        if declared is None:
            assert name in CXX_NAMES, f"no header declares {name}"
            continue
        result, parameters = declared[1], [one for one in declared[2].split(",") if one.strip() not in ("", "void")]
        assert fits(result, function.restype), (name, result, function.restype)
        assert len(parameters) == len(function.argtypes), name
        for parameter, bound in zip(parameters, function.argtypes, strict=True):
            assert fits(parameter, bound), (name, parameter, bound)


def test_functions_of_c_plus_plus_take_what_their_symbols_say() -> None:
    """A mangled name ends in the types of its parameters."""
    codes = {"P13llama_context": ctypes.c_void_p, "b": ctypes.c_bool, "i": ctypes.c_int32, "j": ctypes.c_uint32}
    bound = {function.__name__: function.argtypes for function in bound_functions()}
    assert len(bound.keys() & CXX_NAMES.values()) == len(CXX_NAMES) - 1  # the map is bound where it is used
    for name, symbol in CXX_NAMES.items():
        assert symbol.startswith(f"_Z{len(name)}{name}") and bindings.has_function(name)
        if symbol in bound:
            parameters = re.findall("|".join(codes), symbol.removeprefix(f"_Z{len(name)}{name}"))
            assert [codes[one] for one in parameters] == bound[symbol], name


def test_functions_of_the_package_that_are_used_exist() -> None:
    sources = "".join(file.read_text("utf-8") for file in (ROOT / "cpuchat/engine").rglob("*.py"))
    used = set(re.findall(r"\bllama\.((?:llama|ggml)_\w+)", sources))
    assert len(used) > 40
    assert {name for name in used if not hasattr(llama, name)} == set()


# Architectures


def architectures_with(function: str) -> set[str]:
    """Return the names of those for which a function of llama-arch.cpp says yes."""
    symbol = f"_Z{len(function)}{function}RK8llm_arch"
    if not bindings.has_function(symbol):
        pytest.skip(f"this build does not export {function}")
    name_of, has = (
        ask("_Z13llm_arch_name8llm_arch", ctypes.c_char_p, ctypes.c_int),
        ask(symbol, ctypes.c_bool, ctypes.c_void_p),
    )
    names = takewhile(lambda name: "unknown" not in name, (name_of(number).decode() for number in count()))
    return {name for number, name in enumerate(names) if has(ctypes.byref(ctypes.c_int(number)))}


def test_lists_of_architectures_are_those_of_the_engine() -> None:
    recurrent = architectures_with("llm_arch_is_recurrent") | architectures_with("llm_arch_is_hybrid")
    assert recurrent == engine_version.RECURRENT
    assert architectures_with("llm_arch_supports_rs_rollback") == engine_version.SNAPSHOTS
    told = {name: support.why_unknown(name) for name in architectures_with("llm_arch_is_diffusion")}
    assert {name for name, why in told.items() if "diffusion model" not in why} == set()


def test_names_exist_in_the_engine() -> None:
    copying = engine_version.COPIES_SNAPSHOTS
    names = {*engine_version.HEADS, *engine_version.RECURRENT, *copying, *engine_version.NO_FLASH_ATTENTION}
    names |= {*engine_version.GIVES_INPUTS, *engine_version.GIVES_HIDDEN, *CONTROL_NAMES}
    names |= {"token_embd", "per_layer_token_embd", "output", "blk.%d.ffn_gate_exps", "blk.%d.nextn.shared_head_head"}
    assert {name for name in names if not engine_knows(name)} == set()
    assert copying <= engine_version.SNAPSHOTS <= engine_version.RECURRENT
    assert engine_version.SEVERAL_MTP <= engine_version.MTP


def test_models_with_a_graph_for_mtp_layers_are_those_of_the_engine() -> None:
    """Each has a class llama_model_NAME::graph_mtp, whose name in C++ is that of the architecture but for its signs."""
    content = b"".join(file.read_bytes() for file in LIBRARIES.glob("libllama.so"))
    found = {name.decode() for name in re.findall(rb"_ZN\d+llama_model_(\w+?)9graph_mtpC[12]E", content)}
    if not found:
        pytest.skip("this build does not export them")
    assert {re.sub(r"\W|_", "", name) for name in engine_version.MTP} == {one.replace("_", "") for one in found}


# Texts

_BY_THE_SYSTEM: Final = {"out of memory", "Cannot allocate memory"}


def literals(expression: str | bytes) -> list[str]:
    """Return the longer texts of a regular expression."""
    text = expression if isinstance(expression, str) else expression.decode()
    return [one.strip() for one in re.findall(r"[A-Za-z_][\w ']{6,}", re.sub(r"\\.", "\0", text))]


def test_texts_that_are_looked_for_in_the_log_are_in_the_libraries() -> None:
    content = b"\0".join(file.read_bytes() for file in sorted(LIBRARIES.glob("lib*.so")))
    texts = [
        *engine_version.NO_MEMORY,
        *engine_version.DAMAGED,
        engine_version.NOT_LOCKED,
        engine_version.QUANTIZE_FAILED,
    ]
    patterns = [one for one in vars(engine_version).values() if isinstance(one, re.Pattern)]
    assert len(patterns) >= 6
    for pattern in patterns:
        texts += literals(pattern.pattern)
    refusals = tomllib.loads((ROOT / "cpuchat/models/unsupported.toml").read_text("utf-8"))["refusals"]
    texts += [text for subject in refusals.values() for expression in subject for text in literals(expression)]
    missing = {text for text in texts if text not in _BY_THE_SYSTEM and text.encode() not in content}
    assert missing == set()
