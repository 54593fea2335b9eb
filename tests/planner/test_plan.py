"""Plans: against published ceilings and the arithmetic that anyone can repeat."""

from __future__ import annotations

import math

import msgspec
import pytest

from cpuchat.base.errors import UsageError
from cpuchat.costs.model import Figure, batch_rate
from cpuchat.models.catalog import Catalog, load_catalog
from cpuchat.models.prediction import spare_bytes
from cpuchat.planner.fleet import Service, simulate_service
from cpuchat.planner.plan import (
    Network,
    Plan,
    Prices,
    Workload,
    catalog_models,
    catalog_plans,
    cheapest,
    machine_plans,
    make_plan,
    reaches,
)
from cpuchat.planner.specs import MachineSpec, find_machine, find_model, machines
from cpuchat.present.plan import lines, machine_figures, machine_row, machine_rows


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return load_catalog()


def planned(catalog: Catalog, machine: str, model: str, draft: str = "", **workload: float) -> Plan:
    drafting = find_model(draft, catalog) if draft else None
    return make_plan(find_machine(machine), find_model(model, catalog), Workload(**workload), draft=drafting)


@pytest.mark.parametrize(
    ("machine", "low", "high"), [("9754", 6.5, 8.1), ("9354", 6.5, 8.1), ("2x7543", 4.8, 7.1), ("7950x", 1.3, 1.6)]
)
def test_70b_is_where_rooflines_of_others_have_it(catalog: Catalog, machine: str, low: float, high: float) -> None:
    tok_s = planned(catalog, machine, "70b:Q4_K_M").tok_s
    assert tok_s is not None
    assert 0.9 * low <= tok_s.value <= high
    assert tok_s.low <= tok_s.value <= tok_s.high


def test_nothing_decodes_faster_than_its_bytes_allow(catalog: Catalog) -> None:
    for machine in machines():
        for name in ("8b:Q8_0", "70b:Q4_K_M", "30b-a3b:Q4_K_M", "0.5b"):
            plan = make_plan(machine, find_model(name, catalog), Workload())
            if plan.tok_s is None:
                continue
            assert machine.theoretical is not None
            if plan.model.work.weight_bytes > 4e9:
                assert plan.tok_s.high < machine.theoretical.value * 1e9 / plan.bytes_per_token
            assert plan.memory_ceiling is not None
            assert plan.tok_s.value <= plan.memory_ceiling.value


def test_drafts_gain_more_the_more_are_accepted_and_never_more_than_arithmetic_allows(catalog: Catalog) -> None:
    plan = planned(catalog, "9754", "llama-3.3-70b-instruct", "llama-3.2-1b-instruct")
    rates = [one.tok_s.value for one in plan.drafted]
    assert rates == sorted(rates)
    assert plan.tok_s is not None
    assert plan.draft_ceiling is not None
    assert plan.compute_ceiling is not None
    assert plan.tok_s.value < rates[0] < rates[-1] < plan.draft_ceiling.value < plan.compute_ceiling.value
    assert 52 < plan.draft_ceiling.value < 100  # 52 by the arithmetic of others, with llama.cpp's kernels
    for drafted, (low, high) in zip(plan.drafted, ((11, 15), (13, 18), (16, 23), (21, 34)), strict=True):
        assert low <= drafted.tok_s.value <= high, drafted
    assert plan.drafted[-1].tok_s.high < 60  # 60 to 75 were claimed


def test_a_model_that_does_not_fit_has_no_speed(catalog: Catalog) -> None:
    plan = planned(catalog, "7950x", "llama-3.1-405b-instruct")
    assert plan.memory.fit == "too large"
    assert plan.tok_s is None
    assert "does not fit" in plan.why_not
    with pytest.raises(UsageError, match=r"does not fit Ryzen 9 7950X: 243\.0 GB of weights"):
        simulate_service(plan)


@pytest.mark.parametrize("free", [9.0, 10.5, 15.0])
def test_this_machine_fits_a_model_as_the_lists_say(catalog: Catalog, free: float) -> None:
    """With a twentieth of all of its memory to spare."""
    here = MachineSpec(
        id="x", name="x", kind="here", cpu="zen4", cores=Figure(2), clock_ghz=Figure(3), memory_gb=Figure(40),
        free_gb=Figure(free), measured=Figure(60),
    )  # fmt: skip
    memory = make_plan(here, find_model("8b:Q8_0", catalog), Workload()).memory
    assert memory.usable == free * 1e9
    assert memory.spare == spare_bytes(40e9) == 2e9
    assert memory.fit == {9.0: "too large", 10.5: "tight", 15.0: "fits"}[free]


