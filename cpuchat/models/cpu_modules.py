"""The CPU modules of the installed engine, of which a worker opens one.

An engine built with GGML_BACKEND_DL has its kernels in a library per instruction set (`libggml-cpu-haswell.so`). Each
reports by `ggml_backend_score` how much of this CPU it uses; 0: this CPU lacks an instruction. Newer instructions are
not always faster, so those that differ are timed (`tune.modules`). An engine built for one CPU has no modules.
"""

from __future__ import annotations

import functools
import importlib.util
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cpuchat.protocol.model_info import ModelWork

AUTO: Final = "auto"
MODULE_VARIABLE: Final = "CPUCHAT_ENGINE_CPU_MODULE"
"""Tells a process which module to open, as it stands for the setting: a name, or `AUTO` for the highest score."""
_PREFIX: Final = "libggml-cpu-"
_MOST: Final = 4
_FAMILIES: Final = {
    "sapphirerapids": "AMX",
    **dict.fromkeys(("zen4", "cooperlake", "icelake", "cascadelake"), "AVX-512 VNNI"),
    **dict.fromkeys(("cannonlake", "skylakex"), "AVX-512"),
    "alderlake": "AVX-VNNI",
    "haswell": "AVX2",
    **dict.fromkeys(("piledriver", "ivybridge", "sandybridge", "sse42", "x64"), ""),
}
"""What the dot products of x86 modules rest on (ggml/src/CMakeLists.txt); "": only for CPUs that run no other."""


@functools.cache
def installed() -> dict[str, Path]:
    """Return the modules by name; {} for an engine without modules, and without an engine."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        return {}
    folder = Path(found.origin).parent / "lib"
    return {file.stem.removeprefix(_PREFIX): file for file in sorted(folder.glob(f"{_PREFIX}*.so"))}


def main_type(work: ModelWork) -> str:
    """Return the type of most of a model's weights, in bytes: "Q4_K"; which modules are fast depends on it."""
    sizes: Counter[str] = Counter()
    for weights in (*work.dense, *work.experts):
        sizes[weights.type] += round(weights.nbytes)
    return max(sizes, key=sizes.__getitem__, default="")


def fastest_first(scores: Mapping[str, int]) -> tuple[str, ...]:
    """Return the modules worth timing on this CPU, at most four, the highest score first: the one that llama.cpp would
    choose. Of modules with the same kind of dot product the highest score counts.
    """
    found: dict[str, str] = {}
    for name in sorted((name for name, score in scores.items() if score > 0), key=scores.__getitem__, reverse=True):
        family = _FAMILIES.get(name, name)
        if not found or family:
            found.setdefault(family, name)
    return tuple(found.values())[:_MOST]
