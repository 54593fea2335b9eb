"""The kernels of cpuchat beside llama.cpp's: for which weights and CPUs they are, where their library is, and for which
types of weights they were measured to be faster.

Their source is in `cpuchat/kernels` (C++); the engine's build makes a library of them for Linux on x86.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from cpuchat.base import paths
from cpuchat.costs.model import ProductRate
from cpuchat.measure import store
from cpuchat.measure.subject import on_cores
from cpuchat.models.cpu_modules import engine_cpu
from cpuchat.models.file_names import engine_fingerprint
from cpuchat.protocol.options import Kernels

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
    if library() is None or not {"AVX2", "FMA", "F16C"} <= cpu.features:
        return ""
    if {"AVX512", "AVX512_VNNI"} <= cpu.features:
        return "AVX-512 VNNI, AMX" if "AMX_INT8" in cpu.features else "AVX-512 VNNI"
    return "AVX-VNNI" if "AVX_VNNI" in cpu.features else "AVX2"


def rows_of(instructions: str) -> int:
    """Return how many rows of weights lie together for an instruction set."""
    return 16 if instructions.startswith("AVX-512") else 8


_WHAT: Final = "products"
_KEPT_SECONDS, _DISTURBED_SECONDS = 30 * 86_400.0, 3600.0
_NOISE: Final = 0.05
"""Of the ratio of two kernels that both read at the speed of memory, from one measurement to the next."""
_MAX_APART: Final = 0.01
"""Of the norm: both quantize activations to 8 bits, in blocks of 32 or 256 values, and differ by up to 0.6 %."""


class MeasuredProducts(msgspec.Struct, frozen=True, kw_only=True):
    """The products of one tensor type with cpuchat's kernels and with llama.cpp's: their rates, by what share of their
    norm the results differ, whether other programs ran, and when that was, in seconds since 1970."""

    cpuchat: ProductRate
    llama_cpp: ProductRate
    difference: float = 0.0
    disturbed: bool = False
    made: float = 0.0

    def __post_init__(self) -> None:
        if [n for n, _ in self.cpuchat.points] != [n for n, _ in self.llama_cpp.points]:
            raise ValueError(f"rates of {self.cpuchat.type} in different passes")  # damaged

    @property
    def is_wrong(self) -> bool:
        """Return whether the results differ by more than quantization does."""
        return self.difference > _MAX_APART

    @property
    def is_chosen(self) -> bool:
        """Return whether cpuchat's kernels are used: with one token they are not slower by more than chance, on the
        mean of all passes not at all, and the results agree. Beside other programs only the last is measured."""
        pairs = zip(self.cpuchat.points, self.llama_cpp.points, strict=True)
        ratios = [ours / theirs for (_, ours), (_, theirs) in pairs]  # by rising numbers of tokens
        is_faster = ratios[0] >= 1 - _NOISE and math.prod(ratios) >= 1
        return not self.is_wrong and (self.disturbed or is_faster)

    @property
    def is_due(self) -> bool:
        """Return whether it should be measured again."""
        return not 0 <= time.time() - self.made < (_DISTURBED_SECONDS if self.disturbed else _KEPT_SECONDS)


_Products = dict[str, MeasuredProducts]


class ProductLog:
    """What was measured on a set of cores of this machine, with this build of the engine and the instruction set that
    its kernels use on `cpu` (None: as far as the engine does)."""

    def __init__(self, cpus: Collection[int], policy: str = "", cpu: Instructions | None = None) -> None:
        # A virtual machine may hide some instructions of the CPU that it names, and modules of the engine do without.
        used = instructions_used(engine_cpu() if cpu is None else cpu)
        self.on = on_cores(cpus, policy, build=engine_fingerprint(), kernels=used)

    def read(self) -> _Products:
        """Return what was measured, by tensor type."""
        found = store.find(self.on, _WHAT, _Products)
        return found.value if found is not None else {}

    def put(self, found: Mapping[str, MeasuredProducts]) -> None:
        """Keep what was `found` now. Forecasts are for these cores until a model is loaded on others."""
        store.change(self.on, _WHAT, _Products, lambda before: (before or {}) | dict(found))


def chosen_by(products: Mapping[str, MeasuredProducts]) -> frozenset[str]:
    """Return the tensor types that cpuchat's kernels multiply: all but those measured to be slower or to differ."""
    return frozenset(TYPES) - {kind for kind, one in products.items() if not one.is_chosen}


def chosen_types(cpu: Instructions, kernels: Kernels = "auto", cpus: Collection[int] = ()) -> frozenset[str]:
    """Return what `chosen_by` does on `cpu`, by what was measured on `cpus` (default: on the cores of the last load);
    none where the kernels do not run, or are not wanted."""
    instructions = instructions_used(cpu)
    if kernels == "llama.cpp" or not instructions:
        return frozenset()
    if cpus:
        return chosen_by(ProductLog(cpus, cpu=cpu).read())
    return _chosen_last(store.stamp(), cpu)


@functools.lru_cache(4)  # forecasts ask many times
def _chosen_last(stamp: object, cpu: Instructions) -> frozenset[str]:
    here = replace(ProductLog((), cpu=cpu).on, policy="")
    found = [
        one for one in store.find_all(_WHAT, _Products) if replace(one.subject, cores=(), policy="") == here
    ] if stamp else []  # fmt: skip
    return chosen_by(found[-1].value if found else {})
