"""The kernels of cpuchat beside llama.cpp's: for which weights and CPUs they are, and where their library is.

Their source is in `cpuchat/kernels` (C++); the engine's build makes a library of them for Linux on x86.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cpuchat.base import paths

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Instructions

TYPES: Final = (
    "Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q5_0", "MXFP4", "IQ4_NL", "IQ4_XS", "Q3_K", "Q2_K", "Q4_1", "Q5_1",
)  # fmt: skip
"""The tensor types with kernels, in the order of `Format` (cpuchat/kernels/formats.h)."""


@functools.cache
def library() -> Path | None:
    """Return the library in the engine's folder; None where the engine was built without."""
    return paths.engine_library("cpuchat-kernels")


def instructions_used(cpu: Instructions) -> str:
    """Return the instruction set that the kernels use on `cpu`; "" where they do not run, or are not installed."""
    if library() is None or not {"AVX2", "FMA"} <= cpu.features:
        return ""
    if {"AVX512", "AVX512_VNNI"} <= cpu.features:
        return "AVX-512 VNNI, AMX" if "AMX_INT8" in cpu.features else "AVX-512 VNNI"
    return "AVX-VNNI" if "AVX_VNNI" in cpu.features else "AVX2"


def rows_of(instructions: str) -> int:
    """Return how many rows of weights lie together for an instruction set."""
    return 16 if instructions.startswith("AVX-512") else 8
