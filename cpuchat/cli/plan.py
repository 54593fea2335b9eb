"""`cpuchat plan`: what a model would do on a machine that need not be here."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cpuchat.base.errors import UsageError
from cpuchat.base.text import clean_line
from cpuchat.cli.completion import MODEL
from cpuchat.cli.output import print_json
from cpuchat.cli.terminal import echo_paragraph, echo_table
from cpuchat.config import settings
from cpuchat.models.catalog import load_catalog
from cpuchat.models.heads import is_own
from cpuchat.present import plan as words

if TYPE_CHECKING:
    from cpuchat.planner.plan import CapacityPlan, MachineFor, MachineSpec, PlannedWorkload

_EPILOG = """\b
Examples:
  cpuchat plan                        what runs here, the fastest first
  cpuchat plan --on 9354 --tok-s 10   what runs at 10 tok/s there
  cpuchat plan 70b:Q4_K_M --on 9754   one model: fit, speed, users
  cpuchat plan 8b --on lab --json     machines/lab.toml in the config folder

MODEL is a GGUF file, an id of `cpuchat models catalog`, or a usual size (0.5b to 70b), with its quantization behind a
colon; a model that is here is read from its file. A figure is given as expected (low–high): an untuned and a tuned
setup."""

_ALL = "all"  # machines, for --on
_TOKENS, _POSITIVE = click.IntRange(1, 10_000_000), click.FloatRange(0, 1e6, min_open=True)


@click.command(epilog=_EPILOG)
@click.argument("model", required=False, type=MODEL)
@click.option("--on", "machine", metavar="MACHINE", help="A machine of --machines, or all; default: this one.")
@click.option(
    "--draft", metavar="MODEL", help="A draft model, or none; default: as a load takes it, else of the catalog."
)
@click.option(
    "--ctx", type=click.IntRange(256, 10_000_000), metavar="N", help="Context of a chat; default: as set, else 8192."
)
@click.option("--prompt", type=_TOKENS, metavar="N", help="Tokens of a prompt; default: 500.")
@click.option("--answer", type=_TOKENS, metavar="N", help="Tokens of an answer; default: 300.")
@click.option("--tok-s", type=_POSITIVE, metavar="X", help="Target tok/s per user; default: 5 (reading speed).")
@click.option(
    "--usd-per-hour", type=_POSITIVE, metavar="USD",
    help="Price of the machine for an hour: adds the cost of a million tokens.",
)  # fmt: skip
@click.option("--machines", "list_machines", is_flag=True, help="List the machines with the sources of their figures.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: rates in tok/s, sizes in bytes.")
def plan(
    model: str | None, machine: str | None, draft: str | None, list_machines: bool, as_json: bool, **values: Any
) -> None:
    """Plan before buying or downloading: does a model fit a machine, how fast, for how many users.

    Without MODEL it lists the catalog and your files on the machine."""
    from cpuchat.planner import plan as planner

    if list_machines and any(one is not None for one in (model, machine, draft, *values.values())):
        raise UsageError("--machines lists all of them and takes only --json.", "Drop the other arguments.")
    for flag, needs_model in {"--draft": draft is not None, "--on all": machine == _ALL}.items():
        if needs_model and model is None:
            raise UsageError(f"{flag} needs a MODEL.", "Example: cpuchat plan 70b:Q4_K_M --on all")
    if list_machines:
        return _show_machines(as_json)
    chosen, catalog = settings.load(), load_catalog()
    values["ctx"] = values["ctx"] or chosen.engine.n_ctx
    workload, options, here = _workload(**values), chosen.load_options(), planner.models_here(catalog, chosen)
    if model is None:
        plans = planner.catalog_plans(_machine(machine, chosen), catalog, workload, here, options)
        return _show_catalog(_machine(machine, chosen)(None, None), workload, plans, values["tok_s"], as_json)
    wanted = planner.find_model(model, catalog, chosen)
    if draft is not None:
        drafting = None if draft == "none" else planner.find_model(draft, catalog, chosen)
    else:
        drafting = planner.usual_draft(wanted, catalog, here, chosen)
    if drafting is not None and wanted.path and is_own(Path(wanted.path), Path(drafting.path)):
        drafting = planner.included_head(wanted) or drafting
    plan_on = functools.partial(planner.make_plan, model=wanted, workload=workload, draft=drafting, options=options)
    if machine == _ALL:
        plans = planner.fastest_first(map(plan_on, _every_machine()))
        if as_json:
            return print_json(msgspec.to_builtins(plans))
        click.echo(f"{wanted.name} {wanted.quantization}, the fastest machine first\n")
        echo_table([words.MACHINE_HEADS, *map(words.machine_row, plans)], right=range(1, 6))
        click.echo(err=True)
        return echo_paragraph(words.machine_legend(workload), err=True)
    planned = plan_on(_machine(machine, chosen)(wanted, drafting))
    if as_json:
        return print_json(msgspec.to_builtins(planned))
    click.echo(clean_line(words.title(planned)))
    for label, text in words.lines(planned):
        echo_paragraph(clean_line(text), f"  {label:<13}", " " * 15)
    if not planned.model.exact:
        echo_paragraph("≈ from the size of the file; a GGUF file's header gives exact sizes.", "  ", "  ")
    if note := words.doubt(planned.machine):
        echo_paragraph(note, " ", "  ")
    return None


def _show_catalog(
    machine: MachineSpec, workload: PlannedWorkload, plans: list[CapacityPlan], target: float | None, as_json: bool
) -> None:
    if target is not None:
        plans = [one for one in plans if one.tok_s is not None and one.tok_s.value >= target]
    if as_json:
        return print_json(msgspec.to_builtins(plans))
    limit = f" at {target:g} tok/s or more" if target is not None else ""
    click.echo(f"{machine.name}: {len(plans)} models run{limit}.\n")
    echo_table([words.CATALOG_HEADS, *map(words.catalog_row, plans)], right=(2, 3, 4, 5), drop=(5, 4, 1))
    about = f"Plain decoding in the middle of an answer; first token of a prompt of {workload.n_prompt} tokens."
    click.echo(err=True)
    return echo_paragraph(f"{about}{words.marks(plans)}{words.doubt(machine)}", err=True)


def _workload(
    ctx: int | None, prompt: int | None, answer: int | None, tok_s: float | None, usd_per_hour: float | None
) -> PlannedWorkload:
    from cpuchat.planner.plan import PlannedWorkload

    given: dict[str, Any] = {"n_prompt": prompt, "n_answer": answer, "tok_s": tok_s, "usd_per_hour": usd_per_hour}
    usual = PlannedWorkload(n_ctx=1 << 30, **{name: value for name, value in given.items() if value})
    # Long prompts and answers make the default context longer.
    return msgspec.structs.replace(usual, n_ctx=ctx or max(PlannedWorkload().n_ctx, usual.n_prompt + usual.n_answer))


def _machine(name: str | None, chosen: settings.Settings) -> MachineFor:
    """Return the machine to plan on. Raises UsageError."""
    from cpuchat.planner.plan import HERE, ThisMachine, find_machine

    if name in (None, HERE):
        return ThisMachine(chosen).of
    found = find_machine(name)
    return lambda model, draft: found


def _every_machine() -> list[MachineSpec]:
    """Return the machines to plan for, and print what is wrong with files of the user's."""
    from cpuchat.planner.plan import all_machines

    known, problems = all_machines()
    for problem in problems:
        click.echo(f"cpuchat: {problem}", err=True)
    return known


def _show_machines(as_json: bool) -> None:
    known = _every_machine()
    if as_json:
        tables = msgspec.to_builtins(known)
        return print_json([{key: one[key] for key in one if one[key] is not None} for one in tables])
    for one in known:
        click.echo(f"{one.id}: {one.name}")
        for label, text in words.machine_figures(one):
            echo_paragraph(text, f"  {label:<17}", " " * 19)
        click.echo()
