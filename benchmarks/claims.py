"""Renew docs/claims.md: headline claims of published documents, and what `cpuchat plan` gives for each.

    python benchmarks/claims.py

Computes only: a second, on any machine. The claims and their verdicts are in claims.toml.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from common import run_main

from cpuchat.costs.model import SCENARIOS, pass_cost
from cpuchat.models.catalog import Catalog, load_catalog
from cpuchat.planner.plan import Plan, Range, Workload, make_plan, usual_draft
from cpuchat.planner.specs import find_machine, find_model
from cpuchat.present.plan import rates

FILE = Path(__file__).with_name("claims.toml")
PAGE = Path(__file__).parents[1] / "docs/claims.md"
UNITS = {"tok_s": "tok/s", "prefill_tok_s": "tok/s of prefill", "memory_ceiling": "tok/s at most", "users": "users"}
HEADS = "| claim | planner | verdict | why |\n|---|---|---|---|\n"
ABOUT = """\
# Published claims, checked

Headline figures of documents about language models on CPUs, beside what `cpuchat plan` gives for the same machine and
model (expected, low to high; α is the acceptance rate per token). The verdicts were given by hand, against data sheets
and measurements of others. `benchmarks/claims.py` renews this page. How near the planner comes to measurements:
[benchmarks](../benchmarks/README.md#plannerpy).
"""


def planned(check: dict[str, Any], catalog: Catalog) -> str:
    """What the plan of a `check` gives, in words."""
    model = find_model(check["model"], catalog)
    plan = make_plan(find_machine(check["machine"]), model, Workload(), draft=usual_draft(model, catalog))
    return "; ".join(figure(plan, name) for name in check["figures"])


def figure(plan: Plan, name: str) -> str:
    """One figure of a plan: a field of `Plan`, "α 0.6", "verify 13", "GB" without the draft model, or "weights"."""
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
        return f"{(plan.memory.needed - plan.memory.draft) / 1e9:.1f} GB with {plan.workload.n_ctx:,} tokens"
    if kind == "weights":
        return f"{plan.model.size / 1e9:.3g} GB of weights"
    return f"{rates(getattr(plan, name))} {UNITS[name]}"


def page() -> str:
    """The text of docs/claims.md."""
    content, catalog = tomllib.loads(FILE.read_text(encoding="utf-8")), load_catalog()
    parts = [ABOUT]
    for document in content["document"]:
        rows = [f"\n## {document['title']}\n\n{document['nature'].capitalize()}.\n\n", HEADS]
        for claim in content["claim"]:
            if claim["document"] == document["id"]:
                given = planned(claim["check"], catalog) if "check" in claim else claim["planner"]
                verdict = claim["verdict"] + (f": if {claim['condition']}" if "condition" in claim else "")
                rows.append(f"| {claim['claim']} | {given} | {verdict} | {claim['arithmetic']} |\n")
        parts += rows
    return "".join(parts)


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    run_main(main)
