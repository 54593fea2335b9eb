"""Detects the CPU's instruction sets, named as llama.cpp prints them."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from cpuchat.hardware.cgroups import read_number
from cpuchat.hardware.sysfs import read_cpuinfo

ROOT = Path("/")

# Flag in /proc/cpuinfo: feature as llama.cpp prints it.
# ggml/src/ggml-cpu/ggml-cpu.cpp (ggml_backend_cpu_get_features); arch/{x86,arm64}/include/asm/{cpufeatures,hwcap}.h.
FEATURES: dict[str, str] = {
    "avx": "AVX",
    "avx2": "AVX2",
    "avx_vnni": "AVX_VNNI",
    "fma": "FMA",
    "f16c": "F16C",
    "bmi2": "BMI2",
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512_VNNI",
    "avx512_bf16": "AVX512_BF16",
    "avx512vbmi": "AVX512_VBMI",
    "amx_int8": "AMX_INT8",
    "asimd": "NEON",
    "asimddp": "DOTPROD",
    "i8mm": "MATMUL_INT8",
    "asimdhp": "FP16_VA",
    "sve": "SVE",
}
# Where no /proc/cpuinfo is: what every CPU of that kind has that runs a language model today.
_COMMON = {
    **dict.fromkeys(("x86_64", "amd64"), frozenset({"AVX", "AVX2", "FMA", "F16C"})),
    **dict.fromkeys(("aarch64", "arm64"), frozenset({"NEON", "DOTPROD"})),
}


@dataclass(frozen=True, slots=True)
class Instructions:
    """`features` in llama.cpp's names; `sve_bytes` is how long SVE vectors are, 0 without SVE."""

    features: frozenset[str] = frozenset()
    sve_bytes: int = 0


def instructions(root: Path = ROOT) -> Instructions:
    """Return the instruction sets of this CPU. An engine built for it (GGML_NATIVE) uses all of them."""
    flags = read_cpuinfo(root).flags
    if not flags:
        return Instructions(_COMMON.get(platform.machine().lower(), frozenset()))
    features = frozenset(name for flag, name in FEATURES.items() if flag in flags)
    # The vector length of new processes (Documentation/arch/arm64/sve.rst).
    sve_bytes = read_number(root / "proc/sys/abi/sve_default_vector_length") if "SVE" in features else 0
    return Instructions(features, sve_bytes or 0)
