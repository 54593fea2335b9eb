"""The simulated fleet against the formulas of queues and of batches, where they hold."""

from __future__ import annotations

import math

import pytest

from cpuchat.planner.fleet import Demand, Server, capacity, exponential, fixed, simulate

REQUESTS = 50_000


def erlang_c(k: int, load: float) -> float:
    """Return the probability to wait in M/M/k, with `load` = arrival rate by service rate."""
    busy = load**k / math.factorial(k) * k / (k - load)
    return busy / (sum(load**n / math.factorial(n) for n in range(k)) + busy)


def one_by_one(mean_s: float = 1.0) -> Server:
    """A machine with one chat at a time: its prompt takes `mean_s` for each unit of length, its answer is one token."""
    return Server(prefill_s=lambda tokens: tokens * mean_s, step_s=lambda n: 1e-9, most=1)


@pytest.mark.parametrize(("k", "load"), [(1, 0.6), (4, 3.0)])
def test_one_chat_per_machine_is_the_queue_m_m_k(k: int, load: float) -> None:
    found = simulate(one_by_one(), k, Demand(load, exponential(1.0), fixed(1.0)), 2 * REQUESTS)
    wait = erlang_c(k, load) / (k - load)
    assert found.ttft_s.mean == pytest.approx(wait + 1.0, rel=0.03)
    assert found.busy == pytest.approx(load / k, rel=0.03)
    assert not found.saturated


def test_chats_that_share_a_machine_evenly_are_processor_sharing() -> None:
    load = 0.5
    # Each further chat makes the step longer by as much: the mean time of M/M/1 with shared service is 1 / (1 - load).
    server = Server(prefill_s=lambda tokens: 0.0, step_s=lambda n: 0.01 * n, most=10_000)
    found = simulate(server, 1, Demand(load, fixed(1), lambda chance: 1 + 100 * chance.expovariate(1)), REQUESTS)
    assert found.mean_chats == pytest.approx(load / (1 - load), rel=0.03)  # Little's law
    assert found.busy == pytest.approx(load, rel=0.03)


def test_a_saturated_machine_writes_its_batch_once_per_step() -> None:
    server = Server(prefill_s=lambda tokens: 0.0, step_s=lambda n: 0.1 + 0.01 * n, most=8)
    found = simulate(server, 3, Demand(1000.0, fixed(1), fixed(1001)), 3_000)
    assert found.saturated
    one = simulate(server, 3, Demand(3 * 0.95 * capacity(server, 1, 1001), fixed(1), fixed(1001)), 4_000)
    assert not one.saturated
    assert one.total_tok_s == pytest.approx(0.95 * 3 * 8 / server.step_s(8), rel=0.03)
    assert one.tok_s.p95 >= 0.999 / server.step_s(8)


def test_prompts_take_their_time_and_slow_the_other_chats_down() -> None:
    server = Server(prefill_s=lambda tokens: tokens / 100, step_s=lambda n: 0.1, most=4)
    alone = simulate(server, 1, Demand(1e-4, fixed(300), fixed(101)), 50)
    assert alone.ttft_s.p95 == pytest.approx(3.0, rel=0.01)
    assert alone.tok_s.p50 == pytest.approx(10.0, rel=0.01)
    busy = simulate(server, 1, Demand(0.1, fixed(300), fixed(101)), 2_000)
    assert busy.tok_s.p95 < 0.9 * alone.tok_s.p95
    assert busy.ttft_s.p95 > alone.ttft_s.p95


def test_throughput_is_what_arrives_until_it_saturates() -> None:
    server = Server(prefill_s=lambda tokens: tokens / 200, step_s=lambda n: 0.1 + 0.005 * n, most=16)
    limit = capacity(server, 400, 200)
    for share in (0.3, 0.8):
        rate = share * 2 * limit
        found = simulate(server, 2, Demand(rate, fixed(400), fixed(200)), 4_000)
        assert found.total_tok_s == pytest.approx(200 * rate, rel=0.03)
        assert not found.saturated
    assert simulate(server, 2, Demand(1.5 * 2 * limit, fixed(400), fixed(200)), 4_000).saturated


def test_the_same_arguments_give_the_same_figures() -> None:
    demand = Demand(1.0, fixed(100), exponential(100))
    server = Server(prefill_s=lambda tokens: 0.1, step_s=lambda n: 0.01, most=4)
    assert simulate(server, 2, demand, 500) == simulate(server, 2, demand, 500)
