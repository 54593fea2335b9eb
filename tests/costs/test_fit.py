"""Fits of profiles to passes of machines with known properties."""

from __future__ import annotations

import msgspec
import pytest

from cpuchat.costs.fit import fit
from cpuchat.costs.model import (
    CostProfile,
    Rate,
    interpolated,
    pass_cost,
    prefill_cost,
    usual,
    usual_profile,
)
from cpuchat.costs.observations import Observation
from cpuchat.models.costs import with_points
from cpuchat.protocol.model_info import ModelWork, Weights
from tests.costs.made_up import (
    QUANTIZATIONS,
    decode_rate,
    guess,
    probe,
    probe_by_cases,
    recorded_probe,
    two_cores,
    with_experts,
    work,
)

pytestmark = pytest.mark.slow

MODELS = [
    (shape, quantization, layers)
    for shape, layers in (("0.05b", None), ("0.5b", None), ("1.5b", None), ("3b", None), ("30b-a3b", 4))
    for quantization in QUANTIZATIONS
]


def errors(found: CostProfile, machine: CostProfile) -> tuple[float, float]:
    """Return the largest relative errors of decoding and of prefill, over models that the fit has not seen."""
    decode = prefill = 0.0
    for name, quantization, layers in MODELS:
        model = work(name, quantization, layers)
        decode = max(decode, abs(decode_rate(found, model, 100) / decode_rate(machine, model, 100) - 1))
        ours, true = (prefill_cost(one, model, 512).seconds for one in (found, machine))
        prefill = max(prefill, abs(ours / true - 1))
    return decode, prefill


def test_a_probe_predicts_models_that_it_has_not_seen() -> None:
    machine = two_cores()
    found = fit(guess(), probe(machine))
    assert found.error < 0.02
    decode, prefill = errors(found.profile, machine)
    assert decode < 0.08
    assert prefill < 0.08


def test_the_passes_of_the_probe_tell_every_rate_also_those_of_experts() -> None:
    machine = with_experts(two_cores(overlap=8.0))
    seen = probe_by_cases(machine, noise=0.03)
    found = fit(with_points(usual_profile("zen4", 2, 32e9), seen), seen)
    assert found.is_plausible and found.error_90 < 0.05
    for rate in found.profile.rates:
        for n, value in rate.points:
            true = [interpolated(one.points, n) for one in machine.rates
                    if (one.type, one.cached) == (rate.type, rate.cached)]  # fmt: skip
            assert all(1 / 3 < value / one < 3 for one in true), (rate.type, n)
    mixture = work("30b-a3b", "Q4_K_M", 4)
    assert prefill_cost(found.profile, mixture, 512).seconds == pytest.approx(
        prefill_cost(machine, mixture, 512).seconds, rel=0.15
    )


def test_a_search_does_not_end_in_rates_that_no_machine_has() -> None:
    """Where computing hides behind reading, one step once moved the rate of experts by a factor of 2,500."""
    seen = recorded_probe()
    start = with_points(usual_profile("granite-rapids", 2, usual().decode["here"].value * 23.4e9), seen)
    found = fit(start, seen)
    assert found.is_plausible and found.error < 0.01 and found.error_90 < 0.05
    assert found.profile.madd_rate("Q4_K routed", 1) == pytest.approx(3e10, rel=0.5)
    prefill = 512 / prefill_cost(found.profile, work("30b-a3b", "Q4_K_M", 4), 512).seconds
    assert prefill == pytest.approx(407, rel=0.2)  # measured
    lost = [msgspec.structs.replace(one, seconds=one.seconds * 1.9 ** (n % 5 - 2)) for n, one in enumerate(seen)]
    assert not fit(start, lost).is_plausible


def test_noise_and_a_few_disturbed_passes_do_not_spoil_it() -> None:
    machine = two_cores()
    noisy = probe(machine, noise=(0.03, -0.04, 0.0, 0.05, -0.02, 0.9, -0.03, 0.02, -0.05, 0.01, 0.04))
    found = fit(guess(), noisy)
    decode, prefill = errors(found.profile, machine)
    assert decode < 0.15
    assert prefill < 0.2


@pytest.mark.parametrize("overlap", [1.2, 3.0, 8.0])
def test_whether_reading_and_computing_overlap_is_found_out(overlap: float) -> None:
    machine = two_cores(overlap)
    found = fit(guess(), probe(machine))
    decode, prefill = errors(found.profile, machine)
    assert decode < 0.1
    assert prefill < 0.08


