"""Determines which weights llama.cpp repacks for this CPU at load, and how.

Rows of a matrix are interleaved, so that one instruction works on several of them. That used to need special files
(Q4_0_4_4, Q4_0_4_8, Q4_0_8_8; Q4_K_4 and Q8R16 of Ampere's llama.cpp); today standard files are repacked at load.
Prefill gains most: 1.5 to 3.7 times as fast on ARM, decoding 0.9 to 1.2 times (pull requests 16739, 17494, 18096 and
19360 of llama.cpp).

Source: llama-cpp-python 0.3.36, ggml/src/ggml-cpu/repack.cpp (ggml_repack_get_optimal_repack_type and supports_op) and
ggml/src/ggml-cpu/amx/ (supports_op, get_row_size), which is asked first. Not covered: RISC-V and s390x.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from cpuchat.hardware.instructions import Instructions
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.gguf.parse import TensorInfo
from cpuchat.models.gguf.types import BY_NAME

_SVE_BYTES = 32  # the kernels are for vectors of that length only
_AMX_ROWS = 32  # TILE_N * 2
_USUAL = ("Q4_0", "Q4_K", "Q8_0")
_AS_IT_IS = "used as is"
# Type: (a row must be a multiple of this many values, bytes that a block grows by).
_AMX: dict[str, tuple[int, int]] = {
    "Q4_0": (32, 0),
    "Q4_1": (32, 0),
    "Q8_0": (32, 4),
    "Q4_K": (256, 4),
    "Q5_K": (256, 4),
    "Q6_K": (256, 0),
    "IQ4_XS": (256, 2),
    "F16": (16, 0),
}


class RepackFormat(msgspec.Struct, frozen=True):
    """A memory format for the instructions named `cpu`. The number of rows must be a multiple of `rows`.

    `name` is `8×4` for 8 rows that are interleaved by 4 bytes each, `tiles` for those of AMX, and `copy` for what AMX
    keeps as it is, but in memory of its own.
    """

    name: str
    rows: int
    cpu: str

    @property
    def words(self) -> str:
        """`repacked 8×8 for AVX-512 VNNI`."""
        if self.name == "copy":
            return f"copied for {self.cpu}"
        return f"repacked {'into tiles' if self.name == 'tiles' else self.name} for {self.cpu}"


def format_of(kind: str, cpu: Instructions) -> RepackFormat | None:
    """Return how matrices of the tensor type `kind` are repacked on `cpu`; None: used as in the file."""
    if _has_amx(cpu) and kind in _AMX:
        return RepackFormat("copy" if kind == "F16" else "tiles", _AMX_ROWS, "AMX")
    return next(_interleaved(kind, cpu), None)


def _has_amx(cpu: Instructions) -> bool:
    return {"AMX_INT8", "AVX512_VNNI"} <= cpu.features


def _interleaved(kind: str, cpu: Instructions) -> Iterator[RepackFormat]:
    """Yield the formats in the order in which they are tried: the first that fits the number of rows is used."""
    features = cpu.features
    if "AVX2" in features and (
        kind in ("Q4_0", "Q4_K", "IQ4_NL", "MXFP4") or (kind == "Q2_K" and "AVX512" in features)
    ):
        yield RepackFormat("8×8", 8, _x86_words(features))
    if "NEON" not in features:
        return
    if "MATMUL_INT8" in features:
        if kind == "Q4_0" and "SVE" in features and cpu.sve_bytes == _SVE_BYTES:
            yield RepackFormat("8×8", 8, "SVE i8mm")
        if kind in ("Q4_0", "Q8_0", "Q1_0"):
            yield RepackFormat("4×8", 4, "i8mm")
        if kind in ("Q4_K", "Q5_K", "Q6_K"):
            yield RepackFormat("8×8", 8, "i8mm")
    if "DOTPROD" in features:
        if kind in ("Q4_0", "Q8_0", "Q1_0", "IQ4_NL", "MXFP4"):
            yield RepackFormat("4×4", 4, "dotprod")
        if kind in ("Q4_K", "Q5_K", "Q6_K"):
            yield RepackFormat("8×4", 8, "dotprod")


def _x86_words(features: frozenset[str]) -> str:
    if "AVX512" in features:
        return "AVX-512 VNNI" if "AVX512_VNNI" in features else "AVX-512"
    return "AVX-VNNI" if "AVX_VNNI" in features else "AVX2"


def repacked(header: GGUFHeader, cpu: Instructions) -> Iterator[tuple[TensorInfo, RepackFormat, int]]:
    """Yield the tensors of which `cpu` needs a copy, its format, and its bytes (AMX adds sums to some blocks)."""
    tied = not any(t.name == "output.weight" for t in header.tensors)
    for tensor in header.tensors:
        # Rows of the embedding table are looked up; it is multiplied with only as the head of a tied model.
        if tensor.name.startswith("blk.") or tensor.name == ("token_embd.weight" if tied else "output.weight"):
            layout = _layout(tensor, cpu)
            if layout is not None:
                yield tensor, layout, _copy_bytes(tensor, layout)


def _layout(tensor: TensorInfo, cpu: Instructions) -> RepackFormat | None:
    """Return `format_of` for matrices and experts whose shape allows it."""
    if len(tensor.shape) != (3 if tensor.is_routed else 2):
        return None
    values, rows = tensor.shape[:2]
    in_tiles = _has_amx(cpu) and tensor.type in _AMX and not tensor.is_routed
    if in_tiles and rows % _AMX_ROWS == 0 and values % _AMX[tensor.type][0] == 0:
        return format_of(tensor.type, cpu)
    return next((layout for layout in _interleaved(tensor.type, cpu) if rows % layout.rows == 0), None)


def _copy_bytes(tensor: TensorInfo, layout: RepackFormat) -> int:
    if layout.cpu != "AMX":
        return tensor.nbytes
    return tensor.nbytes + tensor.n_elements // BY_NAME[tensor.type].block * _AMX[tensor.type][1]


def describe(header: GGUFHeader, cpu: Instructions) -> str:
    """Describe what happens to most of a model's weights at load: `97 % repacked 8×8 for AVX-512 VNNI`, or `as is`."""
    bytes_by: dict[RepackFormat, int] = {}
    for tensor, layout, _ in repacked(header, cpu):
        bytes_by[layout] = bytes_by.get(layout, 0) + tensor.nbytes
    if not bytes_by:
        return "as is"
    layout = max(bytes_by, key=lambda layout: bytes_by[layout])
    return f"{100 * bytes_by[layout] / max(header.size, 1):.0f} % {layout.words}"


def advice(cpu: Instructions) -> str:
    """Return how the usual types are repacked on this CPU, and that no special files are needed."""
    types_by: dict[str, list[str]] = {}
    for kind in _USUAL:
        layout = format_of(kind, cpu)
        types_by.setdefault(layout.words if layout is not None else _AS_IT_IS, []).append(kind)
    if set(types_by) == {_AS_IT_IS}:
        return "llama.cpp has no repacked format for this CPU: files are used as is."
    forms = (f"{_listed(kinds)} {'are' if len(kinds) > 1 else 'is'} {words}" for words, kinds in types_by.items())
    return (
        f"At load, {'; '.join(forms)}. That speeds up prefill; decoding speed depends on the file size. "
        "Standard files are enough: special ones (Q4_0_4_8, Q8R16, Q4_K_4) are not needed."
    )


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
