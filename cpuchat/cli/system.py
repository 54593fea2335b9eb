"""`cpuchat system`: plans for machine settings that only root may change, their scripts, and whether they help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cpuchat.cli.options import (
    cores_option,
    laid_over,
    memory_option,
    model_option,
    model_path,
    overridden,
    threads_option,
)
from cpuchat.cli.output import json_line
from cpuchat.cli.terminal import Terminal, echo_paragraph, echo_table
from cpuchat.errors import UsageError
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.hardware.tuning import store
from cpuchat.hardware.tuning.plan import effect, knob_states, make_plan
from cpuchat.telemetry import units
from cpuchat.text import clean_line
from cpuchat.tune import records

if TYPE_CHECKING:
    from cpuchat.hardware.topology import Topology
    from cpuchat.hardware.tuning.changes import KnobRefusal, TuningPlan
    from cpuchat.hardware.tuning.store import SavedPlan
    from cpuchat.model_info import ModelInfo
    from cpuchat.settings import Settings
    from cpuchat.tune.measure import DecodeRate
    from cpuchat.tune.records import Label, Record

ROOT = Path("/")
"""Root of the file system; tests replace it."""

_EPILOG = """\b
Workflow:
  cpuchat system plan          writes two scripts: one applies the settings, one reverts them
  cpuchat system measure       measures decode speed before
  sudo sh .../apply.sh         run it yourself; cpuchat never asks for root
  cpuchat system measure       measures decode speed after, and whether the change is significant
  sudo sh .../revert.sh        if it is not

Nothing survives a reboot."""

_PLAN_EPILOG = """\b
Examples:
  cpuchat system plan
  cpuchat system plan --knob thp --knob governor

The apply script checks every file first and changes nothing if one has changed since the plan was made. The revert
script restores exactly the values from when the plan was made. Exit code 0, also when there is nothing to change."""


@click.group(epilog=_EPILOG, short_help="Settings that only root may change: plan, measure, revert.")
def system() -> None:
    """Plan changes of machine settings, and measure whether they help.

    cpuchat plans, writes scripts and measures. It changes nothing itself.
    """


@system.command("state", short_help="Show the settings, and which of them a plan can change.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def show_state(as_json: bool) -> int:
    """Show the current settings, and which of them a plan can change on this machine."""

    states = knob_states(read_topology(ROOT), ROOT)
    if as_json:
        click.echo(json_line(msgspec.to_builtins(states)))
        return 0
    rows = [("SETTING", "NOW", "EXPECTED EFFECT")]
    rows += [(one.name, one.value or "n/a", "unavailable" if one.refusal else one.verdict) for one in states]
    echo_table(rows)
    _print_refusals([one.refusal for one in states if one.refusal])
    click.echo("\nRead-only:")
    for one in states:
        if one.verdict == "read-only":
            _echo(f"{one.name}: {one.about}.")
    return 0


@system.command(epilog=_PLAN_EPILOG, short_help="Write the scripts that apply and revert settings.")
@click.option(
    "--knob", "knobs", multiple=True, metavar="NAME", help="Change this setting; default: all low-risk settings."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(knobs: tuple[str, ...], as_json: bool) -> int:
    """Write two scripts: one that changes settings, one that reverts them.

    NAME is a setting listed by `cpuchat system state`.
    """
    topology = read_topology(ROOT)
    made = make_plan(topology, ROOT, knobs, _target_cpus(topology, laid_over({})) if "l3" in knobs else ())
    saved = None if made.empty else store.save(made, ROOT)
    if as_json:
        files = {"name": saved.name, "apply": str(saved.apply), "revert": str(saved.revert)} if saved else {}
        click.echo(json_line({**files, **msgspec.to_builtins(made)}))
        return 0
    if saved is None:
        click.echo("Nothing to change." if made.notes else "Nothing can be changed on this machine.")
    else:
        rows = _change_rows(made)
        click.echo(f"Plan {saved.name}. Nothing has been changed yet.\n")
        echo_table([row[:-1] for row in rows])
        for row in dict.fromkeys((row[0].strip(), row[-1]) for row in rows):
            _echo(": ".join(row))
    for note in made.notes:
        _echo(note)
    _print_refusals(made.refusals)
    if saved is not None:
        click.echo(f"\n{saved.revert} reverts everything.\n{saved.apply}:\n")
        click.echo("".join(f"    {line}".rstrip() + "\n" for line in saved.apply.read_text().splitlines()))
        click.echo("Next steps:")
        echo_table([
            ("  1. measure", "cpuchat system measure"),
            ("  2. apply", saved.command(saved.apply)),
            ("  3. measure again", "cpuchat system measure"),
            ("  4. revert, if it did not help", saved.command(saved.revert)),
        ])  # fmt: skip
    return 0


def _target_cpus(topology: Topology, chosen: Settings) -> tuple[int, ...]:
    """Return the target's CPUs if the settings give the draft model its own cores; () otherwise."""
    spec = PlacementSpec.of(chosen)
    return place(topology, spec, with_draft=True).cpus if spec.names_draft_cores else ()


def _change_rows(made: TuningPlan) -> list[tuple[str, ...]]:
    """Return a row per knob with its change and description; identical changes share a row."""
    from cpuchat.hardware.tuning.knobs import KNOBS
    from cpuchat.hardware.tuning.plan import EXPERIMENTAL

    about = {knob.name: knob.about for knob in KNOBS}
    counts = Counter((change.knob, change.old, change.new) for change in made.changes)
    rows = [
        (f"  {knob}", f"{old} → {new}", f"{n} files" if n > 1 else "1 file", about[knob])
        for (knob, old, new), n in counts.items()
    ]
    if made.group is not None:
        rows.append(("  l3", made.group.schemata, f"CPUs {made.group.cpus}", EXPERIMENTAL))
    return rows


