"""Tests adaptive depth against every fixed depth and against plain decoding, in simulated time."""

import random
from functools import cache

import pytest

from cpuchat.costs.calibrations import PassCosts, interpolate, is_plausible
from cpuchat.speculation.depth.controller import DepthController
from cpuchat.speculation.drafters.drafter import Proposal, confidence_bucket
from tests.speculation.depth.simulator import (
    DRAFTS,
    TARGETS,
    Noise,
    adaptive_answer,
    best_fixed,
    miscalibrated,
    text,
    true_costs,
)

pytestmark = pytest.mark.slow

N = 256
PAIRS = [(target, draft) for target in TARGETS for draft in DRAFTS]
RATES = (0.6, 0.8, 0.95, 1.0)


@cache
def simulate(
    target: str, draft: str, rate: float, seeds: int = 8, noisy: bool = False, common: float = 0.0, own: float = 0.0
) -> tuple[float, float, float]:
    """Return the speed of the second answer relative to the best fixed depth and to plain, and of the first."""
    costs = true_costs(target, draft)
    plain = seeds * N * costs.verify_ms[0]
    first_ms = ms = 0.0
    texts = []
    for seed in range(seeds):
        rng = random.Random(7919 * seed + round(100 * rate))
        controller = DepthController(miscalibrated(costs, rng, common, own), has_draft_model=True)
        noise = Noise(random.Random(seed), 0.07, 0.03) if noisy else None
        first, second = text(rng, rate, N), text(rng, rate, N)
        first_ms += adaptive_answer(controller, costs, first, noise).ms
        ms += adaptive_answer(controller, costs, second, noise).ms
        texts.append(second)
    return best_fixed(costs, texts)[0] / ms, plain / ms, plain / first_ms


def best_possible(target: str, draft: str, rate: float) -> bool:
    # Drafting a token costs 57 % of writing one: it pays at a depth of 31 and more than 99 % acceptance only. To be
    # sure of that takes more tokens than may be read in one answer at 1 % of its time.
    return (target, draft, rate) != ("Q4_K_M", "0.5B", 1.0)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_adaptive_depth_is_as_fast_as_the_best_fixed_depth(target, draft):
    cells = {rate: simulate(target, draft, rate)[0] for rate in RATES if best_possible(target, draft, rate)}
    assert min(cells.values()) >= 0.94, cells
    assert sum(cells.values()) / len(cells) >= 0.97, cells


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_it_never_costs_more_than_a_hundredth_from_the_first_answer_on(target, draft):
    for rate in (0.0, 0.3):
        _, later, first = simulate(target, draft, rate)
        assert later >= 0.987, rate
        assert first >= 0.987, rate
    for rate in (0.6, 0.8):
        assert simulate(target, draft, rate)[1] >= 0.985, rate


@pytest.mark.parametrize(("target", "draft"), [("Q4_K_M", "0.05B"), ("Q8_0", "0.5B")])
def test_nor_with_noise_pauses_and_a_calibration_that_is_off(target, draft):
    of_best, *_ = simulate(target, draft, 0.95, seeds=4, noisy=True, common=0.15, own=0.05)
    assert of_best >= 0.93
    for rate in (0.0, 0.3):
        _, later, first = simulate(target, draft, rate, seeds=4, noisy=True, common=0.15)
        assert later >= 0.985, rate
        assert first >= 0.98, rate


@pytest.mark.parametrize(("target", "draft"), [("Q8_0", "0.05B"), ("F16", "0.5B")])
def test_after_a_restart_a_good_pair_drafts_at_once_and_a_hopeless_one_hardly_costs(target, draft):
    costs = true_costs(target, draft)
    plans, speeds = {}, {}
    for rate in (0.95, 0.2):
        rng = random.Random(5)
        first = DepthController(costs, has_draft_model=True)
        for _ in range(3):
            adaptive_answer(first, costs, text(rng, rate, N))
        again = DepthController(costs, has_draft_model=True, known=first.learned)
        after = [adaptive_answer(again, costs, text(rng, rate, N), prompt=2) for _ in range(3)]
        plans[rate] = after[0].plans[0][1]
        speeds[rate] = 3 * N * costs.verify_ms[0] / sum(one.ms for one in after)
    assert plans[0.95] > 0 == plans[0.2]
    assert speeds[0.2] > 0.99


def copying(at: int) -> bool:
    return (at // 128) % 2 == 1


def suffix_proposals(rng: random.Random):
    """Return proposals for prose whose repetitions mean little, with copied stretches."""

    def propose(at: int) -> tuple[Proposal, list[bool]]:
        if copying(at):
            return Proposal("suffix", [0] * 24, [confidence_bucket(0.96)] * 24), [
                copying(at + j) and rng.random() < 0.97 for j in range(24)
            ]
        if rng.random() < 0.4:
            return Proposal("suffix", [0] * 6, [confidence_bucket(0.4)] * 6), [rng.random() < 0.1 for _ in range(6)]
        return Proposal("suffix"), []

    return propose


@pytest.mark.parametrize(("target", "draft"), [("Q4_K_M", None), ("Q8_0", "0.05B"), ("F16", None)])
def test_copied_text_is_drafted_within_a_few_tokens_and_prose_costs_nothing(target, draft):
    costs = true_costs(target, draft)
    controller = DepthController(costs, has_draft_model=draft is not None)
    rng = random.Random(5)
    for turn in range(2):
        right = text(rng, 0.1, 768)
        answer = adaptive_answer(controller, costs, right, propose=suffix_proposals(rng))
        in_prose = [one for one in answer.free if not copying(one[0])]
        wasted = sum(costs.verify_ms[depth] - (accepted + 1) * costs.verify_ms[0] for _, depth, accepted in in_prose)
        assert wasted <= 0.02 * 384 * costs.verify_ms[0]
        for start in (128, 384, 640):
            assert min(at for at, *_ in answer.free if at >= start) <= start + (8 if turn == 0 else 3)
        copied = [one for one in answer.free if copying(one[0])]
        per_pass = sum(accepted + 1 for *_, accepted in copied) / len(copied)
        assert per_pass > 8
        assert 768 * costs.verify_ms[0] / answer.ms > 1.3


KERNELS = {
    "AVX2": {1: 41, 2: 43, 4: 50, 8: 79, 16: 145, 32: 270},
    "AVX-512 VNNI": {1: 43, 2: 44, 4: 47, 8: 67, 16: 94, 32: 150},
}
"""Milliseconds of passes of a 1.5B in Q4_K_M with cpuchat's kernels, two cores of an EPYC and of a Xeon."""


@pytest.mark.parametrize("draft", [(1.5, 0.4), (16.0, 3.0)], ids=["0.05B", "0.5B"])
@pytest.mark.parametrize("instructions", KERNELS)
def test_where_verifying_is_nearly_free_drafts_are_as_deep_as_pays(instructions, draft):
    costs = PassCosts(interpolate(KERNELS[instructions]), *draft)
    assert is_plausible(costs.verify_ms)
    for rate in (0.3, 0.6, 0.8, 0.95):
        rng = random.Random(1)
        controller = DepthController(costs, has_draft_model=True)
        texts = [text(rng, rate, 257) for _ in range(9)]
        ms = [adaptive_answer(controller, costs, right).ms for right in texts]
        best, _ = best_fixed(costs, texts[1:])
        assert best / sum(ms[1:]) >= 0.96, rate
        assert len(texts[0]) * costs.verify_ms[0] / ms[0] > 0.98, rate