def test_a_type_without_a_simd_kernel_is_marked_and_has_no_speed(catalog: Catalog) -> None:
    x86, arm = planned(catalog, "9754", "ternary-bonsai-8b"), planned(catalog, "ampere-a2", "ternary-bonsai-8b")
    assert arm.tok_s is not None and arm.verdict == "fits"
    assert (x86.tok_s, x86.scalar_type, x86.verdict) == (None, "Q2_0", "no SIMD")
    assert dict(lines(x86))["tok/s"] == "n/a: Q2_0 has no SIMD kernel on this CPU, which makes it several times slower"
    with pytest.raises(UsageError, match="No speed is predicted for Ternary Bonsai 8B"):
        simulate_service(x86)
    rows = machine_rows([x86, arm])
    assert [row.name for row in rows if not row.key][-1] == "no SIMD kernel" and machine_row(x86)[2] == "no SIMD"
    on = find_machine("9754")
    plans = catalog_plans(lambda *_: on, catalog_models(catalog), Workload())
    assert plans and not any(plan.scalar_type for plan in plans)
    drafted = planned(catalog, "9754", "qwen3-32b", "ternary-bonsai-1.7b")
    assert drafted.tok_s is not None and not drafted.drafted
    assert ("", "n/a: its weights have no SIMD kernel on this CPU") in lines(drafted)


