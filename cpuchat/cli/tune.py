"""`cpuchat tune`: plans for settings that only root may change, their scripts, and whether they were worth it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cpuchat.cli.options import cores_option, laid_over, memory_option, model_option, overridden, threads_option
from cpuchat.cli.terminal import paragraph
from cpuchat.errors import UsageError
from cpuchat.text import clean_line

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology
    from cpuchat.hardware.tuning.changes import KnobRefusal, Plan
    from cpuchat.hardware.tuning.store import SavedPlan
    from cpuchat.settings import Settings
    from cpuchat.tune.records import Label, Record

ROOT = Path("/")
"""Replaced in tests."""

_EPILOG = """\b
How it goes:
  cpuchat tune plan          writes two scripts: one that changes settings, one that puts them back
  cpuchat tune measure       how fast the model decodes before
  sudo sh .../apply.sh       you run it; cpuchat never asks for root itself
  cpuchat tune measure       how fast it decodes after, and whether that is more than chance
  sudo sh .../revert.sh      if it is not

Nothing of it survives a reboot."""

_PLAN_EPILOG = """\b
Examples:
  cpuchat tune plan
  cpuchat tune plan --knob thp --knob cstates

The script looks at every file first and changes nothing if somebody else has changed one since. The one that goes
back writes exactly the values that were there when the plan was made. Exit code 0, also when nothing is to be done."""


@click.group(epilog=_EPILOG, short_help="Settings that only root may change: plan, measure, revert.")
def tune() -> None:
    """Plan changes of this machine's settings, and measure what they bring.

    cpuchat plans, prints scripts and measures. It changes nothing itself.
    """


@tune.command("state", short_help="Show the settings, and which can be changed here.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def show_state(as_json: bool) -> int:
    """Show how the settings are now, and which of them a plan can change here."""
    import dataclasses

    import msgspec

    from cpuchat.cli.output import json_line
    from cpuchat.hardware.topology import read_topology
    from cpuchat.hardware.tuning.state import knob_states

    states = knob_states(read_topology(ROOT), ROOT)
    if as_json:
        click.echo(json_line([msgspec.to_builtins(dataclasses.asdict(state)) for state in states]))
        return 0
    rows = [("SETTING", "NOW", "WHAT TO EXPECT OF A CHANGE")]
    rows += [(one.name, one.value or "n/a", "not offered" if one.refusal else one.verdict) for one in states]
    _table(rows)
    _print_refusals([one.refusal for one in states if one.refusal])
    click.echo("\nNever changed:")
    for one in states:
        if one.verdict == "read-only":
            _echo(f"{one.name}: {one.about}.")
    return 0


@tune.command(epilog=_PLAN_EPILOG, short_help="Write a script that changes settings, and the way back.")
@click.option("--knob", "knobs", multiple=True, metavar="NAME", help="Change this one; default: all of low risk.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(knobs: tuple[str, ...], as_json: bool) -> int:
    """Write the script that changes settings, and first the one that puts them back.

    NAME is one of those that `cpuchat tune state` lists.
    """
    import msgspec

    from cpuchat.cli.output import json_line
    from cpuchat.hardware.topology import read_topology
    from cpuchat.hardware.tuning import store
    from cpuchat.hardware.tuning.plan import make_plan

    topology = read_topology(ROOT)
    made = make_plan(topology, ROOT, knobs, _target_cpus(topology, laid_over({})) if "l3" in knobs else ())
    saved = None if made.empty else store.save(made, ROOT)
    if as_json:
        files = {"name": saved.name, "apply": str(saved.apply), "revert": str(saved.revert)} if saved else {}
        click.echo(json_line({**files, **msgspec.to_builtins(made)}))
        return 0
    if saved is None:
        click.echo("There is nothing to change." if made.notes else "Nothing can be changed here.")
    else:
        rows = _change_rows(made)
        click.echo(f"The plan {saved.name}. Nothing has been changed yet.\n")
        _table([row[:-1] for row in rows])
        for row in dict.fromkeys((row[0].strip(), row[-1]) for row in rows):
            _echo(": ".join(row))
    for note in made.notes:
        _echo(note)
    _print_refusals(made.refusals)
    if saved is not None:
        click.echo(f"\n{saved.revert} is saved and puts everything back.\n{saved.apply} is this:\n")
        click.echo("".join(f"    {line}".rstrip() + "\n" for line in saved.apply.read_text().splitlines()))
        click.echo("What to do:")
        _table([
            ("  1. measure", "cpuchat tune measure"),
            ("  2. apply", saved.command(saved.apply)),
            ("  3. measure again", "cpuchat tune measure"),
            ("  4. back, if it brought nothing", saved.command(saved.revert)),
        ])  # fmt: skip
    return 0


def _target_cpus(topology: Topology, chosen: Settings) -> tuple[int, ...]:
    """CPUs of the target while the settings give the draft model cores of its own; () when they don't."""
    from cpuchat.hardware.placement.placement import PlacementSpec, place

    spec = PlacementSpec.of(chosen)
    return place(topology, spec, with_draft=True).cpus if spec.names_draft_cores else ()


