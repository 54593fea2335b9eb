"""Profiles computed from passes of machines with known properties, and from those that a probe recorded."""

from __future__ import annotations

import msgspec
import pytest

from cpuchat.costs.fit import Observation, fit
from cpuchat.costs.model import CostProfile, pass_cost, prefill_cost
from cpuchat.costs.usual import usual_profile
from tests.costs.made_up import QUANTIZATIONS, decode_rate, probe, two_cores, work

START = usual_profile("zen4", 2, 36e9)
MODELS = [
    (shape, quantization, layers)
    for shape, layers in (("0.05b", None), ("0.5b", None), ("1.5b", None), ("3b", None), ("30b-a3b", 4))
    for quantization in QUANTIZATIONS
]


def fitted(machine: CostProfile) -> CostProfile:
    return fit(START, tuple(probe(machine, 0.0)))


def errors(found: CostProfile, machine: CostProfile, models: list[tuple[str, str, int | None]] = MODELS) -> list[float]:
    """Return the largest relative error of decoding, of a pass over 8 tokens, and of prefill, over models."""
    figures = [
        [1 / decode_rate(one, model, 100), pass_cost(one, model, 8, 100).seconds, prefill_cost(one, model, 512).seconds]
        for one in (found, machine)
        for model in (work(*spec) for spec in models)
    ]
    half = len(models)
    pairs = zip(figures[:half], figures[half:], strict=True)
    return [max(off) for off in zip(*([abs(a / b - 1) for a, b in zip(*p, strict=True)] for p in pairs), strict=True)]


def test_a_probe_predicts_models_that_it_has_not_seen() -> None:
    machine = two_cores(Q6_K=40.0)
    decode, verify, prefill = errors(fitted(machine), machine, MODELS[3:])
    assert decode < 0.05 and verify < 0.07 and prefill < 0.05
    assert errors(fitted(machine), machine, MODELS[:3])[0] < 0.5  # a model in the caches


def test_every_type_has_a_rate_of_its_own() -> None:
    """Q4_0 was once predicted like Q4_K, which was half as fast."""
    machine = two_cores(Q4_K=30.0)
    found = fitted(machine)
    for quantization in ("Q4_K", "Q4_0"):
        model = work("1.5b", quantization)
        for n in (1, 8):
            assert pass_cost(found, model, n).seconds == pytest.approx(pass_cost(machine, model, n).seconds, rel=0.05)


def test_what_was_not_measured_keeps_its_start() -> None:
    assert fit(START, ()) == START
    some = tuple(one for one in probe(two_cores()) if one.main.type.startswith("Q8_0"))
    found = fit(START, some)
    assert found.product("Q8_0") != START.product("Q8_0")
    assert found.product("Q4_K") == START.product("Q4_K")


def test_a_disturbed_pass_does_not_count() -> None:
    seen = probe(two_cores())
    late = [msgspec.structs.replace(one, seconds=9 * one.seconds) if one.n_tokens == 2 else one for one in seen]
    assert fit(START, tuple(late)).product("Q4_K").rate(2) > 0.5 * two_cores().product("Q4_K").rate(2)


def test_impossible_measurements_are_refused() -> None:
    with pytest.raises(ValueError):
        fit(START, (Observation(work=work("tiny"), n_tokens=1, seconds=0.0),))
