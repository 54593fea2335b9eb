"""Plans: against published ceilings and the arithmetic that anyone can repeat."""

from __future__ import annotations

import msgspec
import pytest

from cpuchat.costs.model import batch_rate
from cpuchat.costs.usual import Figure
from cpuchat.models.catalog import PACE, load_catalog
from cpuchat.planner.plan import (
    CapacityPlan,
    MachineSpec,
    PlannedWorkload,
    catalog_plans,
    find_machine,
    find_model,
    machines,
    make_plan,
)
from cpuchat.present.plan import catalog_row, lines, machine_row

CATALOG = load_catalog()


def planned(machine: str, model: str, draft: str = "", tok_s: float = PACE) -> CapacityPlan:
    drafting = find_model(draft, CATALOG) if draft else None
    return make_plan(find_machine(machine), find_model(model, CATALOG), PlannedWorkload(tok_s=tok_s), draft=drafting)


@pytest.mark.parametrize(
    ("machine", "low", "high"), [("9754", 6.5, 8.1), ("9354", 6.5, 8.1), ("2x7543", 4.8, 7.1), ("7950x", 1.3, 1.6)]
)
def test_70b_is_where_rooflines_of_others_have_it(machine: str, low: float, high: float) -> None:
    tok_s = planned(machine, "70b:Q4_K_M").tok_s
    assert 0.9 * low <= tok_s.value <= high
    assert tok_s.low <= tok_s.value <= tok_s.high


def test_nothing_decodes_faster_than_its_bytes_allow() -> None:
    for machine in machines():
        for name in ("8b:Q8_0", "70b:Q4_K_M", "30b-a3b:Q4_K_M", "0.5b"):
            plan = make_plan(machine, find_model(name, CATALOG), PlannedWorkload())
            if plan.tok_s is None:
                continue
            if plan.model.work.weight_bytes > 4e9:
                assert plan.tok_s.high < machine.theoretical.value * 1e9 / plan.bytes_per_token
            assert plan.memory_ceiling is None or plan.tok_s.value <= plan.memory_ceiling.value


def test_drafts_gain_more_the_more_are_accepted_and_never_more_than_arithmetic_allows() -> None:
    plan = planned("9754", "llama-3.3-70b-instruct", "llama-3.2-1b-instruct")
    rates = [one.tok_s.value for one in plan.drafted]
    assert rates == sorted(rates)
    assert plan.tok_s.value < rates[0] < rates[-1] < plan.draft_ceiling.value < plan.compute_ceiling.value
    assert 52 < plan.draft_ceiling.value < 100  # 52 by the arithmetic of others, with llama.cpp's kernels
    for drafted, (low, high) in zip(plan.drafted, ((11, 15), (13, 18), (16, 23), (21, 34)), strict=True):
        assert low <= drafted.tok_s.value <= high, drafted
    assert plan.drafted[-1].tok_s.high < 60  # 60 to 75 were claimed


@pytest.mark.parametrize("free", [9.0, 10.5, 15.0])
def test_this_machine_fits_a_model_as_the_lists_say(free: float) -> None:
    """With a twentieth of all of its memory to spare."""
    here = MachineSpec(
        id="x", name="x", kind="here", cpu="zen4", cores=Figure(2), clock_ghz=Figure(3), memory_gb=Figure(40),
        free_gb=Figure(free), measured=Figure(60),
    )  # fmt: skip
    memory = make_plan(here, find_model("8b:Q8_0", CATALOG), PlannedWorkload()).memory
    assert memory.available == free * 1e9
    assert memory.verdict == {9.0: "not free", 10.5: "tight", 15.0: "fits"}[free]
    idle = msgspec.structs.replace(here, free_gb=Figure(40))
    plans = [catalog_plans(lambda *_, on=on: on, CATALOG, PlannedWorkload()) for on in (here, idle)]
    names, every = ([catalog_row(plan)[0] for plan in found] for found in plans)
    assert [name.removesuffix(" !") for name in names] == every and ("Qwen3 14B !" in names) == (free < 11)


def test_a_type_without_a_simd_kernel_is_marked_and_has_no_speed() -> None:
    x86, arm = planned("9754", "ternary-bonsai-8b"), planned("ampere-a2", "ternary-bonsai-8b")
    assert arm.tok_s is not None and arm.verdict == "fits"
    assert (x86.tok_s, x86.scalar_type, x86.verdict) == (None, "Q2_0", "no SIMD")
    assert dict(lines(x86))["tok/s"] == "n/a: Q2_0 has no SIMD kernel on this CPU, which makes it several times slower"
    assert machine_row(x86)[2] == "no SIMD"
    on = find_machine("9754")
    plans = catalog_plans(lambda *_: on, CATALOG, PlannedWorkload())
    assert plans and not any(plan.scalar_type for plan in plans)
    drafted = planned("9754", "qwen3-32b", "ternary-bonsai-1.7b")
    assert drafted.tok_s is not None and not drafted.drafted
    assert ("", "n/a: its weights have no SIMD kernel on this CPU") in lines(drafted)


def test_users_share_the_weights_and_are_limited_by_memory() -> None:
    plan = planned("9655", "8b:Q4_K_M", tok_s=8.0)
    n = int(plan.users.value)
    profile = plan.machine.profile()
    assert batch_rate(profile, plan.model.work, n, plan.workload.n_past) >= 8
    assert plan.shared_tok_s.value == pytest.approx(n * batch_rate(profile, plan.model.work, n, plan.workload.n_past))
    small = msgspec.structs.replace(plan.machine, memory_gb=Figure(12.0))
    crowded = make_plan(small, plan.model, plan.workload)
    each = crowded.model.kv_bytes(crowded.workload.n_ctx)
    assert crowded.users_by_memory == int((crowded.memory.available - crowded.memory.needed + each) // each)
    assert crowded.users.high <= crowded.users_by_memory < n
