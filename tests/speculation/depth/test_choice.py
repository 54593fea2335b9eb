import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuchat.costs.model import tokens_per_pass
from cpuchat.speculation.depth.acceptance import DraftPlan, best_plan, limit_gain, rates
from cpuchat.speculation.depth.costs import CurrentCosts
from cpuchat.speculation.drafters.drafter import MAX_DEPTH
from tests.speculation.depth.simulator import TARGETS, true_costs


def costs_of(target: str, draft: str | None = "0.05B") -> CurrentCosts:
    return CurrentCosts(true_costs(target, draft), has_draft=draft is not None)


def test_a_pass_yields_the_geometric_sum():
    for rate, depth in ((0.3, 2), (0.8, 7), (0.95, 15), (1.0, 5), (0.5, 0)):
        assert tokens_per_pass(rate, depth) == pytest.approx(sum(rate**i for i in range(depth + 1)))


@pytest.mark.parametrize("target", TARGETS)
def test_the_best_depth_is_found_at_every_rate(target):
    costs = costs_of(target)
    for rate in (0.2, 0.5, 0.7, 0.9, 1.0):
        by_hand = {
            g: sum(rate**i for i in range(g + 1)) / (costs.times.ms[g] + g * costs.draft.ms[0])
            for g in range(MAX_DEPTH + 1)
        }
        best, plan = best_plan(rates(rate, costs, MAX_DEPTH))
        assert plan == DraftPlan(max(by_hand, key=lambda g: by_hand[g]))
        assert best == pytest.approx(max(by_hand.values()))


def test_the_limit_of_what_drafting_may_gain():
    assert limit_gain(1.0, costs_of("Q8_0"), MAX_DEPTH) > 3
    assert limit_gain(0.0, costs_of("Q8_0"), MAX_DEPTH) < 1
    assert limit_gain(1.0, costs_of("Q8_0"), 0) == 0.0


@given(st.floats(0.0, 1.0), st.integers(0, MAX_DEPTH))
def test_tokens_of_a_pass_are_between_one_and_all(rate, depth):
    assert 1.0 <= tokens_per_pass(rate, depth) <= depth + 1 + 1e-6
