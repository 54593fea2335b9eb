"""The cost model fitted to real measurements of one model, against those of others on the same machine.

Decoding of 0.5B in Q4_K_M is not among them: 67 tok/s where 50.7 were measured, as most of it is Q5_0, which the 1.5B
does not have. A probe has to measure every type.

Two cores of a Zen 4, November 2026: passes of a 1.5B model over 1 to 16 tokens, its prefill, and what other models did.
"""

from __future__ import annotations

import pytest

from cpuchat.costs.fit import fit
from cpuchat.costs.model import KV, CostProfile, Rate, pass_cost, prefill_cost
from cpuchat.costs.observations import Fitted, Observation
from tests.costs.made_up import decode_rate, knots, work

TOKENS = (2, 3, 4, 5, 6, 8, 12, 16)
PASSES = {
    "Q4_K_M": (35, (1.60, 2.16, 2.61, 3.25, 3.77, 6.59, 7.34, 7.41)),
    "Q8_0": (62, (1.52, 1.74, 1.86, 2.91, 3.15, 2.79, 3.79, 4.76)),
    "F16": (98, (1.32, 1.40, 1.41, 1.55, 1.58, 2.23, 2.60, 3.31)),
}
"""Milliseconds of a pass over one token, and how many times as long those over more take."""
PREFILL = {"Q4_K_M": 102.3, "Q8_0": 77.4}


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    rates = (*knots(("Q8_0", "Q4_K", "Q6_K", "F16"), 6e10), Rate(KV, ((1.0, 2e10),)))
    start = CostProfile(pass_s=2e-4, layer_s=3e-5, bandwidth=((64e6, 3.5e10),), rates=rates)
    seen: list[Observation] = []
    for quantization, (ms, relative) in PASSES.items():
        model = work("1.5b", quantization)
        times = (1.0, *relative)
        seen += [
            Observation(work=model, n_tokens=n, seconds=ms / 1e3 * time)
            for n, time in zip((1, *TOKENS), times, strict=True)
        ]
    for quantization, rate in PREFILL.items():
        seen.append(Observation(work=work("1.5b", quantization), n_tokens=512, n_outputs=1, seconds=512 / rate))
    return fit(start, seen)


def test_curves_with_bargains_and_traps_are_met(fitted: Fitted) -> None:
    for quantization, (_, relative) in PASSES.items():
        model = work("1.5b", quantization)
        one = pass_cost(fitted.profile, model).seconds
        for n, times in zip(TOKENS, relative, strict=True):
            assert pass_cost(fitted.profile, model, n).seconds / one == pytest.approx(times, rel=0.15), (
                quantization,
                n,
            )
    eight, five = (pass_cost(fitted.profile, work("1.5b", "Q8_0"), n).seconds for n in (8, 5))
    assert eight < five  # with Q8_0, verifying eight tokens is faster


@pytest.mark.parametrize(
    ("shape", "quantization", "layers", "tok_s"),
    [("0.5b", "Q8_0", None, 46.6), ("30b-a3b", "Q4_K_M", 4, 65.8)],
)
def test_decoding_of_other_models(
    fitted: Fitted, shape: str, quantization: str, layers: int | None, tok_s: float
) -> None:
    model = work(shape, quantization, layers)
    assert decode_rate(fitted.profile, model, 64) == pytest.approx(tok_s, rel=0.15)


@pytest.mark.parametrize(("quantization", "tok_s"), [("Q4_K_M", 247.6), ("Q8_0", 266.4)])
def test_prefill_of_another_model(fitted: Fitted, quantization: str, tok_s: float) -> None:
    found = 512 / prefill_cost(fitted.profile, work("0.5b", quantization), 512).seconds
    assert found == pytest.approx(tok_s, rel=0.2)
