"""Formats the lists of the plan screen: models, machines, numbers of machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpuchat.models.shortlist import PACE
from cpuchat.present.plan import Lines, code_draft, time_of
from cpuchat.present.rows import ListRow
from cpuchat.telemetry import units

if TYPE_CHECKING:
    from cpuchat.planner.fleet import Outcome
    from cpuchat.planner.plan import Plan, Range
    from cpuchat.planner.service import Service


def catalog_rows(plans: Sequence[Plan], target: float) -> list[ListRow]:
    """Return the lines of a list of `catalog_plans`, the key is the model's name; headings divide it by speed."""
    rows: list[ListRow] = []
    bounds = [("10 tok/s or more", 10.0), ("5 to 10 tok/s: reading speed", PACE), ("slower", 0.0)]
    if target != PACE:
        bounds = [(f"{target:g} tok/s or more", target), ("slower", 0.0)]
    most = math.inf
    for heading, least in bounds:
        found = [one for one in plans if one.tok_s is not None and least <= one.tok_s.value < most]
        rows += [ListRow(name=heading)] if found else []
        rows += [_model_row(one, one.tok_s) for one in found if one.tok_s is not None]
        most = least
    return rows


def _model_row(plan: Plan, tok_s: Range) -> ListRow:
    columns = (plan.model.quantization, units.size(round(plan.model.size)), plan.memory.fit, _speed(tok_s.value))
    return ListRow(key=plan.model.name, name=plan.model.name, columns=columns)


def _speed(tok_s: float) -> str:
    return f"≈{units.about(tok_s)} tok/s"


def machine_rows(plans: Sequence[Plan]) -> list[ListRow]:
    """Return the lines of a list of `machine_plans`, the key is the machine's id; headings divide it by what reaches
    the target, plain or with the draft model."""
    target = plans[0].workload.tok_s
    plain: list[ListRow] = []
    drafted: list[ListRow] = []
    slower: list[ListRow] = []
    too_large: list[ListRow] = []
    for plan in plans:
        code = code_draft(plan)
        if plan.tok_s is None:
            too_large.append(_machine_row(plan, None))
        elif plan.tok_s.value >= target:
            plain.append(_machine_row(plan, plan.tok_s))
        elif code is not None and code.tok_s.value >= target:
            drafted.append(_machine_row(plan, code.tok_s))
        else:
            slower.append(_machine_row(plan, plan.tok_s))
    groups = (
        (f"{target:g} tok/s or more", plain),
        ("only with the draft model, in code", drafted),
        ("slower", slower),
        ("too large", too_large),
    )
    return [row for heading, rows in groups if rows for row in (ListRow(name=heading), *rows)]


def _machine_row(plan: Plan, tok_s: Range | None) -> ListRow:
    machine, costs = plan.machine, plan.costs
    price = f"${costs.usd_per_hour:.2f}/h" if costs is not None else ""
    speed = _speed(tok_s.value) if tok_s is not None else ""
    columns = (f"{machine.read_gbs.value:.0f} GB/s", price, plan.memory.fit, speed)
    return ListRow(key=machine.id, name=machine.name, columns=columns, dim=tok_s is None)


def service_list(found: Service) -> list[ListRow]:
    """Return the lines of a simulation, the key is the number of machines."""
    return [_outcome_row(one, one.machines == found.enough) for one in found.outcomes]


def _outcome_row(one: Outcome, enough: bool) -> ListRow:
    state = "saturated" if one.saturated else "enough" if enough else ""
    speed = "" if one.saturated else _speed(one.tok_s.p50)
    chats = f"{one.mean_chats:.0f} chats"
    return ListRow(
        key=str(one.machines),
        name=units.plural(one.machines, "machine"),
        columns=(f"{100 * one.busy:.0f} % busy", chats, state, speed),
        strong=enough,
        dim=one.saturated,
    )


def outcome_lines(one: Outcome) -> Lines:
    """Return what users of so many machines get, as labels and texts."""
    busy = ("busy", f"{100 * one.busy:.0f} %, with {one.mean_chats:.1f} chats on a machine")
    together = ("all users", f"{units.about(one.total_tok_s)} tok/s")
    if one.saturated:
        return [busy, together, ("", "Saturated: the queue grows.")]
    return [
        busy,
        ("first token", f"{time_of(one.ttft_s.p50)} s (p50), {time_of(one.ttft_s.p95)} s (p95)"),
        ("tok/s", f"{units.about(one.tok_s.p50)} (p50); 95 % of the answers {units.about(one.tok_s.p95)} or more"),
        together,
    ]
