"""Renew the figures of docs/claims.md: what `cpuchat plan` gives for each claim, and what the benchmarks measured.

    python benchmarks/renew_claims.py

Computes only: a second, on any machine. A cell of the page that ends in a comment is renewed from that comment:
`<!-- plan MACHINE MODEL FIGURE, ... -->`, or `<!-- result NAME FIELD ROW -->`, the "ours", "theirs" or "judged" (the
ratio of both) of that row of results/NAME.json; NAME/SECTION where the file has sections.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from functools import cache
from pathlib import Path
from typing import Any

from common import RESULTS, run_main, spread

from cpuchat.costs.model import pass_cost
from cpuchat.costs.usual import SCENARIOS
from cpuchat.models.catalog import load_catalog
from cpuchat.planner.plan import CapacityPlan, PlannedWorkload, Range, find_machine, find_model, make_plan, usual_draft
from cpuchat.present.plan import rates

PAGE = Path(__file__).parents[1] / "docs/claims.md"
CELL = re.compile(r"(?<=\| )[^|]*?(<!-- (plan|result) (\S+) (\S+) (.+?) -->)")
UNITS = {"tok_s": "tok/s", "prefill_tok_s": "tok/s of prefill", "memory_ceiling": "tok/s at most", "users": "users"}


@cache
def plan_of(machine: str, name: str) -> CapacityPlan:
    catalog = load_catalog()
    model = find_model(name, catalog)
    return make_plan(find_machine(machine), model, PlannedWorkload(), draft=usual_draft(model, catalog))


def planned(plan: CapacityPlan, name: str) -> str:
    """One figure of a plan: a field of `CapacityPlan`, "α 0.6", "verify 13", "GB" without the draft model, or
    "weights"."""
    kind, _, number = name.partition(" ")
    if kind == "α" and number == "1":
        return f"{rates(plan.draft_ceiling)} tok/s at α 1 at most"
    if kind == "α":
        drafted = next(one.tok_s for one in plan.drafted if one.acceptance == float(number))
        return f"{rates(drafted)} tok/s at α {number}"
    if kind == "verify":
        machine, past = plan.machine, plan.workload.n_past
        times = [1e3 * pass_cost(machine.profile(one), plan.model.work, int(number), past).seconds for one in SCENARIOS]
        return f"{rates(Range(min(times), times[1], max(times)))} ms for a pass over {number} tokens"
    if kind == "GB":
        return f"{plan.memory.need.min_bytes / 1e9:.1f} GB with {plan.workload.n_ctx:,} tokens"
    if kind == "weights":
        return f"{plan.model.size / 1e9:.3g} GB of weights"
    return f"{rates(getattr(plan, name))} {UNITS[name]}"


def measured(name: str, field: str, what: str) -> str:
    """The median of a field of the rows called `what`, which machine or pair it is of, and the file."""
    file, _, section = name.partition("/")
    content: dict[str, Any] = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))
    rows = [row for row in (content["sections"][section] if section else content)["rows"] if row["what"] == what]
    if field == "judged":
        figure = f"{statistics.median(row['judged'] for row in rows):.2f}×"
    else:
        figure = " and ".join(spread([statistics.median(row[field])], row["unit"]) for row in rows)
    label = re.sub(r" \(.*\)$", "", what)
    return f"{figure} ({label}; [{file}])"


def renew(page: str) -> str:
    """Return the page with the text before each comment renewed."""

    def cell(found: re.Match[str]) -> str:
        comment, kind, first, second, rest = found.groups()
        if kind == "result":
            return f"{measured(first, second, rest)} {comment}"
        return f"{'; '.join(planned(plan_of(first, second), one) for one in rest.split(', '))} {comment}"

    return CELL.sub(cell, page)


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    PAGE.write_text(renew(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    run_main(main)
