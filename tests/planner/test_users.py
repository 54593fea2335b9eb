"""Users of a machine: against the queue with so many users where the formula is its own, and where it is bounded."""

from __future__ import annotations

import numpy as np
import pytest

from cpuchat.base.errors import UsageError
from cpuchat.models.catalog import Catalog, load_catalog
from cpuchat.planner.plan import CapacityPlan, PlannedWorkload, make_plan
from cpuchat.planner.specs import find_machine, find_model
from cpuchat.planner.users import AT_ONCE, UserPace, occupancy, pace_of, plan_users


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


def planned(catalog: Catalog, machine: str, model: str, **workload: float) -> CapacityPlan:
    return make_plan(find_machine(machine), find_model(model, catalog), PlannedWorkload(**workload))


def machine_repair(users: int, load: float) -> tuple[float, float]:
    """Return the share of time in which the server is busy, and the mean time in the system in mean service times, of
    M/M/1//N: each user comes `load` times per service time after being served (Kleinrock, Queueing Systems I, 1975)."""
    states = [1.0]
    for n in range(users):
        states.append(states[-1] * (users - n) * load)
    busy = 1 - states[0] / sum(states)
    return busy, users / busy - 1 / load


@pytest.mark.parametrize(("users", "pause"), [(1, 2.0), (3, 2.0), (12, 10.0), (40, 100.0)])
def test_one_chat_at_a_time_is_the_queue_m_m_1_with_so_many_users(users: int, pause: float) -> None:
    """Its answers are all prompt: one second of service."""
    one = UserPace(prefill_s=1.0, n_batches=1, n_answer=1, step_s=np.array([1e-12]))
    found = occupancy(one, users, machines=1, pause_s=pause)
    busy, time = machine_repair(users, 1 / pause)
    assert found.busy == pytest.approx(busy)
    assert found.ttft_s == pytest.approx(time)
    assert found.total_tok_s == pytest.approx(busy)


def test_chats_that_share_a_machine_evenly_are_processor_sharing() -> None:
    """Each further chat makes the step longer by as much; as many are in the system as with one after the other."""
    shared = UserPace(prefill_s=0.0, n_batches=0, n_answer=100, step_s=0.01 * np.arange(1, 21))
    found = occupancy(shared, 10, machines=1, pause_s=15.0)
    busy, time = machine_repair(10, 1 / 15)
    assert found.busy == pytest.approx(busy)
    assert found.chats == pytest.approx(busy * time)  # Little's law
    assert found.at_once == pytest.approx(1) and found.ttft_s == 0


def test_a_saturated_machine_writes_its_batch_once_per_step() -> None:
    pace = UserPace(prefill_s=0.0, n_batches=1, n_answer=1000, step_s=0.1 + 0.01 * np.arange(1, 9))
    found = occupancy(pace, 600, machines=3, pause_s=1.0)
    assert found.total_tok_s == pytest.approx(3 * 8 / pace.step_s[-1])
    assert found.chats == pytest.approx(8) and found.busy == pytest.approx(1)
    assert found.tok_s == pytest.approx(1 / pace.step_s[-1])
    assert found.at_once < 0.01 and found.ttft_s > 1000 * pace.step_s[-1]  # the others wait


def test_prompts_wait_for_each_other_as_in_the_queue_m_m_1() -> None:
    """Chats that hardly decode together: the prompts are the only queue, of users whose pause is their answer."""
    pace = UserPace(prefill_s=1.0, n_batches=0, n_answer=100, step_s=np.full(5, 0.05))
    assert pace.prompt_s == pytest.approx([machine_repair(n, 1 / 5)[1] for n in range(1, 6)])


def test_enough_machines_let_most_messages_begin_at_once(catalog: Catalog) -> None:
    plan = planned(catalog, "9655", "qwen3-30b-a3b-instruct-2507", tok_s=8.0)
    found, pace = plan_users(plan, 2000), pace_of(plan)
    assert occupancy(pace, 2000, found.enough - 1).at_once < AT_ONCE <= occupancy(pace, 2000, found.enough).at_once
    assert found.enough > 2000 / found.saturates_at
    assert all(one.tok_s >= 8.0 for one in found.numbers)  # no more chats at once than keep the target
    waits = [one.ttft_s for one in found.numbers]
    assert waits == sorted(waits, reverse=True)
    assert plan_users(plan, 200_000).enough == pytest.approx(100 * found.enough, rel=0.1)


@pytest.mark.parametrize(
    ("machine", "model", "tok_s", "said"),
    [
        ("7302", "70b", 8.0, "no number of machines gives each user 8 tok/s"),
        ("7950x", "llama-3.1-405b-instruct", 5.0, r"does not fit Ryzen 9 7950X: 243\.0 GB of weights"),
        ("9754", "ternary-bonsai-8b", 5.0, "No speed is predicted for Ternary Bonsai 8B"),
    ],
)
def test_users_of_what_cannot_run_get_a_sentence(
    catalog: Catalog, machine: str, model: str, tok_s: float, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        plan_users(planned(catalog, machine, model, tok_s=tok_s), 10)
