from __future__ import annotations

import pytest

from cpuchat.costs.model import experts_read
from cpuchat.protocol.model_info import KVTraffic, Traffic
from cpuchat.telemetry.roofline import pass_bytes

DENSE = Traffic(weights=1000, row=10, kv=(KVTraffic(bytes_per_token=2), KVTraffic(bytes_per_token=3, window=100)))


def test_a_pass_reads_weights_rows_and_the_cache():
    assert pass_bytes(DENSE, 1, 0) == 1000 + 10 + 5
    assert pass_bytes(DENSE, 4, 50) == 1000 + 40 + 54 * 5


def test_a_window_limits_what_is_read_of_the_cache():
    assert pass_bytes(DENSE, 1, 99) == 1010 + 100 * 5
    assert pass_bytes(DENSE, 1, 500) == 1010 + 501 * 2 + 100 * 3
    assert pass_bytes(DENSE, 4, 500) == 1040 + 504 * 2 + 103 * 3


def test_steps_are_read_whole():
    stepped = Traffic(weights=0, kv=(KVTraffic(bytes_per_token=1, step=256),))
    assert [pass_bytes(stepped, 1, n) for n in (0, 255, 256, 1000)] == [256, 256, 512, 1024]


def test_a_recurrent_state_is_read_and_written():
    assert pass_bytes(Traffic(weights=5, state=7), 3, 100) == 5 + 14


def test_of_the_experts_those_that_some_token_uses():
    experts = Traffic(weights=0, experts=6400, n_expert=64, n_expert_used=8)
    assert pass_bytes(experts, 1, 0) == pytest.approx(800)
    assert pass_bytes(experts, 2, 0, alike=0) == pytest.approx(6400 * (1 - 0.875**2))
    assert pass_bytes(experts, 3, 0) == pytest.approx(6400 * (1 - 0.875**2))  # of text: two more tokens count as one
    assert pass_bytes(experts, 1e6, 0) == pytest.approx(6400)
    assert experts_read(0, 0, 5) == 0
    assert experts_read(4, 9, 1) == 4
