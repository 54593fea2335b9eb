"""Tests instruction sets by the files of the kernel, in llama.cpp's names."""

from __future__ import annotations

from pathlib import Path

from cpuchat.hardware.topology import Instructions, instructions
from tests.hardware.trees import make_tree, write


def test_a_server_with_avx512(tmp_path: Path) -> None:
    features = {"AVX", "AVX2", "FMA", "F16C", "AVX512", "AVX512_VNNI", "AVX512_BF16"}
    assert instructions(make_tree(tmp_path, "epyc-9354")) == Instructions(frozenset(features))


def test_an_arm_server_with_sve(tmp_path: Path) -> None:
    cpuinfo = "processor: 0\nFeatures: fp asimd asimddp asimdhp i8mm sve svei8mm"
    write(tmp_path, {"proc/cpuinfo": cpuinfo, "proc/sys/abi/sve_default_vector_length": "32\n"})
    found = instructions(tmp_path)
    assert found.features == {"NEON", "DOTPROD", "FP16_VA", "MATMUL_INT8", "SVE"}
    assert found.sve_bytes == 32


def test_this_cpu_agrees_with_the_engine_that_was_built_for_it() -> None:
    from cpuchat.engine.llama.bindings import engine_info

    assert instructions().features <= set(engine_info().features)
