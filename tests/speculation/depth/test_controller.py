import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from cpuchat.costs.calibrations import PassCosts
from cpuchat.protocol.reasons import UNCALIBRATED, DraftsOff
from cpuchat.speculation.depth.controller import DepthController
from cpuchat.speculation.depth.costs import CurrentCosts
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, N_BUCKETS, Proposal, confidence_bucket
from cpuchat.speculation.stats import PassRecord
from tests.speculation.depth.simulator import true_costs, verified

COSTS = true_costs("Q8_0", "0.05B")


def draft(n: int) -> Proposal:
    return Proposal("draft", list(range(n)), [0] * n)


def begun(costs: PassCosts | None = COSTS, fixed: int = 0, **more: Any) -> DepthController:
    """Return a controller in an answer, with a draft model unless `more` says otherwise."""
    controller = DepthController(costs, **{"has_draft_model": True, **more})
    controller.begin_answer(fixed=fixed)
    return controller


def learn(controller: DepthController, rate: float, costs: PassCosts = COSTS) -> None:
    """Simulate plain steps, with the draft model scored along."""
    rng = random.Random(7)
    for _ in range(300):
        controller.plan_draft(MAX_DEPTH, 1)
        controller.record(PassRecord(costs.verify_ms[0]))
        controller.record_scores("draft", [0], [rng.random() < rate])


def test_depth_follows_acceptance():
    depths = []
    for rate in (0.05, 0.7, 1.0):
        controller = begun()
        learn(controller, rate)
        depths.append(controller.plan_draft(MAX_DEPTH, 1))
    assert depths[0] == 0
    assert 2 <= depths[1] <= 4
    assert depths[2] > 10
    assert controller.off is None


def test_plain_decoding_when_nothing_is_accepted_and_it_says_why():
    controller = begun()
    learn(controller, 0.3)
    assert controller.plan_draft(MAX_DEPTH, 1) == 0
    assert controller.off is not None and controller.off.kind == "low acceptance"
    assert controller.off.acceptance == pytest.approx(0.3, abs=0.1) and (controller.off.slower_share or 0) > 0
    disturbed = begun(structs.replace(COSTS, disturbed=True))
    learn(disturbed, 0.3)
    assert disturbed.off == structs.replace(controller.off, slower_share=None)


def test_not_measured():
    controller = begun(None)
    for _ in range(40):
        assert controller.plan_draft(MAX_DEPTH, 1) == 0
        assert controller.free_depth(Proposal("suffix", [1, 2, 3], [4, 4, 4])) == 0
        controller.record(PassRecord(35.0))
        controller.record_scores("draft", [0], [True])
    assert controller.shadow_budget(40) == 0
    assert controller.off == UNCALIBRATED
    assert controller.plain_ms == pytest.approx(35.0)


def test_after_a_disturbed_calibration_plain_decoding_is_timed_before_it_is_a_figure():
    """Twice too slow, it would make any fixed depth twice as good."""
    slow = structs.replace(COSTS, verify_ms=tuple(2 * ms for ms in COSTS.verify_ms), disturbed=True)
    controller = begun(slow, fixed=4)
    for _ in range(200):
        controller.record(PassRecord(COSTS.verify_ms[4], "draft", (0,) * 4, 4, 4, draft_ms=4 * COSTS.draft_ms))
    assert controller.timed_plain_ms is None and controller.plain_ms
    controller.begin_answer()
    for _ in range(10):
        controller.record(PassRecord(COSTS.verify_ms[0]))
    assert controller.timed_plain_ms == controller.plain_ms == pytest.approx(COSTS.verify_ms[0], rel=0.02)
    assert DepthController(COSTS, has_draft_model=True).timed_plain_ms == COSTS.verify_ms[0]


@pytest.mark.parametrize("costs", [COSTS, None])
def test_fixed_depth_is_kept_whatever_happens(costs):
    controller = begun(costs, max_depth=12, fixed=5)
    for _ in range(60):
        assert controller.plan_draft(MAX_DEPTH, 900) == 5
        controller.record(verified(draft(5), 0, 300.0, draft_ms=8.0))
    assert controller.plan_draft(3, 1) == 3
    assert controller.free_depth(Proposal("suffix", [1] * 9, [1] * 9)) == 5
    assert controller.free_depth(Proposal("suffix", [1] * 2, [1] * 2)) == 2
    assert controller.shadow_budget(50) == 0
    assert controller.off is None
    controller.begin_answer(fixed=20)
    assert controller.plan_draft(MAX_DEPTH, 1) == 12


def test_a_long_text_is_not_read_for_a_small_gain():
    costs = true_costs("Q8_0", "0.5B")
    controller = begun(costs)
    learn(controller, 0.9, costs=costs)
    assert controller.plan_draft(MAX_DEPTH, 2) > 0
    controller.begin_answer()
    for _ in range(20):
        assert controller.plan_draft(MAX_DEPTH, 8000) == 0
        controller.record(PassRecord(costs.verify_ms[0]))
    assert controller.off is not None and controller.off.kind == "slow prefill"
    assert controller.off.prefill_s == pytest.approx(32, abs=0.05)