def test_users_share_the_weights_and_are_limited_by_memory(catalog: Catalog) -> None:
    plan = planned(catalog, "9655", "8b:Q4_K_M", tok_s=8.0)
    assert plan.users is not None
    assert plan.shared_tok_s is not None
    n = int(plan.users.value)
    profile = plan.machine.profile()
    assert batch_rate(profile, plan.model.work, n, plan.workload.n_past) >= 8
    assert plan.shared_tok_s.value == pytest.approx(n * batch_rate(profile, plan.model.work, n, plan.workload.n_past))
    small = msgspec.structs.replace(plan.machine, memory_gb=Figure(12.0))
    crowded = make_plan(small, plan.model, plan.workload)
    each = crowded.model.kv_bytes(crowded.workload.n_ctx)
    assert crowded.users_by_memory == int((crowded.memory.usable - crowded.memory.needed + each) // each)
    assert crowded.users is not None
    assert crowded.users.high <= crowded.users_by_memory < n


def test_machines_for_users_who_all_wait(catalog: Catalog) -> None:
    plan = planned(catalog, "9655", "8b", users=1000, tok_s=8.0)
    assert plan.users is not None
    assert plan.machines is not None
    assert plan.machines.value == math.ceil(1000 / plan.users.value)
    none = planned(catalog, "7302", "70b", users=10, tok_s=8.0)
    assert none.machines is not None
    assert math.isinf(none.machines.value)


def test_costs_are_price_and_power(catalog: Catalog) -> None:
    machine, model = find_machine("9354"), find_model("8b", catalog)
    plan = make_plan(machine, model, Workload(), prices=Prices(years=2, usd_per_kwh=0.3))
    assert machine.price_usd is not None
    assert machine.watts is not None
    assert plan.costs is not None
    assert plan.tok_s is not None
    hour = machine.price_usd.value / (2 * 8766) + machine.watts.value / 1000 * 0.3
    assert plan.costs.usd_per_hour == pytest.approx(hour)
    assert plan.costs.usd_per_million.value == pytest.approx(hour / (3600 * plan.tok_s.value) * 1e6)
    assert plan.costs.joules is not None
    assert plan.costs.joules.value == pytest.approx(machine.watts.value / plan.tok_s.value)
    rented = planned(catalog, "a2", "8b:Q8_0").costs
    assert rented is not None
    assert rented.usd_per_hour == 0.19
    assert rented.usd_per_million.value == pytest.approx(5.7, rel=0.05)  # as published for 9.2 tok/s


def test_an_impossible_load_gets_a_sentence() -> None:
    with pytest.raises(UsageError, match="exceed the context"):
        Workload(n_ctx=1024, n_prompt=1000, n_answer=100)


def test_the_catalog_on_a_machine(catalog: Catalog) -> None:
    machine = find_machine("7950x")
    plans = catalog_plans(lambda model, draft: machine, catalog_models(catalog), Workload())
    rates = [plan.tok_s.value for plan in plans if plan.tok_s is not None]
    assert len(rates) == len(plans) > 50
    assert rates == sorted(rates, reverse=True)
    assert all(plan.memory.fit != "too large" for plan in plans)
    quick = {plan.model.name for plan in plans if reaches(plan, 10)}
    assert "Qwen3 30B A3B Instruct 2507" in quick
    assert "Llama 3.3 70B Instruct" not in quick


def test_the_cheapest_machine_for_a_target_rate(catalog: Catalog) -> None:
    model, draft = find_model("llama-3.3-70b-instruct:Q4_K_M", catalog), find_model("llama-3.2-1b-instruct", catalog)
    plans = machine_plans(machines(), model, Workload(), draft=draft, prices=Prices())
    hourly = [plan.costs.usd_per_hour for plan in plans if plan.costs is not None]
    assert hourly == sorted(hourly)
    first = cheapest(plans, 6.0)
    assert first is not None
    assert first.tok_s is not None
    assert first.tok_s.value >= 6.0
    assert cheapest(plans, 15.0) is None  # plain decoding of 70B: none of these machines
    drafted = cheapest(plans, 15.0, 0.8)
    assert drafted is not None
    assert drafted.machine.id == "epyc-9334"
    unpriced = msgspec.structs.replace(first.machine, price_usd=None, usd_per_hour=None)
    (plan,) = machine_plans([unpriced], model, Workload(), draft=None, prices=Prices())
    assert reaches(plan, 6.0) and cheapest([plan], 6.0) is None


@pytest.fixture(scope="module")
def two_thousand(catalog: Catalog) -> Service:
    return simulate_service(planned(catalog, "9655", "qwen3-30b-a3b-instruct-2507", users=2000, tok_s=8.0))


def test_users_on_several_machines(catalog: Catalog, two_thousand: Service) -> None:
    service = two_thousand
    assert service.enough is not None
    assert service.outcomes[-1].machines > service.outcomes[0].machines
    assert (
        service.outcomes[0].tok_s.p95
        < 8
        <= next(one.tok_s.p95 for one in service.outcomes if one.machines == service.enough)
    )
    assert all(one.saturated == (one.machines * service.saturates_at < 2000) for one in service.outcomes)
    ttft = [one.ttft_s.p95 for one in service.outcomes if not one.saturated]
    assert ttft == sorted(ttft, reverse=True)
    with pytest.raises(UsageError, match="no number of machines"):
        simulate_service(planned(catalog, "7302", "70b", users=10, tok_s=8.0))


def test_of_very_many_machines_a_share_is_simulated(catalog: Catalog, two_thousand: Service) -> None:
    plan = planned(catalog, "9655", "qwen3-30b-a3b-instruct-2507", users=200_000, tok_s=8.0)
    service = simulate_service(plan)
    assert service.outcomes[-1].machines > 500
    last, small = service.outcomes[-1], two_thousand.outcomes[-1]
    assert last.tok_s.p50 == pytest.approx(small.tok_s.p50, rel=0.25)
    assert last.total_tok_s == pytest.approx(100 * small.total_tok_s, rel=0.1)


def test_a_network_adds_its_round_trips_and_bytes_to_every_pass(catalog: Catalog) -> None:
    machine, model, workload = find_machine("7950x"), find_model("70b:Q8_0", catalog), Workload()
    assert make_plan(machine, model, workload).tok_s is None  # it fits two of them
    large = msgspec.structs.replace(machine, memory_gb=Figure(256))
    alone, network = make_plan(large, model, workload), Network(machines=2)
    plan = make_plan(machine, model, workload, network=network)
    assert plan.machine.name == f"2 × {machine.name}"
    assert model.work.width == 8192
    assert plan.network_s == pytest.approx(2e-4 + 8 * (2 * 4 * 8192 + 2 * 651 + 5120) / 1e9)
    assert plan.tok_s is not None and alone.tok_s is not None
    assert 1 / plan.tok_s.value == pytest.approx(1 / alone.tok_s.value + plan.network_s)
    assert plan.ttft_s is not None and alone.ttft_s is not None
    assert plan.ttft_s.value == pytest.approx(alone.ttft_s.value + network.prompt_seconds(8192, 500))
    assert plan.users is None and plan.drafted == ()
    faster = make_plan(machine, model, workload, network=Network(machines=2, gbit=10))
    assert faster.network_s < plan.network_s / 2


def test_a_figure_is_called_measured_once_and_has_three_digits() -> None:
    machine = MachineSpec(
        id="x", name="x", kind="here", cpu="zen4", cores=Figure(2, basis="measured", source="the cores in use"),
        clock_ghz=Figure(3), memory_gb=Figure(25.2761, basis="measured", source="of this machine"),
        measured=Figure(41.0249, basis="measured", source="measured, 2 cores"),
    )  # fmt: skip
    shown = dict(machine_figures(machine))
    assert shown["memory"] == "25.3 GB, measured: of this machine"
    assert shown["read bandwidth"] == "41.0 GB/s, measured, 2 cores"
    assert shown["cores"] == "2, measured: the cores in use"
