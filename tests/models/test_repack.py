"""Tests repacked weights against what llama.cpp does on this CPU, and by the rules of its source on others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cpuchat.hardware.topology import Instructions
from cpuchat.models.cpu_modules import engine_cpu
from cpuchat.models.fit import format_of, repacked
from cpuchat.models.gguf.header import GGUFHeader, read_header
from cpuchat.models.gguf.parse import BY_NAME, TensorInfo
from cpuchat.models.synthetic.model import write_model
from tests.models.llama import Llama
from tests.support.shapes import TINY_LLAMA, TINY_MOE

pytestmark = pytest.mark.slow

MIB = 1 << 20

AVX2 = Instructions(frozenset({"AVX2"}))
AVX512 = Instructions(frozenset({"AVX2", "AVX512", "AVX512_VNNI"}))
AMX = Instructions(frozenset({"AVX2", "AVX512", "AVX512_VNNI", "AMX_INT8"}))
DOTPROD = Instructions(frozenset({"NEON", "DOTPROD"}))
I8MM = Instructions(frozenset({"NEON", "DOTPROD", "MATMUL_INT8"}))
SVE_128 = Instructions(frozenset({"NEON", "DOTPROD", "MATMUL_INT8", "SVE"}), sve_bytes=16)
SVE_256 = Instructions(frozenset({"NEON", "DOTPROD", "MATMUL_INT8", "SVE"}), sve_bytes=32)


@pytest.mark.parametrize(("shape", "quant"), [("llama", "Q4_K_M"), ("moe", "Q8_0"), ("llama", "Q4_0"), ("moe", "F16")])
def test_llama_cpp_repacks_the_same_tensors_in_the_same_way(tmp_path: Path, shape: str, quant: str) -> None:
    path = write_model(tmp_path / "m.gguf", TINY_LLAMA if shape == "llama" else TINY_MOE, quant)
    expected = list(repacked(read_header(path), engine_cpu()))
    with Llama(path) as llama:
        done = re.findall(r"repack tensor (\S+) with (\w+?)_(\d+)x(\d+)", llama.log)
        copied = llama.mebibytes("CPU_REPACK model buffer size") + llama.mebibytes("AMX model buffer size")
    assert copied == pytest.approx(sum(size for _, _, size in expected) / MIB, abs=0.1)
    interleaved = [(tensor, layout) for tensor, layout, _ in expected if layout.cpu != "AMX"]
    assert sorted((name, kind.upper(), f"{rows}×{step}") for name, kind, rows, step in done) == sorted(
        (tensor.name, tensor.type, layout.name) for tensor, layout in interleaved
    )


def names(cpu: Instructions) -> dict[str, str]:
    return {kind: layout.name for kind in BY_NAME if (layout := format_of(kind, cpu)) is not None}


def test_each_family_of_cpus_has_its_own_forms() -> None:
    assert names(AVX2) == dict.fromkeys(("Q4_0", "Q4_K", "IQ4_NL", "MXFP4"), "8×8")
    assert names(AVX512) == names(AVX2) | {"Q2_K": "8×8"}
    assert names(AMX)["Q8_0"] == names(AMX)["Q4_K"] == "tiles"
    assert names(AMX)["F16"] == "copy"
    assert names(AMX)["MXFP4"] == "8×8"  # no tiles for that type
    four, eight = ("Q4_0", "Q8_0", "Q1_0", "IQ4_NL", "MXFP4"), ("Q4_K", "Q5_K", "Q6_K")
    assert names(DOTPROD) == dict.fromkeys(four, "4×4") | dict.fromkeys(eight, "8×4")
    assert names(I8MM) == names(DOTPROD) | dict.fromkeys(("Q4_0", "Q8_0", "Q1_0"), "4×8") | dict.fromkeys(eight, "8×8")
    assert names(SVE_128) == names(I8MM)
    assert names(SVE_256) == names(I8MM) | {"Q4_0": "8×8"}
    assert names(Instructions(frozenset({"AVX"}))) == names(Instructions()) == {}


def header_of(*tensors: TensorInfo) -> GGUFHeader:
    return GGUFHeader(3, {"general.architecture": "a"}, list(tensors), 0, 0, 32, Path("x.gguf"))


def tensor(name: str, kind: str, *shape: int) -> TensorInfo:
    values = 1
    for size in shape:
        values *= size
    return TensorInfo(name, shape, kind, 0, values // BY_NAME[kind].block * BY_NAME[kind].nbytes)


def test_shapes_decide() -> None:
    header = header_of(
        tensor("token_embd.weight", "Q8_0", 256, 320),  # only looked up: there is an output matrix
        tensor("output.weight", "Q8_0", 256, 320),
        tensor("blk.0.ffn_up.weight", "Q8_0", 256, 36),  # 36 rows: four at a time, not in AMX's tiles
        tensor("blk.0.ffn_up_exps.weight", "Q4_K", 256, 64, 8),
        tensor("blk.0.attn_k_b.weight", "Q4_K", 256, 64, 8),  # one matrix for each head: used as it is
        tensor("blk.0.attn_norm.weight", "F32", 256),
    )
    assert [(t.name, layout.name, size == t.nbytes) for t, layout, size in repacked(header, I8MM)] == [
        ("output.weight", "4×8", True),
        ("blk.0.ffn_up.weight", "4×8", True),
        ("blk.0.ffn_up_exps.weight", "8×8", True),
    ]
    tiles = {t.name: (layout.name, size) for t, layout, size in repacked(header, AMX)}
    # Q8_0 grows by a sum of 4 bytes for every block of 34; experts go the usual way.
    assert tiles == {
        "output.weight": ("tiles", 320 * 8 * 38),
        "blk.0.ffn_up_exps.weight": ("8×8", 256 * 64 * 8 // 256 * 144),
    }