def test_reading_along_costs_at_most_a_hundredth():
    for target, model in (("Q4_K_M", "0.05B"), ("Q8_0", "0.5B"), ("F16", "0.05B")):
        costs = true_costs(target, model)
        controller = begun(costs)
        rng = random.Random(2)
        lag, elapsed, spent = 0, 0.0, 0.0
        for _ in range(2000):
            controller.record(PassRecord(costs.verify_ms[0]))
            elapsed += costs.verify_ms[0]
            lag += 1
            k = controller.shadow_budget(lag)
            assert 0 <= k <= lag
            if k:
                controller.record_read(k, k * costs.read_ms, is_shadow=True)
                controller.record_scores("draft", [0] * k, [rng.random() < 0.2 for _ in range(k)])
                spent += k * costs.read_ms
                lag = 0
        assert 0 < spent < 0.01 * elapsed


def test_a_free_proposal_is_verified_as_far_as_it_is_worth():
    controller = begun(true_costs("Q8_0", None), has_draft_model=False)
    sure, unsure = confidence_bucket(0.99), confidence_bucket(0.2)
    assert controller.off is None
    for _ in range(30):
        controller.record(PassRecord(62.0))
        controller.record_scores("suffix", [sure] * 4 + [unsure], [True] * 4 + [False])
    assert controller.free_depth(Proposal("suffix", [1] * 15, [sure] * 15)) >= 11
    assert controller.free_depth(Proposal("suffix", [1] * 15, [unsure] * 15)) == 0
    mixed = controller.free_depth(Proposal("suffix", [1] * 15, [sure] * 7 + [unsure] * 8))
    assert mixed == 7
    assert controller.free_depth(Proposal("suffix")) == 0


def test_free_drafters_with_nothing_to_say():
    controller = begun(true_costs("Q8_0", None), has_draft_model=False)
    for _ in range(20):
        controller.record(PassRecord(62.0))
    assert controller.off == DraftsOff("nothing to draft from")
    for _ in range(20):
        assert controller.free_depth(Proposal("suffix", [1, 2], [1, 1])) == 0
        controller.record(PassRecord(62.0))
        controller.record_scores("suffix", [1], [False])
    assert controller.off == DraftsOff("rare repeats")


def test_a_rollback_costs_what_it_takes_and_counts_once():
    base = structs.replace(true_costs("F16", "0.05B"), rollback_ms=10.0)
    costs, ms = CurrentCosts(base), base.verify_ms[2]
    rejected = replace(verified(draft(2), 1, ms), rollback_ms=150.0, again=1)
    assert costs.record_verify(verified(draft(2), 2, ms)) == pytest.approx(ms)
    assert costs.rollback.ms[0] == 10.0
    for _ in range(100):
        assert costs.record_verify(rejected) == pytest.approx(ms + 150.0)
    assert costs.rollback.ms[0] == pytest.approx(150.0, rel=0.05)


events = st.lists(
    st.tuples(
        st.sampled_from(["plain", "draft", "free", "scored", "read", "begin", "fixed"]),
        st.integers(0, MAX_DEPTH + 5),
        st.integers(0, MAX_DEPTH + 5),
        st.floats(0.0, 1e5),
    ),
    max_size=60,
)


@settings(max_examples=30, deadline=None)
@given(events, st.integers(0, MAX_DEPTH), st.booleans())
def test_any_history_leaves_it_within_bounds(events, max_depth, has_draft):
    costs = PassCosts(COSTS.verify_ms, 1.5, 0.4, 3.0)
    controller = begun(costs, max_depth=max_depth, has_draft_model=has_draft)
    for kind, a, b, ms in events:
        depth = controller.plan_draft(a, b)
        assert 0 <= depth <= min(a, max_depth)
        assert depth == 0 or has_draft
        offer = Proposal("suffix", [1] * a, [b % N_BUCKETS] * a)
        free = controller.free_depth(offer)
        assert 0 <= free <= min(a, max_depth)
        assert 0 <= controller.shadow_budget(b) <= b
        if kind == "plain":
            controller.record(PassRecord(ms))
        elif kind == "draft":
            n = depth
            controller.record(verified(draft(n), min(b, n), ms, compared=min(b, n), draft_ms=ms / 3))
        elif kind == "free":
            controller.record(verified(offer.cut(free), min(b, free), ms))
        elif kind == "scored":
            controller.record_scores("draft", [0] * a, [b % 2 == 0] * a)
        elif kind == "read":
            controller.record_read(a, ms, is_shadow=True)
        else:
            controller.begin_answer(fixed=a if kind == "fixed" else 0)
        assert controller.off is None or (controller.off.kind and 0 <= controller.off.acceptance <= 1)
        assert controller.plain_ms is not None and controller.plain_ms > 0
