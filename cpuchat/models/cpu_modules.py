"""The CPU modules of the installed engine, of which a worker opens one.

An engine built with GGML_BACKEND_DL has its kernels in a library per instruction set (`libggml-cpu-haswell.so`). Each
reports by `ggml_backend_score` how much of this CPU it uses; 0: this CPU lacks an instruction. Newer instructions are
not always faster, so `cpuchat tune` times those that differ. An engine built for one CPU has no modules.
"""

from __future__ import annotations

import functools
import os
import tomllib
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
_DOT_PRODUCTS: Final = ("AMX_INT8", "AVX512_VNNI", "AVX512", "AVX_VNNI", "AVX2")
"""Features that the dot products of x86 modules rest on; those without any are for CPUs that run no other."""


@functools.cache
def engine_cpu(cpu_module: str = AUTO, root: Path = ROOT) -> Instructions:
    """Return those instructions of this CPU that the installed engine uses: all, or those of the module that a worker
    opens for this setting; for `AUTO` the one that this process was told, else the one with the highest score."""
    here, modules = instructions(root), installed()
    name = os.environ.get(MODULE_VARIABLE, AUTO) if cpu_module == AUTO else cpu_module
    known = {one: used for one, used in _features().items() if one in modules}
    if name == AUTO:
        name = next((one for one in reversed(known) if here.features.issuperset(known[one])), "")
    return Instructions(here.features & known[name], here.sve_bytes) if name in known else here


@functools.cache
def _features() -> dict[str, frozenset[str]]:
    """Return what modules are compiled for, by rising score."""
    rows = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {name: frozenset(features) for name, features in rows.items()}


@functools.cache
def installed() -> dict[str, Path]:
    """Return the modules by name; {} for an engine without modules, and without an engine."""
    folder = paths.engine_libraries()
    files = sorted(folder.glob(f"{_PREFIX}*.so")) if folder is not None else []
    return {file.stem.removeprefix(_PREFIX): file for file in files}


def fastest_first(scores: Mapping[str, int]) -> tuple[str, ...]:
    """Return the modules worth timing on this CPU, at most four, the highest score first: the one that llama.cpp would
    choose. Of modules with the same kind of dot product the highest score counts."""
    found: dict[str, str] = {}
    for name in sorted((name for name, score in scores.items() if score > 0), key=scores.__getitem__, reverse=True):
        features = _features().get(name, frozenset())
        is_x86 = name in _features() and "NEON" not in features
        family = next((one for one in _DOT_PRODUCTS if one in features), "" if is_x86 else name)
        if not found or family:
            found.setdefault(family, name)
    return tuple(found.values())[:_MAX]
