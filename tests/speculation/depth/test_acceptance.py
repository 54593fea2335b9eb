import random

import pytest

from cpuchat.speculation.depth.acceptance import Acceptance, rates
from cpuchat.speculation.depth.costs import CurrentCosts
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, N_BUCKETS, UNKNOWN
from tests.speculation.depth.simulator import TARGETS, true_costs

PRIORS = tuple(0.1 + 0.1 * i for i in range(N_BUCKETS))


def make(weight: float = 2.0) -> Acceptance:
    return Acceptance(PRIORS, weight, 200.0)


def feed(acceptance: Acceptance, rate: float, n: int, seed: int = 0, bucket: int = UNKNOWN) -> None:
    rng = random.Random(seed)
    for _ in range(n):
        acceptance.observe(bucket, rng.random() < rate)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.9, 0.99])
def test_a_rate_is_found(rate):
    acceptance = make()
    feed(acceptance, rate, 1200)
    assert acceptance.mean == pytest.approx(rate, abs=0.06)


def test_grades_are_told_apart():
    acceptance = make()
    rng = random.Random(4)
    for _ in range(300):
        acceptance.observe(2, rng.random() < 0.3)
        acceptance.observe(6, rng.random() < 0.95)
    assert acceptance.rate(2) < 0.5 < 0.8 < acceptance.rate(6)


def test_what_earlier_texts_were_like_is_expected_of_the_next():
    first = make()
    feed(first, 0.9, 400)
    assert Acceptance(PRIORS, 2.0, 200.0, first.lasting).mean == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize("target", TARGETS)
def test_the_rate_of_each_depth_is_its_tokens_by_its_time(target):
    costs = CurrentCosts(true_costs(target, "0.05B"))
    for rate in (0.2, 0.5, 0.7, 0.9, 1.0):
        by_hand = [
            sum(rate**i for i in range(g + 1)) / (costs.times.ms[g] + g * costs.draft.ms[0])
            for g in range(MAX_DEPTH + 1)
        ]
        assert rates(rate, costs, MAX_DEPTH) == pytest.approx(by_hand)
