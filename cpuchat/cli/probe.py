"""`cpuchat probe`: how fast the cores of this machine read memory, and how much of the modules' speed that is."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import click

from cpuchat.cli.options import laid_over, memory_option, setting, stacked

if TYPE_CHECKING:
    from cpuchat.hardware.bandwidth.measuring import ReadBandwidth
    from cpuchat.hardware.bandwidth.memory_modules import Theoretical
    from cpuchat.hardware.bandwidth.survey import Survey
    from cpuchat.hardware.topology import Topology

_EPILOG = """\b
Examples:
  cpuchat probe
  cpuchat probe --cores l3:0-1
  cpuchat probe --json | jq .all_cores.bytes_per_s

Takes up to 15 seconds, and up to 4 GB of free memory. The result is kept: utilization is shown against it. Measure on
a machine that does nothing else.

Exit codes: 0 measured, 2 wrong usage, 14 could not be measured, 130 stopped by Ctrl+C."""

_STEADY = 0.9
"""Rounds that differ by more than a tenth tell more about other programs than about memory."""

Row = tuple[str, str, str, str]


@click.command(epilog=_EPILOG, short_help="Measure how fast the cores read memory.")
@stacked(
    setting(
        "--cores", "engine.cores", "Cores to measure: auto, all, 0-7, l3:0, node:0, socket:0, or 4/l3.",
        metavar="WORDS",
    ),
    memory_option(),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object, in bytes per second."),
)  # fmt: skip
def probe(as_json: bool, **values: Any) -> int:
    """Measure the read bandwidth of one core, one L3 group and all cores, and between NUMA nodes.

    Generating text reads the whole model for every token, so this is what bounds its speed.
    """
    from cpuchat.cli.output import json_line
    from cpuchat.cli.terminal import Terminal
    from cpuchat.hardware.bandwidth.memory_modules import theoretical
    from cpuchat.hardware.bandwidth.survey import survey
    from cpuchat.hardware.numa.mempolicy import choose_policy
    from cpuchat.hardware.placement.cores import choose_cores
    from cpuchat.hardware.topology import read_topology

    engine = laid_over(values).engine
    topology = read_topology()
    cpus = choose_cores(topology, engine.cores, 0 if values.get("engine__cores") else engine.threads).cpus
    memory = choose_policy(topology, engine.memory, cpus)[0].words
    terminal = Terminal()

    def progress(done: int, total: int, what: str) -> None:
        terminal.status(f"measuring {what} ({done + 1} of {total})")

    try:
        found = survey(topology, progress, cpus=cpus, memory=memory)
    finally:
        terminal.clear_progress()
    limit = theoretical(topology)
    if as_json:
        click.echo(json_line(_json(topology, found, limit)))
    else:
        _print(topology, found, limit)
    return 0


def _print(topology: Topology, found: Survey, limit: Theoretical | None) -> None:
    from cpuchat.text import clean_line

    click.echo(clean_line(topology.name))
    if topology.virtual:
        click.echo(f"VM: topology unverified ({clean_line(topology.virtual)})")
    click.echo()
    for line in _aligned([("READS", "CORES", "BEST", "MEDIAN (SPREAD)"), *_rows(found)]):
        click.echo(line)
    if found.cells:
        click.echo()
        for line in _matrix(found):
            click.echo(line)
    click.echo()
    for line in (*_conclusions(topology, found, limit), *found.notes):
        click.echo(clean_line(line))


def _rows(found: Survey) -> list[Row]:
    """Every set of cores once."""
    counts = sorted((found.per_core_counts or {}).items())
    named: list[tuple[str, ReadBandwidth | None]] = [
        ("one core", found.one_core),
        ("one L3 group", found.l3_group),
        ("one fabric link", found.fabric_link),
        *((f"{count} of each L3 group", one) for count, one in counts),
    ]
    table: dict[tuple[int, ...], tuple[str, ReadBandwidth]] = {}
    for what, one in named:
        if one is not None and (one.cpus != found.all_cores.cpus or one is found.one_core):
            table.setdefault(one.cpus, (what, one))
    table.setdefault(found.all_cores.cpus, ("all chosen cores", found.all_cores))
    return [(what, str(len(one.cpus)), _gbs(one.bytes_per_s), _spread(one)) for what, one in table.values()]


def _aligned(rows: list[Row]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        f"{what:<{widths[0]}}  {cores:>{widths[1]}}  {best:>{widths[2]}}  {spread}".rstrip()
        for what, cores, best, spread in rows
    ]


def _matrix(found: Survey) -> list[str]:
    """Cores of each node (rows) against memory of each node (columns)."""
    matrix = found.matrix
    columns = sorted({far for _, far in matrix})
    lines = ["READS (GB/s)".ljust(18) + "".join(f"memory of {far}".rjust(13) for far in columns)]
    for near in sorted({near for near, _ in matrix}):
        cells = (f"{one.bytes_per_s / 1e9:.1f}" if (one := matrix.get((near, far))) else "n/a" for far in columns)
        lines.append(f"cores of node {near}".ljust(18) + "".join(cell.rjust(13) for cell in cells))
    return lines


def _conclusions(topology: Topology, found: Survey, limit: Theoretical | None) -> list[str]:
    best, worst = found.all_cores.bytes_per_s, min(found.all_cores.rounds)
    lines: list[str] = []
    knee, counts = found.knee, found.per_core_counts or {}
    if worst < _STEADY * best:
        lines.append("The rounds differ: something else is running here. Measure again when it is not.")
    elif knee is not None and knee < max(counts):
        lines.append(f"{knee} of {max(counts)} cores of each L3 group are enough: more read less than 3 % more.")
    if limit is not None:
        lines.append(f"theoretical: {_gbs(limit.bytes_per_s)}, {limit.source}")
        lines.append(f"all cores reach {100 * best / limit.bytes_per_s:.0f} % of that")
        if limit.note:
            lines.append(limit.note)
    elif topology.virtual:
        lines.append("theoretical: n/a, a virtual machine does not tell what memory it runs on")
    else:
        lines.append(f"theoretical: n/a for {topology.cpu_name}; root finds out: sudo cpuchat probe")
    return lines


def _gbs(value: float) -> str:
    return f"{value / 1e9:.1f} GB/s"


def _spread(one: ReadBandwidth) -> str:
    middle = statistics.median(one.rounds) / 1e9
    return f"{middle:.1f} ({min(one.rounds) / 1e9:.1f}–{max(one.rounds) / 1e9:.1f})"


def _json(topology: Topology, found: Survey, limit: Theoretical | None) -> dict[str, Any]:
    import dataclasses

    def plain(one: ReadBandwidth | None) -> dict[str, Any] | None:
        return {**dataclasses.asdict(one), "median": statistics.median(one.rounds)} if one is not None else None

    return {
        "machine": topology.name,
        "virtual": topology.virtual,
        "memory": found.memory,
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
        "share": found.all_cores.bytes_per_s / limit.bytes_per_s if limit is not None else None,
        "seconds": found.seconds,
        "notes": list(found.notes),
    }
