"""The simulated fleet against the formulas of queues and of batches, where they hold."""

from __future__ import annotations

import pytest

from cpuchat.planner.fleet import Demand, Server, capacity, exponential, fixed, simulate


def machine_repair(k: int, users: int, load: float) -> tuple[float, float]:
    """Return the share of busy machines, and the mean time in the system in mean service times, of M/M/k//N: each user
    comes `load` times per service time after being served (Kleinrock, Queueing Systems I, 1975, 3.8)."""
    states = [1.0]
    for n in range(users):
        states.append(states[-1] * (users - n) * load / min(n + 1, k))
    total = sum(states)
    served = sum(min(n, k) * state for n, state in enumerate(states)) / total
    return served / k, users / served - 1 / load


def one_by_one() -> Server:
    """A machine with one chat at a time: its prompt takes a second for each unit of length, its answer is one token."""
    return Server(prefill_s=lambda tokens: tokens, step_s=lambda n: 1e-9, most=1)


@pytest.mark.parametrize(("k", "users", "pause"), [(1, 3, 2.0), (1, 12, 10.0), (4, 20, 3.0)])
def test_one_chat_per_machine_is_the_queue_m_m_k_with_so_many_users(k: int, users: int, pause: float) -> None:
    found = simulate(one_by_one(), k, Demand(users, pause, exponential(1.0), fixed(1.0)), 16_000)
    busy, time = machine_repair(k, users, 1 / pause)
    assert found.busy == pytest.approx(busy, rel=0.03)
    assert found.ttft_s.mean == pytest.approx(time, rel=0.03)


def test_chats_that_share_a_machine_evenly_are_processor_sharing() -> None:
    """Each further chat makes the step longer by as much; as many are in the system as with one after the other."""
    server = Server(prefill_s=lambda tokens: 0.0, step_s=lambda n: 0.01 * n, most=10_000)
    found = simulate(server, 1, Demand(10, 15.0, fixed(1), lambda chance: 1 + 100 * chance.expovariate(1)), 12_000)
    busy, time = machine_repair(1, 10, 1 / 15)
    assert found.busy == pytest.approx(busy, rel=0.03)
    assert found.mean_chats == pytest.approx(busy * time, rel=0.03)  # Little's law


def test_a_saturated_machine_writes_its_batch_once_per_step() -> None:
    server = Server(prefill_s=lambda tokens: 0.0, step_s=lambda n: 0.1 + 0.01 * n, most=8)
    found = simulate(server, 3, Demand(200, 1.0, fixed(1), fixed(1001)), 3_000)
    assert found.total_tok_s == pytest.approx(3 * 8 / server.step_s(8), rel=0.03)
    assert found.ttft_s.p50 > 100 * server.step_s(8)  # the others wait


def test_prompts_take_their_time_and_slow_the_other_chats_down() -> None:
    server = Server(prefill_s=lambda tokens: tokens / 100, step_s=lambda n: 0.1, most=4)
    alone = simulate(server, 1, Demand(1, 1e4, fixed(300), fixed(101)), 50)
    assert alone.ttft_s.p95 == pytest.approx(3.0, rel=0.01)
    assert alone.tok_s.p50 == pytest.approx(10.0, rel=0.01)
    busy = simulate(server, 1, Demand(3, 10.0, fixed(300), fixed(101)), 2_000)
    assert busy.tok_s.p95 < 0.9 * alone.tok_s.p95
    assert busy.ttft_s.p95 > alone.ttft_s.p95


def test_users_slow_down_with_the_machines() -> None:
    """Twice the users do not send twice the requests to machines that are full."""
    server = Server(prefill_s=lambda tokens: tokens / 200, step_s=lambda n: 0.1 + 0.005 * n, most=16)
    pause, limit = 30.0, capacity(server, 400, 200)
    full = limit * pause + 16
    few, many = (
        simulate(server, 2, Demand(round(share * 2 * full), pause, fixed(400), fixed(200)), 4_000) for share in (0.3, 2)
    )
    assert few.total_tok_s < 0.5 * many.total_tok_s
    assert many.total_tok_s == pytest.approx(2 * 200 * limit, rel=0.05)
    assert many.busy > 0.99 and few.tok_s.p95 > many.tok_s.p95


def test_the_same_arguments_give_the_same_figures() -> None:
    demand = Demand(30, 1.0, fixed(100), exponential(100))
    server = Server(prefill_s=lambda tokens: 0.1, step_s=lambda n: 0.01, most=4)
    assert simulate(server, 2, demand, 500) == simulate(server, 2, demand, 500)
