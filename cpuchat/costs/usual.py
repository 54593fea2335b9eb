"""What passes cost on a machine that was not measured: computed from its bandwidth, its cores and the kind of its CPU.

What cores compute is in cpus.toml, each figure with its source.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.costs.model import BITS, CostProfile, ProductRate

Basis = Literal["measured", "data sheet", "computed", "estimate", "given"]
Kind = Literal["desktop", "server", "dual socket", "cloud", "apple", "here"]
Scenario = Literal["low", "value", "high"]
SCENARIOS: tuple[Scenario, ...] = ("low", "value", "high")
USUAL_GHZ = 3.0
"""Clock under load where it is not known."""
_BARRIERS = 20  # per layer
_FULL, _MANY = 16, 112  # cores up to which rates add up, and at which `scaling` holds
_TOKENS = (1, 2, 4, 8, 16, 32)  # from the last one on kernels compute at their full rate
_OVERLAP = 6.0
"""Exponent p of (read^p + compute^p)^(1/p), the time of both. On a Xeon E5-2683v4 with a 70B model, 6 is within 5 % for
passes over 1 to 16 tokens."""
_BY_FEATURE = (
    ("AMX_INT8", "granite-rapids"), ("AVX512_VNNI", "zen4"), ("AVX_VNNI", "zen4"), ("AVX2", "zen3"), ("AVX", "x86-64"),
    ("MATMUL_INT8", "ampereone"),
)  # fmt: skip
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Text = Annotated[str, msgspec.Meta(max_length=400)]


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number with its range (0: none), its source, and what that source is."""

    value: Positive
    low: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    high: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    basis: Basis = "estimate"
    source: Text = ""

    def __post_init__(self) -> None:
        if (self.low and self.low > self.value) or (self.high and self.high < self.value):
            raise ValueError("low, value and high: must be in rising order")

    def at(self, scenario: Scenario) -> float:
        """Return `low`, `value` or `high`; `value` where there is no range."""
        return (getattr(self, scenario) if scenario != "value" else 0.0) or self.value


class _CPU(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`int8` with llama.cpp's kernels, `own` with cpuchat's (None: they do not run there)."""

    int8: Figure
    own: Figure | None = None


class _Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The memory of CPUs whose names match `cpu`: channels of a socket, and million transfers per second."""

    cpu: str
    channels: int
    mts: int


class Usual(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of cpus.toml."""

    cpu: dict[str, _CPU]
    memory: tuple[_Memory, ...]
    few: Figure
    few_own: Figure
    f16: Figure
    attention: Figure
    typical: Figure
    decode: dict[Kind, Figure]
    scaling: Figure
    barrier_us: Figure


@cache
def usual() -> Usual:
    """Return what is usual of CPUs and kinds of machines."""
    return msgspec.toml.decode(Path(__file__).with_name("cpus.toml").read_bytes(), type=prepared(Usual))


def cpu_of(features: Collection[str]) -> str:
    """Return the name in cpus.toml whose rates are nearest to those of a CPU with these instructions."""
    return next((name for feature, name in _BY_FEATURE if feature in features), "arm64")


def usual_profile(
    cpu: str,
    cores: float,
    decode: float,
    *,
    clock_ghz: float = USUAL_GHZ,
    l3_bytes: float = 0.0,
    sockets: int = 1,
    scenario: Scenario = "value",
    own: Collection[str] = (),
) -> CostProfile:
    """Return the profile of a machine with `cores` cores. `decode`: bytes per second read from memory, twice as many
    from L3, of which `l3_bytes` are there (0: not known). `own`: types that cpuchat's kernels compute."""
    found, each = usual(), cores / sockets
    beyond = min(max(math.log(each / _FULL) / math.log(_MANY / _FULL), 0.0), 1.0) if each > _FULL else 0.0
    scaled = cores * found.scaling.value**beyond * clock_ghz / 1e3

    def tops(kernels: Figure) -> float:
        """Return tera-operations per second in products of quantized matrices, all cores together."""
        return scaled * kernels.at(scenario)

    int8, own_int8 = found.cpu[cpu].int8, found.cpu[cpu].own
    barrier = found.barrier_us.value * 1e-6 * math.log2(2 * cores) * sockets

    def rate(kind: str, n: int) -> float:
        kernels, single = (own_int8, found.few_own) if kind in own and own_int8 is not None else (int8, found.few)
        few = single.value ** (1 - math.log(n) / math.log(_TOKENS[-1]))
        is_float = BITS[kind] >= BITS["F16"]
        full = tops(kernels) * (found.f16.value if is_float else 1.0)
        computing = n * 8 / BITS[kind] / (few * full * 1e12 / 2)
        return (decode**-_OVERLAP + computing**_OVERLAP) ** (-1 / _OVERLAP)

    return CostProfile(
        bandwidth=decode,
        products=tuple(ProductRate(kind, tuple((float(n), rate(kind, n)) for n in _TOKENS)) for kind in BITS),
        attention=((1.0, found.attention.value * tops(int8) * 1e12 / 2),),
        layer_s=_BARRIERS * barrier,
        l3_bytes=l3_bytes,
    )
