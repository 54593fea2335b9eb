"""Computes the profile of a machine that was not measured: from its bandwidth, its cores and the kind of its CPU.

What cores compute is in cpus.toml, each figure with its source.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from cpuchat import toml
from cpuchat.costmodel.profile import CostProfile, Rate
from cpuchat.costmodel.work import KV

Basis = Literal["measured", "data sheet", "computed", "estimate", "given"]
Kind = Literal["desktop", "server", "dual socket", "cloud", "apple", "here"]
Scenario = Literal["low", "value", "high"]
SCENARIOS: tuple[Scenario, ...] = ("low", "value", "high")
USUAL_GHZ = 3.0
"""Clock under load where it is not known."""
_BARRIERS, _PASS_BARRIERS = 20, 40  # per layer, and per pass beside its layers
_FULL, _MANY = 16, 112  # cores up to which rates add up, and at which `scaling` holds
_OFF_BATCH = 32  # tokens from which kernels compute at their full rate
_BY_FEATURE = (
    ("AMX_INT8", "granite-rapids"),
    ("AVX512_VNNI", "zen4"),
    ("AVX_VNNI", "zen4"),
    ("AVX2", "zen3"),
    ("AVX", "x86-64"),
    ("MATMUL_INT8", "ampereone"),
)
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
    int8: Figure


class Usual(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of cpus.toml."""

    cpu: dict[str, _CPU]
    few: Figure
    f16: Figure
    attention: Figure
    typical: Figure
    decode: dict[Kind, Figure]
    scaling: Figure
    barrier_us: Figure


@functools.cache
def usual() -> Usual:
    """Return what is usual of CPUs and kinds of machines."""
    text = Path(__file__).with_name("cpus.toml").read_text(encoding="utf-8")
    return msgspec.convert(toml.loads(text), Usual)


def cpu_of(features: Collection[str]) -> str:
    """Return the name in cpus.toml whose rates are nearest to those of a CPU with these instructions."""
    return next((name for feature, name in _BY_FEATURE if feature in features), "arm64")


def int8_tops(
    cpu: str, cores: float, clock_ghz: float = USUAL_GHZ, *, sockets: int = 1, scenario: Scenario = "value"
) -> float:
    """Return tera-operations per second in products of quantized matrices, all cores together."""
    found, each = usual(), cores / sockets
    beyond = min(max(math.log(each / _FULL) / math.log(_MANY / _FULL), 0.0), 1.0) if each > _FULL else 0.0
    return cores * found.scaling.value**beyond * clock_ghz * found.cpu[cpu].int8.at(scenario) / 1e3


def usual_profile(
    cpu: str,
    cores: float,
    decode: float,
    *,
    clock_ghz: float = USUAL_GHZ,
    l3_bytes: float = 0.0,
    sockets: int = 1,
    scenario: Scenario = "value",
) -> CostProfile:
    """Return the profile of a machine with `cores` cores.

    Args:
        decode: bytes per second that decoding reads from memory; twice as many where the weights stay in L3.
        l3_bytes: of all L3 caches; 0: not known.
    """
    found = usual()
    full = int8_tops(cpu, cores, clock_ghz, sockets=sockets, scenario=scenario) * 1e12 / 2
    barrier = found.barrier_us.value * 1e-6 * math.log2(2 * cores) * sockets
    curve = ((1.0, found.few.value * full), (float(_OFF_BATCH), full))
    return CostProfile(
        bandwidth=((l3_bytes / 2, 2 * decode), (2 * l3_bytes, decode)) if l3_bytes else ((1.0, decode),),
        rates=(
            Rate("Q4_K", curve),
            Rate("Q8_0", curve),
            Rate("F16", tuple((n, found.f16.value * rate) for n, rate in curve)),
            Rate(KV, ((1.0, found.attention.value * full),)),
        ),
        pass_s=_PASS_BARRIERS * barrier,
        layer_s=_BARRIERS * barrier,
    )
