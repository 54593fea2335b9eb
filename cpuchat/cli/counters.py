"""`cpuchat counters`: which counters of memory traffic and power this machine lets us read, and how to get more."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from cpuchat.errors import CpuchatError, UsageError

if TYPE_CHECKING:
    from cpuchat.hardware.counters.base import CounterRefusal, Source
    from cpuchat.hardware.counters.ladder import Opener
    from cpuchat.hardware.topology import Topology
    from cpuchat.telemetry.machine import MachineSample

_EPILOG = """\b
Examples:
  cpuchat counters                   what can be read here
  cpuchat counters watch             memory traffic and power, once a second
  cpuchat counters unit              the service for counters that need rights

Without any counter, cpuchat still shows the traffic that the model itself makes, marked "≈ model"."""


@click.group(invoke_without_command=True, epilog=_EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def counters(ctx: click.Context, as_json: bool) -> int:
    """Say which counters of memory traffic and power open on this machine, and why the others do not."""
    if ctx.invoked_subcommand is not None:
        if as_json:
            hint = f"Give it there: cpuchat counters {ctx.invoked_subcommand} --json"
            raise UsageError("--json belongs behind the command.", hint)
        return 0
    import os

    from cpuchat.cli.output import json_line
    from cpuchat.hardware.counters.ladder import counter_openers, power_openers, theoretical_bandwidth
    from cpuchat.hardware.topology import read_topology

    topology = read_topology()
    theoretical = theoretical_bandwidth(topology)
    found = {
        "bandwidth": [_tried(one, topology) for one in counter_openers(topology, os.getpid(), theoretical=theoretical)],
        "power": [_tried(one, topology) for one in power_openers(topology)],
    }
    if as_json:
        click.echo(json_line({"virtual": topology.virtual, **found}))
        return 0
    for title, rows in (("Memory traffic", found["bandwidth"]), ("Power", found["power"])):
        click.echo(f"{title}:")
        used = next((row["name"] for row in rows if row["opens"]), None)
        for row in rows:
            click.echo(_line(row, used))
        click.echo("")
    if topology.virtual:
        click.echo(f"This is a virtual machine ({topology.virtual}): most counters stay with its host.")
    if not any(row["opens"] for row in found["bandwidth"]):
        click.echo("No counter opens; cpuchat shows the traffic that the model itself makes, marked ≈ model.")
    return 0


def _tried(opener: Opener[Source], topology: Topology) -> dict[str, Any]:
    from cpuchat.hardware.counters.ladder import Ladder, worth_trying

    ladder = Ladder([opener])
    source = ladder.next()
    if source is None:
        refusal: CounterRefusal = ladder.refusals[0]
        how = refusal.how if worth_trying(refusal, topology) else ""
        return {"name": refusal.name, "opens": False, "why": refusal.why, "how": how}
    source.close()
    return {"name": opener[0], "opens": True, "why": "", "how": ""}


def _line(row: dict[str, Any], used: str | None) -> str:
    from cpuchat.text import clean_line

    if row["opens"]:
        return f"  {row['name']:<25} opens{', and is used' if row['name'] == used else ''}"
    how = f"\n  {'':<25} → {row['how']}" if row["how"] else ""
    return f"  {row['name']:<25} n/a: {clean_line(row['why'])}{how}"


@counters.command("unit")
def print_unit() -> int:
    """Print the systemd service that reads counters which need rights.

    Its first lines say how to install and remove it. cpuchat itself never asks for rights.
    """
    from cpuchat.hardware.collector_unit import unit

    click.echo(unit(), nl=False)
    return 0


@counters.command("program")
def print_program() -> int:
    """Print the program of that service, one file of Python, for root to install.

    A copy that only root can change: `cpuchat counters unit` says how.
    """
    import os
    import sys

    from cpuchat.hardware.collector_unit import program_file

    if sys.stdout.isatty():
        how = "`cpuchat counters unit` says how to install it."
        raise UsageError("The program is for a file, not for a terminal.", how)
    with os.fdopen(1, "wb", closefd=False) as out:  # sys.stdout takes clean text only
        out.write(program_file())
    return 0


@counters.command("watch")
@click.option("--seconds", type=click.IntRange(min=1), metavar="N", help="End after N seconds.")
@click.option("--pid", type=click.IntRange(min=1), metavar="PID", help="The process to watch where only one can be.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def watch(seconds: int | None, pid: int | None, as_json: bool) -> int:
    """Print memory traffic and power once a second, until Ctrl-C."""
    from cpuchat.cli.output import json_line
    from cpuchat.hardware.counters.collector_file import content_of
    from cpuchat.hardware.monitor import Monitor
    from cpuchat.hardware.topology import read_topology

    monitor = Monitor(read_topology(), pid)
    try:
        sample = monitor.sample()
        if not monitor.sources:
            raise CpuchatError(f"There is nothing to watch: {sample.no_bandwidth}.", "`cpuchat counters` says more.")
        shown = 0
        while seconds is None or shown < seconds:
            time.sleep(1)
            sample = monitor.sample()
            if as_json:
                click.echo(json_line(content_of(sample, time.time(), monitor.theoretical)))
            else:
                click.echo(_watched(sample, monitor.theoretical))
            shown += 1
    finally:
        monitor.close()
    return 0


def _watched(sample: MachineSample, theoretical: float | None) -> str:
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
