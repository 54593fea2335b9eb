"""Compares plans: the catalog on one machine, and one model on all machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from cpuchat.models.catalog import Catalog
from cpuchat.planner.machine_specs import MachineSpec
from cpuchat.planner.model_specs import PlannedModel, from_catalog
from cpuchat.planner.network import Network
from cpuchat.planner.plan import Plan, Prices, Workload, hourly, make_plan

MachineFor = Callable[[PlannedModel | None, PlannedModel | None], MachineSpec]
"""Returns a machine as a model and its draft model use it, as `ThisMachine.of`."""
_ONLY = frozenset({"MXFP4"})  # trained in it: files of other quantizations have the same experts


def catalog_models(
    catalog: Catalog, quantization: str = "", here: Mapping[str, PlannedModel] = MappingProxyType({})
) -> list[PlannedModel]:
    """Return the chat models of the catalog.

    Args:
        quantization: "": each in its default; so are always those that come in one alone.
        here: as of `models_here`: those files, in their place.
    """
    chat = [entry for entry in catalog.models if entry.use != "draft" and entry.sizes]
    kinds = ["" if entry.quantization in _ONLY else quantization for entry in chat]
    return [here.get(entry.id) or from_catalog(entry, kind) for entry, kind in zip(chat, kinds, strict=True)]


def catalog_plans(
    machine_for: MachineFor, models: Iterable[PlannedModel], workload: Workload, *, network: Network | None = None
) -> list[Plan]:
    """Return a plan for each of the models that fits the machine, or a network of such, the fastest first."""
    plans = [make_plan(machine_for(model, None), model, workload, network=network) for model in models]
    fitting = [plan for plan in plans if plan.tok_s is not None]
    return sorted(fitting, key=lambda plan: plan.tok_s.value if plan.tok_s is not None else 0.0, reverse=True)


def catalog_drafts(
    target: PlannedModel, catalog: Catalog, here: Mapping[str, PlannedModel] = MappingProxyType({})
) -> list[PlannedModel]:
    """Return the draft models that the catalog has for one of its models, the best first; none for others. `here` as of
    `catalog_models`."""
    entry = next((one for one in catalog.models if one.name == target.name), None)
    drafts = catalog.drafts_of(entry) if entry is not None else []
    return [here.get(one.id) or from_catalog(one) for one in drafts if one.sizes]


def usual_draft(
    target: PlannedModel, catalog: Catalog, here: Mapping[str, PlannedModel] = MappingProxyType({})
) -> PlannedModel | None:
    """Return the best draft model that the catalog has for one of its models, if any."""
    return next(iter(catalog_drafts(target, catalog, here)), None)


def machine_plans(
    machines: Sequence[MachineSpec],
    model: PlannedModel,
    workload: Workload,
    *,
    draft: PlannedModel | None,
    prices: Prices,
    network: Network | None = None,
) -> list[Plan]:
    """Return a plan on every machine (a `network` of each), the cheapest machine first; those without a price last."""
    plans = [make_plan(machine, model, workload, draft=draft, prices=prices, network=network) for machine in machines]
    return sorted(plans, key=lambda plan: _price(plan, prices))


def reaches(plan: Plan, tok_s: float, acceptance: float | None = None) -> bool:
    """Return whether one chat is expected to reach `tok_s`, plain or with its draft model at an acceptance rate."""
    if plan.tok_s is None:
        return False
    if acceptance is None:
        return plan.tok_s.value >= tok_s
    return any(one.tok_s.value >= tok_s for one in plan.drafted if one.acceptance == acceptance)


def cheapest(plans: Sequence[Plan], tok_s: float, acceptance: float | None = None) -> Plan | None:
    """Return the first of `machine_plans` that has a price and reaches `tok_s`; None when none does."""
    return next((plan for plan in plans if plan.costs is not None and reaches(plan, tok_s, acceptance)), None)


def _price(plan: Plan, prices: Prices) -> tuple[bool, float]:
    per_hour = hourly(plan.machine, prices)
    return per_hour is None, per_hour or 0.0
