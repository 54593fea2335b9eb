import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuchat.speculation.depth.acceptance import Acceptance
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, N_BUCKETS, UNKNOWN

PRIORS = tuple(0.1 + 0.1 * i for i in range(N_BUCKETS))


def make(weight: float = 2.0, window: float = 200.0) -> Acceptance:
    return Acceptance(PRIORS, weight, window)


def feed(acceptance: Acceptance, rate: float, n: int, seed: int = 0, bucket: int = UNKNOWN) -> None:
    rng = random.Random(seed)
    for _ in range(n):
        acceptance.observe(bucket, rng.random() < rate)


def test_before_anything_was_seen_the_priors_hold():
    acceptance = make()
    for bucket, prior in enumerate(PRIORS):
        assert acceptance.rate(bucket, 0) == pytest.approx(prior)
    assert acceptance.n_observed == 0


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.9, 0.99])
def test_an_independent_rate_is_found_at_every_position(rate):
    acceptance = make()
    feed(acceptance, rate, 1200)
    assert acceptance.mean == pytest.approx(rate, abs=0.06)
    assert all(found == pytest.approx(rate, abs=0.15) for found in acceptance.rates(0))
    assert len(acceptance.rates()) == MAX_DEPTH


def test_grades_are_told_apart():
    acceptance = make()
    rng = random.Random(4)
    for _ in range(300):
        acceptance.observe(2, rng.random() < 0.3)
        acceptance.observe(6, rng.random() < 0.95)
    assert acceptance.rate(2, 0) < 0.5 < 0.8 < acceptance.rate(6, 0)


def test_what_is_being_copied_goes_on_being_copied():
    acceptance = make()
    for _ in range(40):
        for right in [False] * 4 + [True] * 12:
            acceptance.observe(UNKNOWN, right)
    assert acceptance.rate(UNKNOWN, 8) > acceptance.rate(UNKNOWN, 0) + 0.3
    deep = acceptance.rates(0)
    assert deep[0] < deep[8]


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.2), (0.2, 0.9), (0.95, 0.5)])
def test_a_change_of_the_text_is_followed_within_three_dozen_tokens(before, after):
    acceptance = make()
    feed(acceptance, before, 600)
    feed(acceptance, after, 36, seed=1)
    assert abs(acceptance.mean - after) < abs(acceptance.mean - before)
    feed(acceptance, after, 60, seed=2)
    assert acceptance.mean == pytest.approx(after, abs=0.15)


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.5), (0.1, 0.4), (0.5, 0.5), (0.9, 0.9)])
def test_a_short_memory_notices_a_change_too(before, after):
    """With the memory of the free drafters: in most texts, and hardly ever without a change."""
    noticed = 0
    for seed in range(20):
        acceptance = make(weight=6.0, window=64.0)
        feed(acceptance, before, 300, seed=seed)
        held = [acceptance.n_observed]
        rng = random.Random(100 + seed)
        for _ in range(60):
            acceptance.observe(UNKNOWN, rng.random() < after)
            held.append(acceptance.n_observed)
        noticed += min(held) < 40
    assert noticed >= 12 if before != after else noticed <= 1


def test_an_earlier_text_counts_less():
    acceptance = make()
    feed(acceptance, 0.9, 600)
    mean = acceptance.mean
    acceptance.fade(40.0)
    assert acceptance.n_observed == pytest.approx(40.0)
    assert acceptance.mean == pytest.approx(mean, abs=0.05)
    assert acceptance.accept_streak == 0
    assert acceptance.quantile(2.0) > mean


@given(st.lists(st.tuples(st.integers(0, N_BUCKETS - 1), st.booleans()), max_size=300))
def test_rates_are_always_probabilities(observations):
    acceptance = make()
    for bucket, right in observations:
        acceptance.observe(bucket, right)
    rates = [acceptance.rate(bucket, streak) for bucket in range(N_BUCKETS) for streak in range(12)]
    assert all(
        0 <= rate <= 1
        for rate in [*rates, *acceptance.rates(), acceptance.mean, acceptance.quantile(3.0), acceptance.quantile(-3.0)]
    )
    assert acceptance.quantile(1.0) >= acceptance.mean >= acceptance.quantile(-1.0)
