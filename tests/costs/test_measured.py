"""What is usual of a CPU against what was measured on one."""

from __future__ import annotations

import pytest

from cpuchat.costs.model import pass_cost, prefill_cost
from cpuchat.costs.usual import usual_profile
from tests.costs.made_up import work

PASSES = {
    "cpuchat": {1: 41, 2: 43, 4: 50, 8: 79, 16: 145, 32: 270},
    "llama.cpp": {1: 48, 2: 74, 4: 98, 8: 226, 16: 308, 32: 576},
}
"""Milliseconds of passes of a 1.5B in Q4_K_M, two cores of an EPYC (Zen 3) that read 29 GB/s, November 2026."""
PREFILL = {"cpuchat": 121, "llama.cpp": 57}


@pytest.mark.parametrize("kernels", PASSES)
def test_passes_and_prompts_of_usual_cores_are_those_of_a_measured_machine(kernels: str) -> None:
    own = ("Q4_K", "Q6_K") if kernels == "cpuchat" else ()
    profile, model = usual_profile("zen3", 2, 0.85 * 29e9, own=own), work("1.5b", "Q4_K_M")
    for n, ms in PASSES[kernels].items():
        assert 1e3 * pass_cost(profile, model, n, 32).seconds == pytest.approx(ms, rel=0.35), n
    assert 512 / prefill_cost(profile, model, 512).seconds == pytest.approx(PREFILL[kernels], rel=0.15)
