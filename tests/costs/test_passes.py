"""The time of passes on machines with known properties."""

from __future__ import annotations

import msgspec
import pytest

from cpuchat.costs.model import (
    ROUTED,
    CostProfile,
    ProductRate,
    batch_rate,
    interpolated,
    max_users,
    pass_cost,
    prefill_cost,
    scaled,
)
from cpuchat.costs.usual import usual_profile
from tests.costs.made_up import decode_rate, product, two_cores, work

MEASURED_70B = {1: 92.4, 2: 92.6, 3: 94.3, 4: 96.8, 5: 106.3, 6: 124.1, 8: 169.3, 10: 210.7, 12: 251.4, 16: 339.1}
"""Seconds for 128 passes over n tokens: 70B IQ4_XS on a Xeon E5-2683 v4 (ik_llama.cpp, discussion 164)."""


def simple(bandwidth: float = 4e10, rate: float = 1e12, layer_s: float = 0.0) -> CostProfile:
    return CostProfile(bandwidth=bandwidth, products=(product("Q8_0", bandwidth, rate),), layer_s=layer_s)


def test_fixed_costs_dominate_small_models() -> None:
    machine = simple(layer_s=5e-4)
    tiny, large = work("tiny"), work("8b")
    assert pass_cost(machine, tiny).limit == "overhead"
    assert pass_cost(machine, tiny).fixed == pytest.approx(5e-4 * (2 + 2))
    assert pass_cost(machine, large).limit == "memory"


def test_a_long_context_makes_decoding_slower_by_its_kv_cache() -> None:
    machine, model = simple(), work("8b")
    short, long = pass_cost(machine, model, 1, 0), pass_cost(machine, model, 1, 32_000)
    kv = 32_000 * sum(one.nbytes for one in model.attention)
    assert long.read - short.read == pytest.approx(kv / 4e10, rel=1e-3)
    assert decode_rate(machine, model, 32_000) < decode_rate(machine, model, 0)


def test_a_prompt_takes_the_time_of_its_micro_batches() -> None:
    machine, model = two_cores(), work("1.5b")
    whole = prefill_cost(machine, model, 1200).seconds
    by_hand = (
        pass_cost(machine, model, 512, 0, n_outputs=0).seconds
        + pass_cost(machine, model, 512, 512, n_outputs=0).seconds
        + pass_cost(machine, model, 176, 1024, n_outputs=1).seconds
    )
    assert whole == pytest.approx(by_hand)
    assert prefill_cost(machine, model, 0).seconds == 0


def test_weights_in_the_caches_are_read_faster_and_a_draft_model_evicts_them() -> None:
    machine, small = two_cores(), work("tiny")
    assert machine.read_rate(small.weight_bytes) > machine.read_rate(1e9)
    assert pass_cost(machine, small, beside=1e9).read > pass_cost(machine, small).read


def test_many_chats_share_the_weights_until_arithmetic_or_kv_cache_limit_them() -> None:
    machine, model = simple(), work("8b")
    rates = [batch_rate(machine, model, n, 512) for n in (1, 4, 16, 64)]
    assert rates == sorted(rates, reverse=True)
    assert 4 * rates[1] > 3.5 * rates[0]  # together, four write almost four times as much
    wished = rates[2]
    assert max_users(machine, model, wished, 512, limit=100) == 16
    assert max_users(machine, model, wished, 512, limit=7) == 7
    assert max_users(machine, model, 2 * rates[0], 512, limit=100) == 0


def test_the_curve_of_a_xeon_is_met_within_a_tenth() -> None:
    # PP 6.1 tok/s, TG 1.39: the rate of arithmetic and the bandwidth of that machine.
    model = work("70b", "Q4_0")
    one, each = MEASURED_70B[1] / 128, 1 / 6.1
    points = tuple((n, model.weight_bytes / max(one, n * each)) for n in (1, 4, 5, 6, 8, 16))
    machine = CostProfile(bandwidth=points[0][1], products=(ProductRate("Q4_0", points),))
    for n, seconds in MEASURED_70B.items():
        assert pass_cost(machine, model, n).seconds == pytest.approx(seconds / 128, rel=0.1)


def test_rates_between_points_beyond_the_last_and_of_unknown_types() -> None:
    assert interpolated(((1, 10), (100, 1000)), 10) == pytest.approx(100)
    assert interpolated(((1, 10), (100, 1000)), 0.5) == 10
    assert interpolated(((1, 10), (100, 1000)), 1e6) == 1000
    rate = ProductRate("Q8_0", ((1.0, 30e9), (64.0, 3e9)))
    assert rate.rate(640) == pytest.approx(0.3e9), "twice the tokens take twice as long"
    machine = two_cores()
    assert machine.product("BF16").type == "F16"
    assert machine.product("Q4_1").type == "Q5_0"
    assert machine.product("IQ2_XXS").type in ("Q4_K", "Q4_0")
    assert machine.product("Q4_K" + ROUTED).type == "Q4_K"


def test_nothing_is_read_faster_than_the_memory_allows() -> None:
    """Also where a probe measured weights that stayed in large caches."""
    machine = msgspec.structs.replace(simple(), products=(ProductRate("Q8_0", ((1.0, 9e10), (64.0, 5e9))),))
    assert pass_cost(machine, work("8b")).seconds == pytest.approx(work("8b").weight_bytes / 4e10, rel=1e-3)


def test_a_machine_that_is_twice_as_fast_takes_half_the_time_for_every_pass() -> None:
    machine, model = two_cores(), work("8b", "Q4_K_M")
    twice = scaled(machine, 2.0)
    for n in (1, 8, 512):
        assert pass_cost(twice, model, n, 100).seconds == pytest.approx(pass_cost(machine, model, n, 100).seconds / 2)


@pytest.mark.parametrize("cpu", ["zen3", "zen4", "granite-rapids"])
def test_cpuchats_kernels_make_passes_of_several_tokens_cheaper(cpu: str) -> None:
    ours, theirs = (usual_profile(cpu, 8, 60e9, own=types) for types in (("Q4_K", "Q6_K"), ()))
    model = work("8b", "Q4_K_M")
    for n in (4, 8, 512):
        assert pass_cost(ours, model, n).seconds < 0.9 * pass_cost(theirs, model, n).seconds
    arm = [usual_profile("arm64", 8, 60e9, own=types) for types in (("Q4_K",), ())]
    assert arm[0] == arm[1]
