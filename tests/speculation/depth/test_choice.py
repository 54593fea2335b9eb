import pytest

from cpuchat.speculation.depth.acceptance import DraftPlan, best_plan, rates
from cpuchat.speculation.depth.costs import CurrentCosts
from cpuchat.speculation.drafters.drafter import MAX_DEPTH
from tests.speculation.depth.simulator import TARGETS, true_costs


def costs_of(target: str, draft: str | None = "0.05B") -> CurrentCosts:
    return CurrentCosts(true_costs(target, draft), has_draft=draft is not None)


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
