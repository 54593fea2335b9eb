"""The CPU modules of the installed engine, of which a worker opens one.

An engine built with GGML_BACKEND_DL has its kernels in a library per instruction set (`libggml-cpu-haswell.so`). Each
reports by `ggml_backend_score` how much of this CPU it uses; 0: this CPU lacks an instruction. Newer instructions are
not always faster, so `cpuchat tune` times those that differ. An engine built for one CPU has no modules.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cpuchat.base import paths
from cpuchat.hardware.topology import ROOT, Instructions, instructions

AUTO: Final = "auto"
MODULE_VARIABLE: Final = "CPUCHAT_ENGINE_CPU_MODULE"
"""Tells a process which module to open, as it stands for the setting: a name, or `AUTO` for the highest score."""
_PREFIX: Final = "libggml-cpu-"
_MAX: Final = 4
_AVX2: Final = "AVX F16C FMA AVX2 BMI2"
_AVX512: Final = f"{_AVX2} AVX512"
_FP16: Final = "NEON DOTPROD FP16_VA"
_FEATURES: Final = {
    "x64": "",
    "sse42": "",
    "sandybridge": "AVX",
    "ivybridge": "AVX F16C",
    "piledriver": "AVX F16C FMA",
    "haswell": _AVX2,
    "alderlake": f"{_AVX2} AVX_VNNI",
    "skylakex": _AVX512,
    "cannonlake": f"{_AVX512} AVX512_VBMI",
    "cascadelake": f"{_AVX512} AVX512_VNNI",
    "icelake": f"{_AVX512} AVX512_VBMI AVX512_VNNI",
    "cooperlake": f"{_AVX512} AVX512_VNNI AVX512_BF16",
    "zen4": f"{_AVX512} AVX512_VBMI AVX512_VNNI AVX512_BF16",
    "sapphirerapids": f"{_AVX512} AVX512_VBMI AVX512_VNNI AVX512_BF16 AMX_INT8",
    "armv8.0_1": "NEON",
    "armv8.2_1": "NEON DOTPROD",
    "armv8.2_2": _FP16,
    "armv8.2_3": f"{_FP16} SVE",
    **dict.fromkeys(("armv8.6_1", "armv8.6_2", "armv9.2_1", "armv9.2_2"), f"{_FP16} SVE MATMUL_INT8"),
    "apple_m1": "NEON DOTPROD",
    **dict.fromkeys(("apple_m2_m3", "apple_m4"), "NEON DOTPROD MATMUL_INT8"),
}
"""What modules are compiled for (ggml/src/CMakeLists.txt), in the names of `topology.FEATURES`, by rising score."""
_DOT_PRODUCTS: Final = ("AMX_INT8", "AVX512_VNNI", "AVX512", "AVX_VNNI", "AVX2")
"""Features that the dot products of x86 modules rest on; those without any are for CPUs that run no other."""


@functools.cache
def engine_cpu(cpu_module: str = AUTO, root: Path = ROOT) -> Instructions:
    """Return those instructions of this CPU that the installed engine uses: all, or those of the module that a worker
    opens for this setting; for `AUTO` the one that this process was told, else the one with the highest score.
    """
    here, modules = instructions(root), installed()
    name = os.environ.get(MODULE_VARIABLE, AUTO) if cpu_module == AUTO else cpu_module
    if name == AUTO:
        name = next((one for one in reversed(_FEATURES) if one in modules and here.features.issuperset(_of(one))), "")
    if name not in modules or name not in _FEATURES:
        return here
    return Instructions(here.features & _of(name), here.sve_bytes)


def _of(module: str) -> frozenset[str]:
    return frozenset(_FEATURES.get(module, "").split())


@functools.cache
def installed() -> dict[str, Path]:
    """Return the modules by name; {} for an engine without modules, and without an engine."""
    folder = paths.engine_libraries()
    files = sorted(folder.glob(f"{_PREFIX}*.so")) if folder is not None else []
    return {file.stem.removeprefix(_PREFIX): file for file in files}


def fastest_first(scores: Mapping[str, int]) -> tuple[str, ...]:
    """Return the modules worth timing on this CPU, at most four, the highest score first: the one that llama.cpp would
    choose. Of modules with the same kind of dot product the highest score counts.
    """
    found: dict[str, str] = {}
    for name in sorted((name for name, score in scores.items() if score > 0), key=scores.__getitem__, reverse=True):
        features = _of(name)
        is_x86 = name in _FEATURES and "NEON" not in features
        family = next((one for one in _DOT_PRODUCTS if one in features), "" if is_x86 else name)
        if not found or family:
            found.setdefault(family, name)
    return tuple(found.values())[:_MAX]