def _print_refusals(refusals: Sequence[KnobRefusal]) -> None:
    """Group the reasons: each once, with everything that it applies to."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for refusal in refusals:
        grouped.setdefault((refusal.why, refusal.how), []).append(refusal.knob)
    if grouped:
        click.echo("\nUnavailable on this machine:")
    for (why, how), knobs in grouped.items():
        _echo(f"{', '.join(knobs)}: {why}.{f' {how}' if how else ''}")


def _echo(text: str) -> None:
    """Format a paragraph as a list item."""
    echo_paragraph(clean_line(text), "  ", "    ")


@system.command(short_help="Measure decode speed before and after.")
@model_option()
@threads_option()
@cores_option()
@memory_option()
@click.option("--plan", "name", default="", metavar="NAME", help="The plan; default: the newest.")
@click.option(
    "--label", type=click.Choice(["before", "after"]), help="Label of the result; default: before, then after."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def measure(model: str | None, name: str, label: Label | None, as_json: bool, **values: Any) -> int:
    """Measure decode speed: three times 64 tokens, greedy, without drafters.

    The result is saved with the plan. Once before and after are measured, they are compared: a gain is significant if
    it exceeds 2 % and twice the spread. Without a plan, it only measures.
    """
    import asyncio

    chosen = overridden(values)
    path = model_path(model, chosen)
    saved = store.find(name) if name or label or store.saved_plans() else None
    label = _label(saved, label) if saved is not None else None
    terminal = Terminal()
    info, measured = asyncio.run(_decode_rate(path, chosen, terminal))
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


async def _decode_rate(path: Path, chosen: Settings, terminal: Terminal) -> tuple[ModelInfo, DecodeRate]:
    """Load the model alone and measure it. Raises CpuchatError."""
    from cpuchat.cli.session import Session
    from cpuchat.tune.measure import measure_decode

    chosen.speculation.draft_model, chosen.hardware.probe = "none", False
    async with Session(chosen, terminal) as session:
        info = await session.load(path, calibrate=False)
        return info, await measure_decode(session.conversation.generate_detached)


def _label(saved: SavedPlan, wanted: Label | None) -> Label:
    """Return the label of the coming measurement. Raises UsageError where the plan's state contradicts it."""
    label: Label = wanted or ("before" if records.load(saved.folder, "before") is None else "after")
    some = any(now for now, _ in effect(saved.plan, ROOT).values())
    if label == "before" and some:
        raise UsageError(
            f"Plan {saved.name} is in effect, so this would not measure the state before.",
            f"Revert it first: {saved.command(saved.revert)}",
        )
    if label == "after" and not some:
        raise UsageError(
            f"Plan {saved.name} is not in effect yet.",
            f"Apply it: {saved.command(saved.apply)}; or repeat the measurement before: --label before",
        )
    return label


def _what_next(saved: SavedPlan, record: Record, result: dict[str, Any]) -> list[str]:
    """Return what the measurement says about the plan; it is added to `result` as well."""
    from cpuchat.hardware.tuning.resctrl import DRAFTING_ONLY

    if record.label == "before":
        return [f"Now apply the plan: {saved.command(saved.apply)}", "Then measure again:  cpuchat system measure"]
    lines = [f"in effect: {_effect_words(record.effect)}"]
    verdict, why = records.judged(records.load(saved.folder, "before"), record)
    result["verdict"] = msgspec.to_builtins(verdict) if verdict is not None else None
    if verdict is None:
        return [*lines, f"No comparison: {why}."]
    lines.append(verdict.words)
    if saved.plan.group is not None:
        lines.append(DRAFTING_ONLY)
    if not verdict.keep:
        lines.append(f"To revert: {saved.command(saved.revert)}")
    return lines


def _effect_words(counts: dict[str, tuple[int, int]]) -> str:
    """`epp, thp; in part: governor (0 of 8)`."""
    done = [name for name, (now, of) in counts.items() if now == of]
    missing = [f"{name} ({now} of {of})" for name, (now, of) in counts.items() if now < of]
    return (", ".join(done) or "nothing") + (f"; in part: {', '.join(missing)}" if missing else "")


@system.command("list", short_help="List plans, their changes in effect, and the measurements.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def list_plans(as_json: bool) -> int:
    """List plans, which of their changes are in effect, and the measurements."""
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
        click.echo("No tuning plans. Create one: cpuchat system plan")
    for row in rows:
        rates = " → ".join(units.rate(row[label]) if row[label] else "n/a" for label in ("before", "after"))
        click.echo(f"{row['name']}  in effect: {_effect_words(row['effect'])}")
        click.echo(f"  {rates} tok/s: {row['verdict'] or row['no_verdict']}")
    return 0


@system.command(short_help="Print the command that reverts a plan.")
@click.argument("name", default="")
def revert(name: str) -> int:
    """Print the command that reverts the plan NAME (default: the newest)."""
    saved = store.find(name)
    counts = effect(saved.plan, ROOT)
    some = any(now for now, _ in counts.values())
    state = f"is in effect: {_effect_words(counts)}. To revert" if some else "is not in effect; reverting is harmless"
    click.echo(f"Plan {saved.name} {state}:", err=True)
    click.echo(saved.command(saved.revert))
    return 0
