"""`cpuchat probe`: measures the read bandwidth of the cores, and what passes of models cost on them."""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING, Any

import click

from cpuchat.cli.options import laid_over, memory_option, setting, stacked
from cpuchat.cli.output import json_line
from cpuchat.cli.terminal import Terminal
from cpuchat.errors import CpuchatError, Interrupted
from cpuchat.present.machine import costs_measured, knee, measured_sets, share_of_peak, theoretical_peak
from cpuchat.present.table import table
from cpuchat.telemetry.units import gigabytes
from cpuchat.text import clean_line

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

Takes up to 40 seconds and up to 4 GB of free memory. The bandwidth is the denominator of bandwidth utilization; all
predicted speeds follow from the passes. Run it on an idle machine.

Exit codes: 0 success, 2 wrong usage or settings, 14 measurement failed, 130 stopped by Ctrl+C."""

_STEADY = 0.9
"""Ratio of the slowest round to the best below which other programs disturbed the measurement."""


@click.command(epilog=_EPILOG, short_help="Measure bandwidth and passes: the basis of all predictions.")
@stacked(
    setting(
        "--cores", "engine.cores", "Cores to measure: auto, all, 0-7, l3:0, node:0, socket:0, or 4/l3.",
        metavar="LIST",
    ),
    memory_option(),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object, in bytes per second."),
)  # fmt: skip
def probe(as_json: bool, **values: Any) -> int:
    """Measure the read bandwidth of one core, one L3 group and all cores, and between NUMA nodes; then passes of small
    models with random weights, in every usual tensor type.

    Decoding reads the whole model for every token, so the bandwidth bounds its speed; the passes tell the rest.
    """
    import asyncio

    from cpuchat.bench.cost_probe import CostProbe, probe_costs
    from cpuchat.hardware.bandwidth.memory_modules import theoretical
    from cpuchat.hardware.bandwidth.survey import survey
    from cpuchat.hardware.placement.placement import PlacementSpec, place
    from cpuchat.hardware.topology import read_topology

    chosen = laid_over(values)
    engine = chosen.engine
    topology = read_topology()
    threads = 0 if values.get("engine__cores") else engine.threads
    spec = PlacementSpec(engine.cores, memory=engine.memory, threads=threads)
    placement = place(topology, spec)
    terminal = Terminal()

    def progress(done: int, total: int, what: str) -> None:
        terminal.status(f"measuring {what} ({done + 1} of {total})")

    try:
        found = survey(topology, progress, cpus=placement.cpus, memory=placement.memory.words)
        costs, problem = None, ""
        if not found.all_cores.disturbed:
            try:
                costs = asyncio.run(probe_costs(CostProbe(spec, progress), placement, found.all_cores.bytes_per_s))
            except Interrupted:
                raise
            except CpuchatError as error:
                problem = f"Passes not measured: {error}"
    finally:
        terminal.clear_progress()
    limit = theoretical(topology)
    if as_json:
        passes = {"passes": costs.n, "error": costs.error} if costs is not None else None
        notes = [*found.notes, *filter(None, [problem])]
        click.echo(json_line(_json(topology, found, limit) | {"costs": passes, "notes": notes}))
        return 0
    click.echo("\n".join(_lines(topology, found, limit)))
    click.echo(f"\n{clean_line(problem) or costs_measured(costs, len(placement.cpus))}")
    return 0


def _lines(topology: Topology, found: Survey, limit: Theoretical | None) -> list[str]:
    lines = [clean_line(topology.name)]
    if topology.virtual:
        lines.append(f"Virtual machine ({clean_line(topology.virtual)}): the topology is unverified")
    rows = [("CORES", "N", "BEST", "MEDIAN (RANGE), GB/s")]
    rows += [
        (name, str(len(one.cpus)), gigabytes(one.bytes_per_s), _spread(one))
        for name, one in measured_sets(found, per_count=True)
    ]
    lines += ["", *table(rows, right=(1, 2))]
    if found.cells:
        lines += ["", *_matrix(found)]
    return [*lines, "", *map(clean_line, (*_conclusions(topology, found, limit), *found.notes))]


def _matrix(found: Survey) -> list[str]:
    """Format the matrix: cores of each node (rows) by memory of each node (columns), in GB/s."""
    matrix = found.matrix
    columns = sorted({far for _, far in matrix})
    rows = [("GB/s", *(f"memory of node {far}" for far in columns))]
    for near in sorted({near for near, _ in matrix}):
        cells = (gigabytes(one.bytes_per_s) if (one := matrix.get((near, far))) else "n/a" for far in columns)
        rows.append((f"cores of node {near}", *cells))
    return table(rows, right=range(1, len(columns) + 1))


def _conclusions(topology: Topology, found: Survey, limit: Theoretical | None) -> list[str]:
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


def _spread(one: ReadBandwidth) -> str:
    low, middle, high = (gigabytes(f(one.rounds)) for f in (min, statistics.median, max))
    return f"{middle} ({low}–{high})"


def _json(topology: Topology, found: Survey, limit: Theoretical | None) -> dict[str, Any]:
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
        "share": share_of_peak(found, limit),
        "seconds": found.seconds,
    }
