import pytest

from cpuchat.speculation.depth.acceptance import rates
from cpuchat.speculation.depth.costs import CurrentCosts
from cpuchat.speculation.drafters.drafter import MAX_DEPTH
from tests.speculation.depth.simulator import TARGETS, true_costs


def costs_of(target: str, draft: str | None = "0.05B") -> CurrentCosts:
    return CurrentCosts(true_costs(target, draft))


@pytest.mark.parametrize("target", TARGETS)
def test_the_rate_of_each_depth_is_its_tokens_by_its_time(target):
    costs = costs_of(target)
    for rate in (0.2, 0.5, 0.7, 0.9, 1.0):
        by_hand = {
            g: sum(rate**i for i in range(g + 1)) / (costs.times.ms[g] + g * costs.draft.ms[0])
            for g in range(MAX_DEPTH + 1)
        }
        found = rates(rate, costs, MAX_DEPTH)
        assert found == pytest.approx([by_hand[depth] for depth in range(MAX_DEPTH + 1)])
