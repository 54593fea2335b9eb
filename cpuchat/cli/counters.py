"""`cpuchat counters`: which counters of memory traffic and power can be read here, and how to enable more."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from cpuchat.cli.output import json_line
from cpuchat.errors import CpuchatError, UsageError
from cpuchat.hardware.counters.ladder import Ladder, counter_openers, power_openers, theoretical_bandwidth, worth_trying
from cpuchat.hardware.topology import read_topology
from cpuchat.text import clean_line

if TYPE_CHECKING:
    from cpuchat.hardware.counters.base import CounterRefusal, CounterSource
    from cpuchat.hardware.counters.ladder import Opener
    from cpuchat.hardware.topology import Topology
    from cpuchat.telemetry.machine import MachineSample

_EPILOG = """\b
Examples:
  cpuchat counters                   list the counters
  cpuchat counters watch             memory traffic and power, once a second
  cpuchat counters unit              the systemd service for counters that need privileges

Without a counter, cpuchat shows the traffic estimated from the model, marked "estimated"."""


@click.group(invoke_without_command=True, epilog=_EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def counters(ctx: click.Context, as_json: bool) -> int:
    """List the counters of memory traffic and power: which are available here, and why the others are not."""
    if ctx.invoked_subcommand is not None:
        if as_json:
            hint = f"Put it after the command: cpuchat counters {ctx.invoked_subcommand} --json"
            raise UsageError("--json before the command is not supported.", hint)
        return 0
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
        click.echo(f"Virtual machine ({topology.virtual}): most counters are available on the host only.")
    if not any(row["opens"] for row in found["bandwidth"]):
        click.echo("No counter is available; traffic is estimated from the model.")
    return 0


def _tried(opener: Opener[CounterSource], topology: Topology) -> dict[str, Any]:
    ladder = Ladder([opener])
    source = ladder.next()
    if source is None:
        refusal: CounterRefusal = ladder.refusals[0]
        how = refusal.how if worth_trying(refusal, topology) else ""
        return {"name": refusal.name, "opens": False, "why": refusal.why, "how": how}
    source.close()
    return {"name": opener[0], "opens": True, "why": "", "how": ""}


def _line(row: dict[str, Any], used: str | None) -> str:
    if row["opens"]:
        return f"  {row['name']:<25} available{', in use' if row['name'] == used else ''}"
    how = f"\n  {'':<25} → {row['how']}" if row["how"] else ""
    return f"  {row['name']:<25} n/a: {clean_line(row['why'])}{how}"


@counters.command("unit", short_help="Print the systemd unit of the collector.")
def print_unit() -> int:
    """Print the systemd unit of the collector, which reads counters that need privileges.

    Its first lines say how to install and remove it. cpuchat itself never asks for root.
    """
    from cpuchat.hardware.collector_unit import unit

    click.echo(unit(), nl=False)
    return 0


@counters.command("program", short_help="Print the collector's program for root to install.")
def print_program() -> int:
    """Print the collector's program, a Python zip application, for root to install.

    `cpuchat counters unit` says how to install it as a copy that only root can change.
    """
    from cpuchat.hardware.collector_unit import program_file

    if sys.stdout.isatty():
        how = "Redirect it to a file; `cpuchat counters unit` says how to install it."
        raise UsageError("The program is binary: refusing to print it to a terminal.", how)
    with os.fdopen(1, "wb", closefd=False) as out:  # sys.stdout takes clean text only
        out.write(program_file())
    return 0


@counters.command("watch")
@click.option("--seconds", type=click.IntRange(min=1), metavar="N", help="Stop after N seconds.")
@click.option(
    "--pid", type=click.IntRange(min=1), metavar="PID", help="The process to watch; used by per-process counters."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def watch(seconds: int | None, pid: int | None, as_json: bool) -> int:
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
