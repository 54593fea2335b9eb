"""Machines with known properties, and models for them."""

from __future__ import annotations

import math
import random

from cpuchat.bench.cost_probe import TYPES, cases
from cpuchat.costs.fit import Observation
from cpuchat.costs.model import BITS, CostProfile, ProductRate, pass_cost
from cpuchat.models.synthetic.model import header_of
from cpuchat.models.traffic import model_work
from cpuchat.protocol.model_info import ModelWork
from tests.support.shapes import shape_of

QUANTIZATIONS = ("Q4_K_M", "Q8_0", "F16")
KNOTS = (1, 2, 4, 8, 16, 32, 128)
"""Tokens of the passes to measure: kernels change between 1 and 32, and hardly beyond."""


def work(shape: str, quantization: str = "Q8_0", layers: int | None = None) -> ModelWork:
    return model_work(header_of(shape_of(shape, layers), quantization))


def decode_rate(profile: CostProfile, work: ModelWork, n_past: float = 0) -> float:
    """Return tok/s of plain decoding with `n_past` tokens in the context."""
    return 1 / pass_cost(profile, work, 1, n_past).seconds


def product(kind: str, bandwidth: float, madds: float) -> ProductRate:
    """Return the rate of cores that read and compute so much per second, at the same time."""
    each = 8 / BITS[kind]  # multiply-adds per byte and token
    return ProductRate(kind, tuple((n, min(bandwidth, madds / each / n)) for n in KNOTS))


def two_cores(**madds: float) -> CostProfile:
    """About two Zen 4 cores; `madds` are 1e9 multiply-adds per second of types that are not as fast as others."""
    return CostProfile(
        bandwidth=4.2e10, l3_bytes=32e6, layer_s=3e-5,
        products=tuple(product(kind, 4e10, 1e9 * madds.get(kind, 120.0 if kind != "F16" else 72.0)) for kind in TYPES),
        attention=((1.0, 1e10), (128.0, 2e10)), activations=3e8,
    )  # fmt: skip


def probe(machine: CostProfile, noise: float = 0.0) -> list[Observation]:
    """Measure what the probe does, with a relative standard deviation of `noise`."""
    lots, found = random.Random(1), []
    for case in cases():
        model = model_work(header_of(case.shape, case.quantization))
        for one in case.passes:
            outputs = None if one.n == 1 else 1
            seconds = pass_cost(machine, model, one.n, one.depth, n_outputs=outputs).seconds
            found.append(
                Observation(
                    work=model, n_tokens=one.n, n_past=one.depth, n_outputs=outputs,
                    seconds=seconds * math.exp(noise * lots.gauss(0, 1)),
                )
            )  # fmt: skip
    return found
