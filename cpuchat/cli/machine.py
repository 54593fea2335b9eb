"""The commands about the machine: `probe`, `counters` and `doctor`."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cpuchat.base.errors import CpuchatError, Interrupted, UsageError
from cpuchat.base.text import clean_line
from cpuchat.cli.options import laid_over, model_path, setting, stacked
from cpuchat.cli.output import print_json
from cpuchat.cli.terminal import TerminalOutput, columns, echo_paragraph
from cpuchat.hardware.monitor import Monitor, counter_states
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.present.table import table
from cpuchat.telemetry.units import gigabytes

if TYPE_CHECKING:
    from cpuchat.config.settings import Settings
    from cpuchat.hardware.bandwidth.read_bandwidth import ReadBandwidth, Survey
    from cpuchat.hardware.bandwidth.theoretical import Theoretical
    from cpuchat.hardware.diagnostics import WantedSetup
    from cpuchat.hardware.topology import Topology
    from cpuchat.telemetry.machine import MachineSample


ROOT = Path("/")
"""Root of the file system; tests replace it."""

_PROBE_EPILOG = """\b
Examples:
  cpuchat probe
  cpuchat probe --cores l3:0-1
  cpuchat probe --cores node:0 --memory-policy bind:1    one NUMA node reading another one
  cpuchat probe --json | jq .all_cores.bytes_per_s

Takes about 30 seconds and up to 4 GB of free memory. The bandwidth is the denominator of bandwidth utilization; all
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
    """Measure the read bandwidth of one core, one L3 group and all cores; then passes of small models with random
    weights, in every usual tensor type.

    Decoding reads the whole model for every token, so the bandwidth bounds its speed; the passes tell the rest.
    """
    import asyncio

    from cpuchat.bench.cost_probe import CostProbe, probe_costs
    from cpuchat.hardware.bandwidth.read_bandwidth import survey
    from cpuchat.hardware.bandwidth.theoretical import theoretical
    from cpuchat.present.machine import costs_measured

    chosen = laid_over(values)
    engine = chosen.engine
    topology = read_topology(ROOT)
    threads = 0 if values.get("engine__cores") else engine.threads
    is_saved = not (values.get("engine__cores") or values.get("engine__memory"))
    spec = PlacementSpec(engine.cores, memory=engine.memory, threads=threads, is_saved=is_saved)
    placement = place(topology, spec)
    terminal = TerminalOutput()

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
        notes = [problem] if problem else []
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
    for name, one in measured_sets(found):
        low, middle, high = (gigabytes(figure(one.rounds)) for figure in (min, statistics.median, max))
        rows.append((name, str(len(one.cpus)), gigabytes(one.bytes_per_s), f"{middle} ({low}–{high})"))
    lines += ["", *table(rows, right=(1, 2))]
    return [*lines, "", *map(clean_line, _probe_conclusions(topology, found, limit))]


def _probe_conclusions(topology: Topology, found: Survey, limit: Theoretical | None) -> list[str]:
    from cpuchat.present.machine import share_of_peak, theoretical_peak

    best, worst = found.all_cores.bytes_per_s, min(found.all_cores.rounds)
    lines: list[str] = []
    if worst < _STEADY * best:
        lines.append("Rounds differ by more than 10 %: other programs are running. Repeat on an idle machine.")
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
        "all_cores": plain(found.all_cores),
        "theoretical": dataclasses.asdict(limit) if limit is not None else None,
        "share": share_of_peak(found, limit),
    }


_COUNTERS_EPILOG = """\b
Examples:
  cpuchat counters                   what opens here, and why not
  cpuchat counters watch             memory traffic and power, once a second

Without a counter, cpuchat shows the traffic estimated from the model, marked "estimated"."""


@click.group(invoke_without_command=True, epilog=_COUNTERS_EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def counters(ctx: click.Context, as_json: bool) -> None:
    """Show which counters of memory traffic and power open here, and why not."""
    if ctx.invoked_subcommand is not None:
        if as_json:
            hint = f"Put it after the command: cpuchat counters {ctx.invoked_subcommand} --json"
            raise UsageError("--json before the command is not supported.", hint)
        return
    topology = read_topology(ROOT)
    bandwidth, power = counter_states(topology, ROOT)
    if as_json:
        states = {"bandwidth": dataclasses.asdict(bandwidth), "power": dataclasses.asdict(power)}
        return print_json({"virtual": topology.virtual, **states})
    for title, one in (("Memory traffic", bandwidth), ("Power", power)):
        echo_paragraph(clean_line(f"{title}: {one}"), "", "  ")
    if not bandwidth.name:
        click.echo("Memory traffic is estimated from the model.")


@counters.command("watch")
@click.option("--seconds", type=click.IntRange(min=1), metavar="N", help="Stop after N seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line, in bytes per second.")
def watch(seconds: int | None, as_json: bool) -> None:
    """Print memory traffic and power once a second, until Ctrl+C."""
    monitor = Monitor(read_topology(ROOT), ROOT)
    try:
        sample = monitor.sample()
        if not monitor.sources:
            raise CpuchatError(f"No counter is available: {sample.no_bandwidth}.", "See `cpuchat counters`.")
        shown = 0
        while seconds is None or shown < seconds:
            time.sleep(1)
            sample = monitor.sample()
            if as_json:
                print_json({"ts": round(time.time(), 3), **dataclasses.asdict(sample)})
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
    """Check what limits inference speed on this machine: each finding with its evidence and the fix; and the settings
    that only root can change, with the lines that change them and take them back.
    """
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
    wanted = _wanted_setup(topology, chosen)
    found = _measure_bandwidths(topology, wanted) if probe else {}
    facts = gather_facts(wanted, engine=engine, engine_error=engine_error, topology=topology, root=ROOT)
    facts = dataclasses.replace(facts, **found)
    findings = examine(facts)
    if as_json:
        print_json(page_json(facts, findings))
    else:
        for line in page(facts, findings, columns()):
            click.echo(line)
    return 1 if any(finding.level in ("problem", "warning") for finding in findings) else 0


def _wanted_setup(topology: Topology, chosen: Settings) -> WantedSetup:
    from cpuchat.hardware.diagnostics import WantedSetup
    from cpuchat.models.gguf.header import model_size

    name, size = "", 0
    if chosen.model.last:
        with contextlib.suppress(CpuchatError, OSError):
            path = model_path(None, chosen)
            name, size = path.name, model_size(path)
    engine = chosen.engine
    return WantedSetup(engine.cores, engine.threads, engine.memory, name, size, _target_cpus(topology, chosen))


def _target_cpus(topology: Topology, chosen: Settings) -> tuple[int, ...]:
    """Return the target's CPUs if the settings give the draft model its own cores; () otherwise."""
    spec = PlacementSpec.of(chosen)
    with contextlib.suppress(CpuchatError):  # settings that are not possible here are a finding
        return place(topology, spec, with_draft=True).cpus if spec.names_draft_cores else ()
    return ()


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
