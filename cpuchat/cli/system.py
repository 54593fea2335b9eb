"""The commands about the machine: `system`, `probe`, `counters` and `doctor`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cpuchat.base.errors import CpuchatError, Interrupted, UsageError
from cpuchat.base.text import clean_line
from cpuchat.cli.options import laid_over, model_option, model_path, overridden, placement_options, setting, stacked
from cpuchat.cli.output import json_line, print_json
from cpuchat.cli.terminal import Terminal, columns, echo_paragraph, echo_table
from cpuchat.hardware.monitor import counter_openers, open_best, power_openers, theoretical_bandwidth, worth_trying
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.hardware.tuning.plan import effect, find_plan, knob_states, make_plan, save_plan, saved_plans
from cpuchat.present.table import table
from cpuchat.telemetry import units
from cpuchat.telemetry.units import gigabytes

if TYPE_CHECKING:
    from cpuchat.config.settings import Settings
    from cpuchat.hardware.bandwidth.memory_modules import Theoretical
    from cpuchat.hardware.bandwidth.read_bandwidth import ReadBandwidth, Survey
    from cpuchat.hardware.diagnostics import WantedSetup
    from cpuchat.hardware.monitor import Opener
    from cpuchat.hardware.topology import Topology
    from cpuchat.hardware.tuning.knobs import KnobRefusal
    from cpuchat.hardware.tuning.plan import SavedPlan, TuningPlan
    from cpuchat.protocol.model_info import ModelInfo
    from cpuchat.telemetry.answer import DecodeRate
    from cpuchat.telemetry.machine import MachineSample
    from cpuchat.tune.trial import Label, Record


ROOT = Path("/")
"""Root of the file system; tests replace it."""

_SYSTEM_EPILOG = """\b
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


@click.group(epilog=_SYSTEM_EPILOG, short_help="Settings that only root may change: plan, measure, revert.")
def system() -> None:
    """Plan changes of machine settings, and measure whether they help.

    cpuchat plans, writes scripts and measures. It changes nothing itself.
    """


