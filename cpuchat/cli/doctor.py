"""`cpuchat doctor`: what limits CPU inference on this machine, on one page."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cpuchat.cli.options import laid_over, model_path
from cpuchat.cli.output import json_line
from cpuchat.cli.terminal import columns
from cpuchat.errors import CpuchatError

if TYPE_CHECKING:
    from cpuchat.hardware.diagnostics.facts import WantedSetup
    from cpuchat.hardware.topology import Topology
    from cpuchat.settings import Settings

ROOT = Path("/")
"""Root of the file system; tests replace it."""

_EPILOG = """\b
Examples:
  cpuchat doctor
  cpuchat doctor --probe
  cpuchat doctor --json | jq '.findings[] | select(.level == "problem")'

Nothing is changed; without --probe nothing is measured.

Exit codes: 0 nothing worse than advice, 1 warnings or problems found, 2 wrong usage or settings, 14 --probe failed."""


@click.command(epilog=_EPILOG, short_help="Check what limits inference speed on this machine.")
@click.option("--probe", is_flag=True, help="Measure the read bandwidth first (up to 15 seconds).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(probe: bool, as_json: bool) -> int:
    """Check what limits inference speed on this machine: each finding with its evidence and the fix."""
    import asyncio

    from cpuchat.cli.engine_info import engine_info
    from cpuchat.hardware.diagnostics.checks import examine
    from cpuchat.hardware.diagnostics.facts import gather_facts
    from cpuchat.hardware.topology import read_topology
    from cpuchat.present.diagnosis import page, page_json

    chosen = laid_over({})
    topology = read_topology(ROOT)
    engine, engine_error, engine_fix = None, "", ""
    try:
        engine = asyncio.run(engine_info())
    except CpuchatError as error:
        engine_error, engine_fix = error.message, error.hint
    wanted = _wanted(chosen)
    found = _measure(topology, wanted) if probe else {}
    facts = gather_facts(
        wanted, engine=engine, engine_error=engine_error, engine_fix=engine_fix, topology=topology, pid=os.getpid(),
        root=ROOT,
    )  # fmt: skip
    facts = dataclasses.replace(facts, **found)
    findings = examine(facts)
    if as_json:
        click.echo(json_line(page_json(facts, findings)))
    else:
        for line in page(facts, findings, columns()):
            click.echo(line)
    return 1 if any(finding.level in ("problem", "warning") for finding in findings) else 0


def _wanted(chosen: Settings) -> WantedSetup:
    """Return what the settings say about the machine, and the model used last."""
    from cpuchat.hardware.diagnostics.facts import WantedSetup
    from cpuchat.models.gguf.header import split_parts

    name, size = "", 0
    if chosen.model.last:
        with contextlib.suppress(CpuchatError, OSError):
            path = model_path(None, chosen)
            name, size = path.name, sum(part.stat().st_size for part in split_parts(path) or [path])
    engine = chosen.engine
    return WantedSetup(cores=engine.cores, threads=engine.threads, memory=engine.memory, model=name, model_bytes=size)


def _measure(topology: Topology, wanted: WantedSetup) -> dict[str, Any]:
    """Measure the bandwidths shown on the page, for the configured cores and policy; {} where these cannot be used
    here, which is then a finding. (Returned in case they cannot be cached.)
    """
    from cpuchat.hardware.bandwidth.peaks import remember
    from cpuchat.hardware.bandwidth.survey import survey
    from cpuchat.hardware.placement.placement import PlacementSpec, place

    try:
        placement = place(topology, PlacementSpec(wanted.cores, memory=wanted.memory, threads=wanted.threads))
    except CpuchatError:
        return {}
    memory = placement.memory.words
    click.echo("cpuchat: measuring the read bandwidth (up to 15 seconds)", err=True)
    found = survey(topology, cpus=placement.cpus, memory=memory, root=ROOT)
    return {"survey": found, "peak": remember(found.all_cores, memory, root=ROOT)}