def test_a_slow_type_is_not_taken_for_slow_memory() -> None:
    machine = two_cores()
    slow = msgspec.structs.replace(
        machine,
        rates=tuple(Rate(one.type, ((1.0, 5e9),)) if one.type == "F16" else one for one in machine.rates),
    )
    found = fit(guess(), probe(slow)).profile
    rates = [rate for _, rate in found.bandwidth]
    assert rates == sorted(rates, reverse=True)
    assert decode_rate(found, work("8b", "Q8_0")) == pytest.approx(decode_rate(slow, work("8b", "Q8_0")), rel=0.1)


def test_a_rate_that_is_only_known_without_caches_counts_once_between_both() -> None:
    start = CostProfile(bandwidth=((1.0, 1e12),), rates=(Rate("Q8_0", ((1.0, 5e9),)),))
    machine = msgspec.structs.replace(start, rates=(Rate("Q8_0", ((1.0, 1e10),)),))
    between = ModelWork(n_layer=1, dense=(Weights("Q8_0", 75e6, 75e6),))
    seconds = pass_cost(machine, between, 64).seconds
    found = fit(start, [Observation(work=between, n_tokens=64, seconds=seconds)] * 5).profile
    assert found.madd_rate("Q8_0", 64) == pytest.approx(1e10, rel=0.05)


def test_without_measurements_the_start_stays() -> None:
    assert fit(guess(), []).profile == guess()


def test_what_was_not_measured_keeps_its_start() -> None:
    machine = two_cores()
    some = [one for one in probe(machine) if one.n_tokens == 1]
    found = fit(guess(), some).profile
    assert found.madd_rate("Q8_0", 512) == pytest.approx(guess().madd_rate("Q8_0", 512), rel=0.05)


def test_chats_with_a_small_model_do_not_spoil_predictions_of_large_ones() -> None:
    machine = two_cores()
    small, large = work("0.05b", "Q4_K_M"), work("8b", "Q4_K_M")
    # A chat that ran beside other load, at 0.6 of its speed.
    seconds = pass_cost(machine, small, 1, 300).seconds / 0.6
    chat = Observation(work=small, n_tokens=1, n_past=300, seconds=seconds, weight=0.5, model="small")
    refined = fit(guess(), [*probe(machine), *[chat] * 5])
    assert decode_rate(refined.profile, large) == pytest.approx(decode_rate(machine, large), rel=0.1)
    again = pass_cost(refined.profile, small, 1, 300).seconds * refined.factors["small"]
    assert again == pytest.approx(seconds, rel=0.05)


def test_chats_teach_what_a_guess_does_not_know() -> None:
    machine = two_cores()
    model = work("8b", "Q4_K_M")
    before = abs(decode_rate(guess(), model) / decode_rate(machine, model) - 1)
    chat = Observation(work=model, n_tokens=1, n_past=300, seconds=pass_cost(machine, model, 1, 300).seconds)
    found = fit(guess(), [chat]).profile
    after = abs(decode_rate(found, model) / decode_rate(machine, model) - 1)
    assert after < 0.02 < before


def test_more_weight_pulls_more() -> None:
    machine, model = two_cores(), work("1.5b")
    true = pass_cost(machine, model).seconds
    two = [Observation(work=model, n_tokens=1, seconds=true), Observation(work=model, n_tokens=1, seconds=1.2 * true)]
    first = fit(guess(), [two[0], msgspec.structs.replace(two[1], weight=0.01)]).profile
    second = fit(guess(), [msgspec.structs.replace(two[0], weight=0.01), two[1]]).profile
    assert pass_cost(first, model).seconds < pass_cost(second, model).seconds


def test_impossible_measurements_are_refused() -> None:
    model = work("tiny")
    with pytest.raises(ValueError):
        fit(guess(), [Observation(work=model, n_tokens=1, seconds=0.0)])
    with pytest.raises(ValueError):
        fit(guess(), [Observation(work=model, n_tokens=1, seconds=1.0, weight=-1.0)])


def test_what_many_models_agree_on_changes_the_profile() -> None:
    machine = two_cores()
    chats = [
        Observation(work=work(*spec), n_tokens=1, n_past=300, model=str(spec),
                    seconds=pass_cost(machine, work(*spec), 1, 300).seconds)
        for spec in MODELS
    ]  # fmt: skip
    refined = fit(guess(), chats).profile
    unseen = [work("14b", kind) for kind in QUANTIZATIONS]
    before, after = (
        max(abs(decode_rate(one, model) / decode_rate(machine, model) - 1) for model in unseen)
        for one in (guess(), refined)
    )
    assert after < before
