"""The commands about the machine: `probe` and `doctor`."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cpuchat.base.errors import CpuchatError, Disturbed, Interrupted, MeasureFailed
from cpuchat.base.text import clean_line
from cpuchat.cli.options import laid_over, model_path, setting
from cpuchat.cli.output import print_json
from cpuchat.cli.terminal import TerminalOutput, columns, paragraph
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import Topology, read_topology
from cpuchat.present.table import table
from cpuchat.telemetry.units import bandwidth, gigabytes

if TYPE_CHECKING:
    from cpuchat.hardware.bandwidth.theoretical import Theoretical
    from cpuchat.measure.peak import ReadBandwidth

ROOT = Path("/")
"""Root of the file system; tests replace it."""

_PROBE_EPILOG = """\b
Examples:
  cpuchat probe
  cpuchat probe --cores node:0 --memory-policy bind:1    node 0 reads node 1

Takes about 30 seconds and up to 4 GB of free memory. The bandwidth is the denominator of bandwidth utilization; all
predicted speeds follow from the passes. Run it on an idle machine: exit code 27, and `caveat` in --json, tell that
other programs were using the cores."""

_PATIENCE = 10.0
"""Seconds for which a window of the app may go on measuring."""


@click.command(epilog=_PROBE_EPILOG)
@setting("engine.cores", "Cores to measure: auto, all, 0-7, l3:0, node:0, socket:0, or 4/l3.")
@setting("engine.memory_policy")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, in bytes per second.")
def probe(as_json: bool, **values: Any) -> int:
    """Measure the read bandwidth of one core, one L3 group and all cores; then passes of small models with random
    weights, in every usual tensor type.

    Decoding reads the whole model for every token, so the bandwidth bounds its speed; the passes tell the rest."""
    import asyncio

    from cpuchat.bench.cost_probe import CostProbe, probe_costs
    from cpuchat.hardware.bandwidth.theoretical import theoretical
    from cpuchat.measure.peak import known, one_at_a_time, survey
    from cpuchat.present.machine import costs_measured, noisy_probe, share_of_peak

    chosen = laid_over(values)
    engine = chosen.engine
    topology = read_topology(ROOT)
    threads = 0 if values.get("engine__cores") else engine.threads
    is_saved = not (values.get("engine__cores") or values.get("engine__memory_policy"))
    spec = PlacementSpec(engine.cores, memory_policy=engine.memory_policy, threads=threads, is_saved=is_saved)
    placement = place(topology, spec)
    terminal = TerminalOutput()

    def progress(done: int, total: int, what: str) -> None:
        terminal.status(f"measuring {what} ({done + 1} of {total})")

    try:
        with contextlib.ExitStack() as stack:  # windows of the app wait
            if not stack.enter_context(one_at_a_time()):
                terminal.status("waiting for a window of cpuchat that is measuring")
                if not stack.enter_context(one_at_a_time(_PATIENCE)):
                    raise MeasureFailed("A window of cpuchat is measuring just now.", "Close it, or try again later.")
            found = survey(topology, progress, cpus=placement.cpus, policy=placement.memory_policy.words)
            n_passes, problem, caveat = 0, "", noisy_probe(found["all_cores"])
            if not caveat:
                try:
                    n_passes = asyncio.run(probe_costs(CostProbe(spec, progress), placement))
                except Interrupted:
                    raise
                except CpuchatError as error:
                    problem = f"Passes not measured: {error}"
                caveat = "" if n_passes or problem else noisy_probe()
    finally:
        terminal.clear_progress()
    limit, notes = theoretical(topology), [problem] if problem else []
    if as_json:
        policy, costs = placement.memory_policy.words, {"passes": n_passes} if n_passes else None
        read = {name: dataclasses.asdict(one) for name, one in found.items()}
        print_json({
            "caveat": caveat or None, "machine": topology.name, "virtual": topology.virtual, "memory_policy": policy,
            **read, "theoretical": dataclasses.asdict(limit) if limit is not None else None,
            "share": share_of_peak(found["all_cores"], limit), "costs": costs, "notes": notes,
        })  # fmt: skip
        return Disturbed.exit_code if caveat else 0
    click.echo("\n".join([*([*paragraph(caveat), ""] if caveat else []), *_probe_lines(topology, found, limit)]))
    kept = known(placement.cpus, placement.memory_policy.words)
    if kept is not None and kept.bytes_per_s > found["all_cores"].bytes_per_s:
        most = f"{'at least ' if kept.at_least else ''}{bandwidth(kept.bytes_per_s)} GB/s"
        click.echo(f"In use is the most that was read here: {most}")
    if problem or n_passes:
        click.echo(f"\n{clean_line(problem) or costs_measured(n_passes, len(placement.cpus))}")
    return Disturbed.exit_code if caveat else 0


def _probe_lines(topology: Topology, found: dict[str, ReadBandwidth], limit: Theoretical | None) -> list[str]:
    from cpuchat.present.machine import measured_sets, share_of_peak, theoretical_peak

    lines = [clean_line(topology.name)]
    if topology.virtual:
        lines.append(f"Virtual machine ({clean_line(topology.virtual)}): the topology is unverified")
    rows = [("CORES", "N", "BEST", "MEDIAN (RANGE), GB/s")]
    for name, one in measured_sets(**found):
        low, middle, high = (gigabytes(figure(one.rounds)) for figure in (min, statistics.median, max))
        rows.append((name, str(len(one.cpus)), gigabytes(one.bytes_per_s), f"{middle} ({low}–{high})"))
    lines += ["", *table(rows, right=(1, 2)), ""]
    lines.append(clean_line(f"Theoretical peak: {theoretical_peak(topology, limit)}"))
    if (share := share_of_peak(found["all_cores"], limit)) is not None:
        lines.append(f"All cores reach {100 * share:.0f} % of it")
    return lines


_DOCTOR_EPILOG = """Nothing is changed, and nothing is measured: `cpuchat probe` does that. Exit code 1 if there is a
problem, 0 with warnings and advice."""


@click.command(epilog=_DOCTOR_EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> int:
    """Check what limits inference speed on this machine: each finding with its evidence and the fix; and the settings
    that only root can change, with the lines that change them and take them back."""
    import asyncio

    from cpuchat.cli.version import engine_info
    from cpuchat.hardware.diagnostics import examine, gather_facts
    from cpuchat.hardware.process import BusyPrograms
    from cpuchat.measure.peak import known_of
    from cpuchat.models.gguf.header import model_size
    from cpuchat.models.library.library import Library
    from cpuchat.models.ollama import file_name
    from cpuchat.present.machine import Row, model_here, page, page_json

    chosen, topology, others = laid_over({}), read_topology(ROOT), BusyPrograms(ROOT)
    others.names()  # since when they are counted
    engine, engine_error = None, None
    try:
        engine = asyncio.run(engine_info(chosen.engine.cpu_module))
    except CpuchatError as error:
        engine_error = error
    name, size, model, setup = "", 0, list[Row](), chosen.engine
    if chosen.model.last:
        with contextlib.suppress(CpuchatError, OSError):
            path, library = model_path(None, chosen), Library(chosen.model.folders)
            name, size = file_name(path), model_size(path)
            here = model_here(path, chosen, library)
            model = [*here.rows.items()] if here is not None else model
    spec = PlacementSpec(setup.cores, memory_policy=setup.memory_policy, threads=setup.threads)
    facts = gather_facts(
        spec, model=name, model_bytes=size, engine=engine, engine_error=engine_error, topology=topology,
        known=known_of, root=ROOT,
    )  # fmt: skip
    findings = examine(dataclasses.replace(facts, others=others.names()))
    if as_json:
        print_json(page_json(facts, findings, model))
    else:
        for line in page(facts, findings, columns(), model):
            click.echo(line)
    return int(any(finding.level == "problem" for finding in findings))
