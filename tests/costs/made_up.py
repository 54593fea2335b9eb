"""Machines with known properties, and models for them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cpuchat.bench.cost_probe import cases
from cpuchat.costs.model import ACTIVATIONS, KV, ROUTED, CostProfile, Rate, pass_cost
from cpuchat.costs.observations import KNOTS, Observation
from cpuchat.models.synthetic.model import header_of
from cpuchat.models.traffic import model_work
from cpuchat.protocol.model_info import ModelWork

QUANTIZATIONS = ("Q4_K_M", "Q8_0", "F16")


def work(shape: str, quantization: str = "Q8_0", layers: int | None = None) -> ModelWork:
    return model_work(header_of(shape, quantization, layers=layers))


def decode_rate(profile: CostProfile, work: ModelWork, n_past: float = 0) -> float:
    """Return tok/s of plain decoding with `n_past` tokens in the context."""
    return 1 / pass_cost(profile, work, 1, n_past).seconds


def two_cores(overlap: float = 4.0) -> CostProfile:
    """About two Zen 4 cores: few tokens are multiplied slowly, and all of them faster with weights in the caches."""
    slow, fast = 3e10, 1.2e11
    curve = tuple((n, slow * (fast / slow) ** min(i / 5, 1.0)) for i, n in enumerate(KNOTS))
    return CostProfile(
        pass_s=2e-4,
        layer_s=3e-5,
        bandwidth=((16e6, 9e10), (64e6, 4.2e10)),
        rates=(
            Rate("Q8_0", curve),
            Rate("Q4_K", tuple((n, 0.8 * rate) for n, rate in curve)),
            Rate("F16", tuple((n, 0.6 * rate) for n, rate in curve)),
            Rate("Q8_0", tuple((n, 1.5 * rate) for n, rate in curve), cached=True),
            Rate("Q4_K", tuple((n, 2 * rate) for n, rate in curve), cached=True),
            Rate("F16", tuple((n, 1.2 * rate) for n, rate in curve), cached=True),
            Rate(KV, ((1.0, 2e10),)),
            Rate(ACTIVATIONS, ((1.0, 3e8),)),
        ),
        overlap=overlap,
    )


def with_experts(machine: CostProfile) -> CostProfile:
    """Return a machine with kernels of their own for experts, and rates of all types that a probe measures."""
    curve = tuple((n, 6e9 * min(n, 40) ** 0.45) for n in KNOTS)
    dense = machine.rates[0].points
    return msgspec.structs.replace(
        machine,
        rates=(
            *machine.rates,
            *(Rate(kind + ROUTED, tuple((n, by * rate) for n, rate in curve))
              for kind, by in (("Q8_0", 5.0), ("Q4_K", 4.0), ("Q6_K", 3.5), ("F16", 3.0))),
            *(Rate(kind, tuple((n, by * (1 + cached) * rate) for n, rate in dense), cached)
              for kind, by in (("Q6_K", 0.5), ("Q5_0", 0.4)) for cached in (False, True)),
        ),
    )  # fmt: skip


def probe_by_cases(machine: CostProfile, noise: float) -> list[Observation]:
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


def recorded_probe() -> list[Observation]:
    """Return what a probe measured on two cores of a Xeon."""
    models = {
        (case.shape.name, case.shape.n_layer, case.quantization): model_work(header_of(case.shape, case.quantization))
        for case in cases()
    }
    found = []
    for line in Path(__file__).with_name("probe_xeon.txt").read_text().splitlines()[1:]:
        shape, layers, kind, n, past, tok_s, weight = line.split()
        found.append(
            Observation(
                work=models[shape, int(layers), kind], n_tokens=int(n), n_past=int(past),
                n_outputs=None if n == "1" else 1, seconds=int(n) / float(tok_s), weight=float(weight),
            )
        )  # fmt: skip
    return found


def knots(types: Sequence[str], rate: float) -> tuple[Rate, ...]:
    """Return rates at `KNOTS` to start a fit from."""
    return tuple(Rate(kind, tuple((n, rate) for n in KNOTS)) for kind in types)


def guess() -> CostProfile:
    """What may be assumed of any machine before it is measured."""
    return CostProfile(
        pass_s=1e-4,
        layer_s=1e-5,
        bandwidth=((16e6, 6e10), (64e6, 3e10)),
        rates=(
            *knots(("Q8_0", "Q4_K", "F16"), 6e10),
            *(Rate(one.type, one.points, cached=True) for one in knots(("Q8_0", "Q4_K", "F16"), 6e10)),
            Rate(KV, ((1.0, 4e10),)),
            *knots((ACTIVATIONS,), 6e8),
        ),
    )


def probe(machine: CostProfile, noise: tuple[float, ...] = (0.0,)) -> list[Observation]:
    """Measure what a probe would: one layer and four of two widths, in every type; `noise` in turn, relative."""
    models = [
        work(shape, quantization, layers)
        for quantization in QUANTIZATIONS
        for shape, layers in (("tiny", 2), ("0.05b", 6), ("1.5b", 2), ("3b", 4))
    ]
    found: list[Observation] = []
    for model in models:
        for n in KNOTS:
            seconds = pass_cost(machine, model, n, 0, n_outputs=1).seconds * (1 + noise[len(found) % len(noise)])
            found.append(Observation(work=model, n_tokens=n, n_outputs=1, seconds=seconds))
        seconds = pass_cost(machine, model, 1, 4096).seconds
        found.append(Observation(work=model, n_tokens=1, n_past=4096, seconds=seconds))
    return found