@system.command("state", short_help="Show the settings, and which of them a plan can change.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def show_state(as_json: bool) -> None:
    """Show the current settings, and which of them a plan can change on this machine."""

    states = knob_states(read_topology(ROOT), ROOT)
    if as_json:
        return print_json(msgspec.to_builtins(states))
    rows = [("SETTING", "NOW", "EXPECTED EFFECT")]
    rows += [(one.name, one.value or "n/a", "unavailable" if one.refusal else one.verdict) for one in states]
    echo_table(rows)
    _print_refusals([one.refusal for one in states if one.refusal])


@system.command(epilog=_PLAN_EPILOG, short_help="Write the scripts that apply and revert settings.")
@click.option(
    "--knob", "knobs", multiple=True, metavar="NAME", help="Change this setting; default: all low-risk settings."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(knobs: tuple[str, ...], as_json: bool) -> None:
    """Write two scripts: one that changes settings, one that reverts them.

    NAME is a setting listed by `cpuchat system state`.
    """
    topology = read_topology(ROOT)
    made = make_plan(topology, ROOT, knobs, _target_cpus(topology, laid_over({})) if "l3" in knobs else ())
    saved = None if made.empty else save_plan(made, ROOT)
    if as_json:
        files = {"name": saved.name, "apply": str(saved.apply), "revert": str(saved.revert)} if saved else {}
        return print_json({**files, **msgspec.to_builtins(made)})
    if saved is None:
        click.echo("Nothing to change." if made.notes else "Nothing can be changed on this machine.")
    else:
        rows = _change_rows(made)
        click.echo(f"Plan {saved.name}. Nothing has been changed yet.\n")
        echo_table([row[:-1] for row in rows])
        for row in dict.fromkeys((row[0].strip(), row[-1]) for row in rows):
            _echo_item(": ".join(row))
    for note in made.notes:
        _echo_item(note)
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
        _echo_item(f"{', '.join(knobs)}: {why}.{f' {how}' if how else ''}")


def _echo_item(text: str) -> None:
    echo_paragraph(clean_line(text), "  ", "    ")


@system.command(short_help="Measure decode speed before and after.")
@model_option()
@placement_options()
@click.option("--plan", "name", default="", metavar="NAME", help="The plan; default: the newest.")
@click.option(
    "--label", type=click.Choice(["before", "after"]), help="Label of the result; default: before, then after."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def measure(model: str | None, name: str, label: Label | None, as_json: bool, **values: Any) -> None:
    """Measure decode speed: three times 64 tokens, greedy, without drafters.

    The result is saved with the plan. Once before and after are measured, they are compared: a gain is significant if
    it exceeds 2 % and twice the spread. Without a plan, it only measures.
    """
    import asyncio

    from cpuchat.tune import trial

    chosen = overridden(values)
    path = model_path(model, chosen)
    saved = find_plan(name) if name or label or saved_plans() else None
    label = _label(saved, label) if saved is not None else None
    terminal = Terminal()
    info, measured = asyncio.run(decode_rate(path, chosen, terminal))
    terminal.clear_progress()
    result: dict[str, Any] = {"model": info.name, **msgspec.to_builtins(measured)}
    lines = [f"{info.name or path.stem}: {units.rate(measured.tok_s)} tok/s (spread {units.rate(measured.spread)})"]
    if saved is not None and label is not None:
        record = trial.make(label, info, measured, effect(saved.plan, ROOT))
        trial.save(saved.folder, record)
        result |= {"plan": saved.name, "label": label, "effect": record.effect}
        lines[0] = f"{label}: {lines[0]}"
        lines += _what_next(saved, record, result)
    for line in [json_line(result)] if as_json else lines:
        terminal.line(line)


async def decode_rate(path: Path, chosen: Settings, terminal: Terminal) -> tuple[ModelInfo, DecodeRate]:
    """Load the model without a draft model, and measure it."""
    from cpuchat.cli.session import Session
    from cpuchat.telemetry.answer import measure_decode

    chosen.speculation.draft_model, chosen.hardware.probe = "none", False
    async with Session(chosen, terminal) as session:
        info = await session.load(path, calibrate=False)
        return info, await measure_decode(session.conversation.generate_detached)


def _label(saved: SavedPlan, wanted: Label | None) -> Label:
    """Return the label of the coming measurement. Raises UsageError where the plan's state contradicts it."""
    from cpuchat.tune import trial

    label: Label = wanted or ("before" if trial.load(saved.folder, "before") is None else "after")
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
    from cpuchat.tune import trial

    if record.label == "before":
        return [f"Now apply the plan: {saved.command(saved.apply)}", "Then measure again:  cpuchat system measure"]
    lines = [f"in effect: {_effect_words(record.effect)}"]
    verdict, why = trial.judged(trial.load(saved.folder, "before"), record)
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
def list_plans(as_json: bool) -> None:
    """List plans, which of their changes are in effect, and the measurements."""
    from cpuchat.tune import trial

    rows: list[dict[str, Any]] = []
    for saved in saved_plans():
        before, after = trial.load(saved.folder, "before"), trial.load(saved.folder, "after")
        verdict, why = trial.judged(before, after)
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
        return print_json(rows)
    if not rows:
        click.echo("No tuning plans. Create one: cpuchat system plan")
    for row in rows:
        rates = " → ".join(units.rate(row[label]) if row[label] else "n/a" for label in ("before", "after"))
        click.echo(f"{row['name']}  in effect: {_effect_words(row['effect'])}")
        click.echo(f"  {rates} tok/s: {row['verdict'] or row['no_verdict']}")


@system.command(short_help="Print the command that reverts a plan.")
@click.argument("name", default="")
def revert(name: str) -> None:
    """Print the command that reverts the plan NAME (default: the newest)."""
    saved = find_plan(name)
    counts = effect(saved.plan, ROOT)
    some = any(now for now, _ in counts.values())
    state = f"is in effect: {_effect_words(counts)}. To revert" if some else "is not in effect; reverting is harmless"
    click.echo(f"Plan {saved.name} {state}:", err=True)
    click.echo(saved.command(saved.revert))


_PROBE_EPILOG = """\b
Examples:
  cpuchat probe
  cpuchat probe --cores l3:0-1
  cpuchat probe --json | jq .all_cores.bytes_per_s

Takes up to 40 seconds and up to 4 GB of free memory. The bandwidth is the denominator of bandwidth utilization; all
predicted speeds follow from the passes. Run it on an idle machine.

Exit codes: 0 success, 2 wrong usage or settings, 14 measurement failed, 130 stopped by Ctrl+C."""

_STEADY = 0.9
"""Ratio of the slowest round to the best below which other programs disturbed the measurement."""


@click.command(epilog=_PROBE_EPILOG, short_help="Measure bandwidth and passes: the basis of all predictions.")
@stacked(
    setting("engine.cores", "Cores to measure: auto, all, 0-7, l3:0, node:0, socket:0, or 4/l3."),
    setting("engine.memory"),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object, in bytes per second."),
)  # fmt: skip
def probe(as_json: bool, **values: Any) -> None:
    """Measure the read bandwidth of one core, one L3 group and all cores, and between NUMA nodes; then passes of small
    models with random weights, in every usual tensor type.

    Decoding reads the whole model for every token, so the bandwidth bounds its speed; the passes tell the rest.
    """
    import asyncio

    from cpuchat.bench.cost_probe import CostProbe, probe_costs
    from cpuchat.hardware.bandwidth.memory_modules import theoretical
    from cpuchat.hardware.bandwidth.read_bandwidth import survey
    from cpuchat.present.machine import costs_measured

    chosen = laid_over(values)
    engine = chosen.engine
    topology = read_topology(ROOT)
    threads = 0 if values.get("engine__cores") else engine.threads
    is_saved = not (values.get("engine__cores") or values.get("engine__memory"))
    spec = PlacementSpec(engine.cores, memory=engine.memory, threads=threads, is_saved=is_saved)
    placement = place(topology, spec)
    terminal = Terminal()

    def progress(done: int, total: int, what: str) -> None:
        terminal.status(f"measuring {what} ({done + 1} of {total})")

    try:
        found = survey(topology, progress, cpus=placement.cpus, memory=placement.memory.words)
        n_passes, problem = 0, ""
        if not found.all_cores.disturbed:
            try:
                n_passes = asyncio.run(probe_costs(CostProbe(spec, progress), placement))
            except Interrupted:
                raise
            except CpuchatError as error:
                problem = f"Passes not measured: {error}"
    finally:
        terminal.clear_progress()
    limit = theoretical(topology)
    if as_json:
        passes = {"passes": n_passes} if n_passes else None
        notes = [*found.notes, *filter(None, [problem])]
        return print_json(
            {**_probe_json(topology, found, limit, placement.memory.words), "costs": passes, "notes": notes}
        )
    click.echo("\n".join(_probe_lines(topology, found, limit)))
    click.echo(f"\n{clean_line(problem) or costs_measured(n_passes, len(placement.cpus))}")


def _probe_lines(topology: Topology, found: Survey, limit: Theoretical | None) -> list[str]:
    from cpuchat.present.machine import measured_sets

    lines = [clean_line(topology.name)]
    if topology.virtual:
        lines.append(f"Virtual machine ({clean_line(topology.virtual)}): the topology is unverified")
    rows = [("CORES", "N", "BEST", "MEDIAN (RANGE), GB/s")]
    for name, one in measured_sets(found, per_count=True):
        low, middle, high = (gigabytes(figure(one.rounds)) for figure in (min, statistics.median, max))
        rows.append((name, str(len(one.cpus)), gigabytes(one.bytes_per_s), f"{middle} ({low}–{high})"))
    lines += ["", *table(rows, right=(1, 2))]
    if found.cells:
        lines += ["", *_node_matrix(found)]
    return [*lines, "", *map(clean_line, (*_probe_conclusions(topology, found, limit), *found.notes))]


def _node_matrix(found: Survey) -> list[str]:
    """Format the matrix: cores of each node (rows) by memory of each node (columns), in GB/s."""
    matrix = found.matrix
    columns = sorted({far for _, far in matrix})
    rows = [("GB/s", *(f"memory of node {far}" for far in columns))]
    for near in sorted({near for near, _ in matrix}):
        cells = (gigabytes(one.bytes_per_s) if (one := matrix.get((near, far))) else "n/a" for far in columns)
        rows.append((f"cores of node {near}", *cells))
    return table(rows, right=range(1, len(columns) + 1))


def _probe_conclusions(topology: Topology, found: Survey, limit: Theoretical | None) -> list[str]:
    from cpuchat.present.machine import knee, share_of_peak, theoretical_peak

    best, worst = found.all_cores.bytes_per_s, min(found.all_cores.rounds)
    lines: list[str] = []
    if worst < _STEADY * best:
        lines.append("Rounds differ by more than 10 %: other programs are running. Repeat on an idle machine.")
    elif enough := knee(found):
        lines.append(f"{enough}.")
    lines.append(f"Theoretical peak: {theoretical_peak(topology, limit)}")
    if (share := share_of_peak(found, limit)) is not None:
        lines.append(f"All cores reach {100 * share:.0f} % of it")
    return lines


def _probe_json(topology: Topology, found: Survey, limit: Theoretical | None, memory: str) -> dict[str, Any]:
    from cpuchat.present.machine import share_of_peak

    def plain(one: ReadBandwidth | None) -> dict[str, Any] | None:
        return {**dataclasses.asdict(one), "median": statistics.median(one.rounds)} if one is not None else None

    return {
        "machine": topology.name,
        "virtual": topology.virtual,
        "memory": memory,
        "one_core": plain(found.one_core),
        "l3_group": plain(found.l3_group),
        "link": plain(found.fabric_link),
        "all_cores": plain(found.all_cores),
        "per_core_counts": {str(n): plain(one) for n, one in (found.per_core_counts or {}).items()},
        "knee": found.knee,
        "matrix": [
            {"cpu_node": cell.cpu_node, "memory_node": cell.memory_node, **(plain(cell.measured) or {})}
            for cell in found.cells
        ],
        "theoretical": dataclasses.asdict(limit) if limit is not None else None,
        "share": share_of_peak(found, limit),
        "seconds": found.seconds,
    }


_COUNTERS_EPILOG = """\b
Examples:
  cpuchat counters                   list the counters
  cpuchat counters watch             memory traffic and power, once a second
  cpuchat counters unit              the systemd service for counters that need privileges

Without a counter, cpuchat shows the traffic estimated from the model, marked "estimated"."""


@click.group(invoke_without_command=True, epilog=_COUNTERS_EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def counters(ctx: click.Context, as_json: bool) -> None:
    """List the counters of memory traffic and power: which are available here, and why the others are not."""
    if ctx.invoked_subcommand is not None:
        if as_json:
            hint = f"Put it after the command: cpuchat counters {ctx.invoked_subcommand} --json"
            raise UsageError("--json before the command is not supported.", hint)
        return
    topology = read_topology()
    bandwidth = counter_openers(topology, os.getpid(), theoretical=theoretical_bandwidth(topology))
    found = {
        "bandwidth": [_try_counter(opener, topology) for opener in bandwidth],
        "power": [_try_counter(opener, topology) for opener in power_openers(topology)],
    }
    if as_json:
        return print_json({"virtual": topology.virtual, **found})
    for title, rows in (("Memory traffic", found["bandwidth"]), ("Power", found["power"])):
        click.echo(f"{title}:")
        used = next((row["name"] for row in rows if row["opens"]), None)
        for row in rows:
            click.echo(_counter_line(row, used))
        click.echo("")
    if topology.virtual:
        click.echo(f"Virtual machine ({topology.virtual}): most counters are available on the host only.")
    if not any(row["opens"] for row in found["bandwidth"]):
        click.echo("No counter is available; traffic is estimated from the model.")


def _try_counter(opener: Opener[Any], topology: Topology) -> dict[str, Any]:
    source, refusals = open_best([opener])
    if source is None:
        [refusal] = refusals
        how = refusal.how if worth_trying(refusal, topology) else ""
        return {"name": refusal.name, "opens": False, "why": refusal.why, "how": how}
    source.close()
    return {"name": opener[0], "opens": True, "why": "", "how": ""}


def _counter_line(row: dict[str, Any], used: str | None) -> str:
    if row["opens"]:
        return f"  {row['name']:<25} available{', in use' if row['name'] == used else ''}"
    how = f"\n  {'':<25} → {row['how']}" if row["how"] else ""
    return f"  {row['name']:<25} n/a: {clean_line(row['why'])}{how}"


@counters.command("unit", short_help="Print the systemd unit of the collector.")
def print_unit() -> None:
    """Print the systemd unit of the collector, which reads counters that need privileges.

    Its first lines say how to install and remove it. cpuchat itself never asks for root.
    """
    from cpuchat.hardware.collector_unit import unit

    click.echo(unit(), nl=False)


@counters.command("program", short_help="Print the collector's program for root to install.")
def print_program() -> None:
    """Print the collector's program, a Python zip application, for root to install.

    `cpuchat counters unit` says how to install it as a copy that only root can change.
    """
    from cpuchat.hardware.collector_unit import program_file

    if sys.stdout.isatty():
        how = "Redirect it to a file; `cpuchat counters unit` says how to install it."
        raise UsageError("The program is binary: refusing to print it to a terminal.", how)
    with os.fdopen(1, "wb", closefd=False) as out:  # sys.stdout takes clean text only
        out.write(program_file())


@counters.command("watch")
@click.option("--seconds", type=click.IntRange(min=1), metavar="N", help="Stop after N seconds.")
@click.option(
    "--pid", type=click.IntRange(min=1), metavar="PID", help="The process to watch; used by per-process counters."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def watch(seconds: int | None, pid: int | None, as_json: bool) -> None:
    """Print memory traffic and power once a second, until Ctrl+C."""
    from cpuchat.hardware.counters.collector_file import content_of
    from cpuchat.hardware.monitor import Monitor

    monitor = Monitor(read_topology(), pid)
    try:
        sample = monitor.sample()
        if not monitor.sources:
            raise CpuchatError(f"No counter is available: {sample.no_bandwidth}.", "See `cpuchat counters`.")
        shown = 0
        while seconds is None or shown < seconds:
            time.sleep(1)
            sample = monitor.sample()
            if as_json:
                print_json(content_of(sample, time.time(), monitor.theoretical))
            else:
                click.echo(_traffic_line(sample, monitor.theoretical))
            shown += 1
    finally:
        monitor.close()


def _traffic_line(sample: MachineSample, theoretical: float | None) -> str:
    bandwidth, power = sample.bandwidth, sample.power
    parts: list[str] = []
    if bandwidth is None:
        parts.append(f"memory n/a: {sample.no_bandwidth}")
    else:
        of = f" of {theoretical / 1e9:.0f}" if theoretical else ""
        split = ""
        if bandwidth.read is not None and bandwidth.write is not None:
            split = f" (read {bandwidth.read / 1e9:.1f}, write {bandwidth.write / 1e9:.1f})"
        parts.append(f"memory {bandwidth.total / 1e9:.1f}{of} GB/s{split} [{bandwidth.source}]")
        if bandwidth.per_l3:
            parts.append("L3 groups " + " ".join(f"{value / 1e9:.0f}" for value in bandwidth.per_l3))
    parts.append(f"{power.watts:.0f} W [{power.source}]" if power is not None else f"power n/a: {sample.no_power}")
    return " · ".join(parts)


_DOCTOR_EPILOG = """\b
Examples:
  cpuchat doctor
  cpuchat doctor --probe
  cpuchat doctor --json | jq '.findings[] | select(.level == "problem")'

Nothing is changed; without --probe nothing is measured.

Exit codes: 0 nothing worse than advice, 1 warnings or problems found, 2 wrong usage or settings, 14 --probe failed."""


@click.command(epilog=_DOCTOR_EPILOG, short_help="Check what limits inference speed on this machine.")
@click.option("--probe", is_flag=True, help="Measure the read bandwidth first (up to 15 seconds).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(probe: bool, as_json: bool) -> int:
    """Check what limits inference speed on this machine: each finding with its evidence and the fix."""
    import asyncio

    from cpuchat.cli.version import engine_info
    from cpuchat.hardware.diagnostics import examine, gather_facts
    from cpuchat.present.machine import page, page_json

    chosen = laid_over({})
    topology = read_topology(ROOT)
    engine, engine_error = None, None
    try:
        engine = asyncio.run(engine_info(chosen.engine.cpu_module))
    except CpuchatError as error:
        engine_error = error
    wanted = _wanted_setup(chosen)
    found = _measure_bandwidths(topology, wanted) if probe else {}
    facts = gather_facts(
        wanted, engine=engine, engine_error=engine_error, topology=topology, pid=os.getpid(), root=ROOT
    )
    facts = dataclasses.replace(facts, **found)
    findings = examine(facts)
    if as_json:
        print_json(page_json(facts, findings))
    else:
        for line in page(facts, findings, columns()):
            click.echo(line)
    return 1 if any(finding.level in ("problem", "warning") for finding in findings) else 0


def _wanted_setup(chosen: Settings) -> WantedSetup:
    from cpuchat.hardware.diagnostics import WantedSetup
    from cpuchat.models.gguf.header import model_size

    name, size = "", 0
    if chosen.model.last:
        with contextlib.suppress(CpuchatError, OSError):
            path = model_path(None, chosen)
            name, size = path.name, model_size(path)
    engine = chosen.engine
    return WantedSetup(cores=engine.cores, threads=engine.threads, memory=engine.memory, model=name, model_bytes=size)


def _measure_bandwidths(topology: Topology, wanted: WantedSetup) -> dict[str, Any]:
    """Measure the bandwidths of the page for the configured cores and policy; {} where these are not possible."""
    from cpuchat.hardware.bandwidth.read_bandwidth import remember, survey

    try:
        spec = PlacementSpec(wanted.cores, memory=wanted.memory, threads=wanted.threads, is_saved=True)
        placement = place(topology, spec)
    except CpuchatError:
        return {}
    memory = placement.memory.words
    click.echo("cpuchat: measuring the read bandwidth (up to 15 seconds)", err=True)
    found = survey(topology, cpus=placement.cpus, memory=memory, root=ROOT)
    return {"survey": found, "peak": remember(found.all_cores, memory, root=ROOT)}