def _change_rows(made: Plan) -> list[tuple[str, ...]]:
    """Each knob with what becomes of it, and at the end what it is; files that change alike in one row."""
    from cpuchat.hardware.tuning.knobs import KNOBS

    about = {knob.name: f"{knob.about} ({knob.verdict})" for knob in KNOBS}
    counts: dict[tuple[str, str, str], int] = {}
    for change in made.changes:
        key = (change.knob, change.old, change.new)
        counts[key] = counts.get(key, 0) + 1
    rows = [
        (f"  {knob}", f"{old} → {new}", f"{n} files" if n > 1 else "1 file", about[knob])
        for (knob, old, new), n in counts.items()
    ]
    if made.group is not None:
        rows.append(("  l3", made.group.schemata, f"CPUs {made.group.cpus}", "experimental, expected about 0"))
    return rows


def _print_refusals(refusals: Sequence[KnobRefusal]) -> None:
    """Each reason once, with all that it is for."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for refusal in refusals:
        grouped.setdefault((refusal.why, refusal.how), []).append(refusal.knob)
    if grouped:
        click.echo("\nNot offered here:")
    for (why, how), knobs in grouped.items():
        _echo(f"{', '.join(knobs)}: {why}.{f' {how}' if how else ''}")


def _echo(text: str) -> None:
    """A paragraph of a list."""
    for line in paragraph(clean_line(text), "  ", "    "):
        click.echo(line)


@tune.command(short_help="Measure how fast the model decodes, before and after.")
@model_option()
@threads_option()
@cores_option()
@memory_option()
@click.option("--plan", "name", default="", metavar="NAME", help="Which plan; default: the newest.")
@click.option(
    "--label", type=click.Choice(["before", "after"]), help="What is measured; default: before, and then after."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def measure(model: str | None, name: str, label: Label | None, as_json: bool, **values: Any) -> int:
    """Measure how fast the model decodes: three times 64 tokens, greedy, without drafters.

    The result is kept with the plan. Once both are there, before and after are compared: a change is worth keeping if
    it gains more than 2 % and more than twice the spread. Without any plan, it just measures.
    """
    import asyncio

    import msgspec

    from cpuchat.cli.options import model_path
    from cpuchat.cli.output import json_line
    from cpuchat.cli.terminal import Terminal
    from cpuchat.hardware.placement.placement import PlacementSpec
    from cpuchat.hardware.tuning import store
    from cpuchat.hardware.tuning.plan import effect
    from cpuchat.telemetry import units
    from cpuchat.tune import records
    from cpuchat.tune.run import measure_model

    chosen = overridden(values)
    path = model_path(model, chosen)
    saved = store.find(name) if name or label or store.saved_plans() else None
    label = _label(saved, label) if saved is not None else None
    terminal = Terminal()
    options = msgspec.structs.replace(chosen.load_options(""), calibrate=False, probe=False)
    info, measured = asyncio.run(measure_model(path, options, PlacementSpec.of(chosen), terminal.progress))
    terminal.clear_progress()
    result: dict[str, Any] = {"model": info.name, **msgspec.to_builtins(measured)}
    lines = [f"{info.name or path.stem}: {units.rate(measured.tok_s)} tok/s (spread {units.rate(measured.spread)})"]
    if saved is not None and label is not None:
        record = records.make(label, info, measured, effect(saved.plan, ROOT))
        records.save(saved.folder, record)
        result |= {"plan": saved.name, "label": label, "effect": record.effect}
        lines[0] = f"{label}: {lines[0]}"
        lines += _what_next(saved, record, result)
    for line in [json_line(result)] if as_json else lines:
        terminal.line(line)
    return 0


def _label(saved: SavedPlan, wanted: Label | None) -> Label:
    """What the coming measurement is. Raises UsageError where it would not be what it is called."""
    from cpuchat.hardware.tuning.plan import effect
    from cpuchat.tune import records

    label: Label = wanted or ("before" if records.load(saved.folder, "before") is None else "after")
    some = any(now for now, _ in effect(saved.plan, ROOT).values())
    if label == "before" and some:
        raise UsageError(
            f"Changes of the plan {saved.name} are in effect, so this is not the state before.",
            f"Put it back first: {saved.command(saved.revert)}",
        )
    if label == "after" and not some:
        raise UsageError(
            f"Nothing of the plan {saved.name} is in effect yet.",
            f"Apply it: {saved.command(saved.apply)}; or measure the state before once more: --label before",
        )
    return label


def _what_next(saved: SavedPlan, record: Record, result: dict[str, Any]) -> list[str]:
    """What the measurement says about the plan; put into `result` as well."""
    import msgspec

    from cpuchat.hardware.tuning.resctrl import DRAFTING_ONLY
    from cpuchat.tune import records

    lines: list[str] = []
    if record.label == "before":
        lines.append(f"Now apply the plan: {saved.command(saved.apply)}")
        lines.append("Then measure again:  cpuchat tune measure")
        return lines
    lines.append(f"in effect: {_effect_words(record.effect)}")
    verdict, why = records.judged(records.load(saved.folder, "before"), record)
    result["verdict"] = msgspec.to_builtins(verdict) if verdict is not None else None
    if verdict is None:
        return [*lines, f"No verdict: {why}."]
    lines.append(verdict.words)
    if saved.plan.group is not None:
        lines.append(DRAFTING_ONLY)
    if not verdict.keep:
        lines.append(f"To put it back: {saved.command(saved.revert)}")
    return lines


def _effect_words(counts: dict[str, tuple[int, int]]) -> str:
    """`governor, thp; not: cstates (0 of 8)`."""
    done = [name for name, (now, of) in counts.items() if now == of]
    missing = [f"{name} ({now} of {of})" for name, (now, of) in counts.items() if now < of]
    return (", ".join(done) or "nothing") + (f"; not, or not everywhere: {', '.join(missing)}" if missing else "")


@tune.command("list", short_help="List the plans, what is in effect, and what was measured.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_plans(as_json: bool) -> int:
    """List the plans, what of them is in effect now, and what was measured."""
    from cpuchat.cli.output import json_line
    from cpuchat.hardware.tuning import store
    from cpuchat.hardware.tuning.plan import effect
    from cpuchat.telemetry import units
    from cpuchat.tune import records

    rows: list[dict[str, Any]] = []
    for saved in store.saved_plans():
        before, after = records.load(saved.folder, "before"), records.load(saved.folder, "after")
        verdict, why = records.judged(before, after)
        rows.append({
            "name": saved.name,
            "effect": effect(saved.plan, ROOT),
            "before": before.measured.tok_s if before else None,
            "after": after.measured.tok_s if after else None,
            "verdict": verdict.words if verdict else "",
            "no_verdict": why,
            "revert": str(saved.revert),
        })  # fmt: skip
    if as_json:
        click.echo(json_line(rows))
        return 0
    if not rows:
        click.echo("There is no tuning plan. To make one: cpuchat tune plan")
    for row in rows:
        rates = " → ".join(units.rate(row[label]) if row[label] else "n/a" for label in ("before", "after"))
        click.echo(f"{row['name']}  in effect: {_effect_words(row['effect'])}")
        click.echo(f"  {rates} tok/s: {row['verdict'] or row['no_verdict']}")
    return 0


@tune.command(short_help="Print the command that puts everything back.")
@click.argument("name", default="")
def revert(name: str) -> int:
    """Print the command that puts back what was there before the plan NAME (default: the newest)."""
    from cpuchat.hardware.tuning import store
    from cpuchat.hardware.tuning.plan import effect

    saved = store.find(name)
    counts = effect(saved.plan, ROOT)
    if not any(now for now, _ in counts.values()):
        click.echo(f"Nothing of the plan {saved.name} is in effect. This would do no harm:", err=True)
    else:
        click.echo(f"In effect of the plan {saved.name}: {_effect_words(counts)}. To put it back:", err=True)
    click.echo(saved.command(saved.revert))
    return 0


def _table(rows: list[tuple[str, ...]]) -> None:
    """Columns as wide as their widest cell; the last one ends where it ends."""
    cleaned = [[cell[: len(cell) - len(cell.lstrip())] + clean_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cleaned, strict=True)]
    for row in cleaned:
        click.echo("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
