"""`cpuchat models quantize` and `pair` (which draft models fit a target, and the expected speed-up)."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from cpuchat.base.errors import DiskFull, DraftMismatch, Interrupted, QuantizeFailed, UsageError
from cpuchat.base.paths import made_models_dir, shown
from cpuchat.base.text import clean_line
from cpuchat.cli.models.library import specs_of
from cpuchat.cli.output import print_json
from cpuchat.cli.terminal import TerminalOutput, echo_paragraph, echo_table, is_terminal
from cpuchat.config import settings
from cpuchat.config.settings import Settings
from cpuchat.hardware.topology import Instructions
from cpuchat.models.catalog import load_catalog
from cpuchat.models.cpu_modules import engine_cpu
from cpuchat.models.drafts.candidates import (
    DraftCandidate,
    candidates,
    check,
    expected_pair,
    recommended,
    target_costs,
)
from cpuchat.models.drafts.pairing import check_files, require_pair, suggestion
from cpuchat.models.fit import format_of
from cpuchat.models.gguf.header import GGUFHeader, read_header, read_model
from cpuchat.models.hub.client import Hub
from cpuchat.models.kernels import chosen_types
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import is_inside
from cpuchat.models.machine import machine_for, this_machine
from cpuchat.models.quantize.make import QuantizeJob, QuantizeProgress
from cpuchat.models.quantize.make import quantize as quantize_model
from cpuchat.models.quantize.types import (
    TYPES,
    QuantizeProcess,
    forecast_type,
    is_folder,
    quant_type,
    source_header,
    suggested_folder,
    suggested_path,
)
from cpuchat.present.models import predict_type, verdict
from cpuchat.present.table import table
from cpuchat.telemetry import units
from cpuchat.telemetry.units import size, time_left

_EPILOG = f"""\b
Examples:
  cpuchat models quantize ~/models/big-F16.gguf Q4_K_M
  cpuchat models quantize owner/repo:F16 Q4_0 /data/small.gguf --threads 8
  cpuchat models quantize --list ~/models/big-F16.gguf

SOURCE is what --model takes. Without OUT the file is named after SOURCE and put beside it; for a SOURCE in the Hugging
Face cache it goes to the first of your folders, or to {shown(made_models_dir())}.
OUT appears only once it is complete; Ctrl+C deletes the partial file.

Exit codes: 2 wrong usage or settings, 3 no such model, 4 damaged model, {DiskFull.exit_code} disk full,
{QuantizeFailed.exit_code} llama.cpp failed, {Interrupted.exit_code} stopped by Ctrl+C."""


@click.command("quantize", epilog=_EPILOG)
@click.argument("source", required=False)
@click.argument("kind", metavar="[TYPE]", required=False)
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option(
    "--list", "as_list", is_flag=True,
    help="List the types; with SOURCE also size, fit, speed and repacking here.",
)  # fmt: skip
@click.option("--threads", type=click.IntRange(min=0), default=0, metavar="N", help="Threads; default: one per core.")
@click.option("--allow-requantize", is_flag=True, help="Allow a SOURCE below Q8_0: loses quality twice.")
@click.option("--force", is_flag=True, help="Overwrite OUT.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, sizes in bytes.")
def quantize(
    source: str | None,
    kind: str | None,
    out: Path | None,
    as_list: bool,
    threads: int,
    allow_requantize: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Quantize SOURCE (F32, F16, BF16 or Q8_0) to TYPE (Q4_K_M, Q8_0, ...) and write it to OUT.

    Runs at low priority in its own process.
    """
    if as_list:
        return _list_types(source, as_json=as_json)
    if source is None or kind is None:
        raise UsageError("SOURCE and TYPE are missing.", "`cpuchat models quantize --list` lists the types.")
    wanted, library = quant_type(kind), _library()
    path = library.resolve(source)
    if out is None or is_folder(out):
        out = suggested_path(read_header(path), wanted, out or suggested_folder(path, library))
    elif out.suffix.lower() != ".gguf":
        raise UsageError(f"Not a model file name: {out}.", "Give one that ends in .gguf.")
    job = QuantizeJob(source=path, out=out, type=wanted, threads=threads, requantize=allow_requantize, force=force)
    return _make(job, library, as_json=as_json)


def _library() -> Library:
    return Library(settings.load().model.folders)


def _make(job: QuantizeJob, library: Library, *, as_json: bool) -> None:
    terminal = TerminalOutput(quiet=as_json)
    terminal.note(f"{job.source.name} → {job.out.name}")
    try:
        path = asyncio.run(quantize_model(job, lambda progress: terminal.status(_status(progress))))
    except KeyboardInterrupt:
        raise Interrupted("Stopped; the partial file was deleted.") from None
    finally:
        terminal.clear_progress()
    n_bytes = path.stat().st_size
    if as_json:
        return print_json({"path": str(path), "type": job.type.name, "size": n_bytes})
    terminal.line(f"{path}  {size(n_bytes)}")
    layout, kind = format_of(job.type.tensor, cpu := engine_cpu(), chosen_types(cpu)), job.type.tensor
    terminal.note(f"At load on this CPU, {kind} is {layout.words if layout is not None else 'used as it is'}.")
    if not any(is_inside(path.parent, folder) for folder in library.folders):
        terminal.note("`cpuchat models list` does not search this folder: add it to [model] folders in config.toml.")


def _status(progress: QuantizeProgress) -> str:
    """`tensor 87 of 291 · 1.0 GB read · 0.5 GB of 1.0 GB written · 34 s left · blk.9.ffn_up.weight`."""
    parts = [
        f"tensor {progress.done_tensors + 1} of {progress.tensors}",
        f"{size(progress.bytes_in)} read",
        f"{size(progress.bytes_out)} of {size(progress.total_out)} written",
    ]
    if progress.seconds_left is not None:
        parts.append(time_left(progress.seconds_left))
    return " · ".join([*parts, progress.tensor])


def _list_types(spec: str | None, *, as_json: bool) -> None:
    cpu = engine_cpu()
    path = _library().resolve(spec) if spec is not None else None
    rows = asyncio.run(_forecasts(path, cpu)) if path is not None else _types(cpu)
    if as_json:
        return print_json(rows)
    limit = read_model(path).file_size if path is not None else 0
    listed = [row for row in rows if row.get("size", 0) < limit] if path is not None else rows
    headings = [("TYPE", "BITS", "SIZE", "FIT", "SPEED", "tok/s", "AT LOAD", "")]
    echo_table(headings + [_cells(row) for row in listed], right=(1, 2, 4, 5))
    if spec is None:
        return None
    click.echo()
    echo_paragraph("Types that would not make the file smaller are left out.")
    if any(row.get("requantizes") for row in listed):
        echo_paragraph("SOURCE is already quantized; quantizing again loses more quality. Use F16, BF16 or Q8_0.")
    return echo_paragraph("SPEED is relative to SOURCE, where decoding is memory-bound.")


def _types(cpu: Instructions) -> list[dict[str, Any]]:
    ours = chosen_types(cpu)
    return [
        {
            "type": kind.name,
            "bits_per_weight": kind.bits,
            "at_load": layout.words if (layout := format_of(kind.tensor, cpu, ours)) is not None else "as is",
            "about": kind.about,
        }
        for kind in TYPES
    ]


async def _forecasts(path: Path, cpu: Instructions) -> list[dict[str, Any]]:
    """Return `_types` with the forecast for the model; bits per weight are those of the file."""
    config = settings.load()
    machine, options = this_machine(config), config.engine.load_options()
    source = await source_header(path)
    rows: list[dict[str, Any]] = []
    async with QuantizeProcess() as process:
        for kind, row in zip(TYPES, _types(cpu), strict=True):
            try:
                forecast = await forecast_type(process, source, kind)
            except QuantizeFailed as error:  # for example, rows of a length that this type does not support
                rows.append(row | {"problem": error.message})
                continue
            found = predict_type(source, forecast, machine, options)
            figures = {
                "bits_per_weight": forecast.bits,
                "size": forecast.file_size,
                "requantizes": list(forecast.lossy),
                "speed_up": found.speed_up,
                "fit": verdict(found.prediction),
                "tok_s": found.prediction.tok_s,
                "at_load": found.arrangement,
            }
            rows.append(row | figures)
    if all("problem" in row for row in rows):
        raise QuantizeFailed(rows[0]["problem"])
    return rows


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    notes = [row.get("problem") or row["about"]]
    if row.get("requantizes"):
        notes.append(f"requantized from {', '.join(row['requantizes'])}: needs --allow-requantize")
    return (
        row["type"],
        f"{row['bits_per_weight']:.2f}",
        size(row["size"]) if "size" in row else "",
        row.get("fit", ""),
        units.factor(row["speed_up"]) if "speed_up" in row else "",
        f"≈{units.rate(row['tok_s'])}" if row.get("tok_s") else "",
        row["at_load"],
        "; ".join(notes),
    )


_PAIR_EPILOG = f"""\b
Examples:
  cpuchat models pair demo demo-draft
  cpuchat models pair ~/models/big.gguf
  cpuchat models pair ~/models/big.gguf --hub
  cpuchat models pair ~/models/big.gguf small.gguf --measure

TARGET and DRAFT are what --model takes. The speed-up is predicted from the pass costs of the target on this machine,
which are measured when it is loaded with drafting on.

--measure answers prompts of four kinds without drafts and with adaptive depth, and reports acceptance, tokens per pass
and speed-up. --keep makes DRAFT the draft model in the settings if it is worth keeping.

Exit codes: 0 the draft fits (without DRAFT: at least one does), {DraftMismatch.exit_code} it does not, 3 no such model,
4 damaged model, 13 not measured, 130 stopped by Ctrl+C."""


@click.command("pair", epilog=_PAIR_EPILOG)
@click.argument("target")
@click.argument("draft", required=False)
@click.option("--hub", "ask_hub", is_flag=True, help="Also check those on Hugging Face: reads a few MB of each.")
@click.option("--measure", is_flag=True, help="Measure acceptance and speed-up of the pair; takes minutes.")
@click.option("--keep", is_flag=True, help="With --measure: use DRAFT from now on if it is worth keeping.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def pair(target: str, draft: str | None, ask_hub: bool, measure: bool, keep: bool, as_json: bool) -> int | None:
    """Check whether DRAFT can draft for TARGET; without DRAFT, list all draft models that can, including the catalog's.

    A draft model must have the target's vocabulary. Without --measure only headers are read.
    """
    chosen = settings.load()
    library = Library(chosen.model.folders)
    path = library.resolve(target)
    if measure and draft is None:
        raise UsageError("--measure needs a DRAFT.", "`cpuchat models pair TARGET` lists those that fit.")
    if keep and not measure:
        raise UsageError("--keep needs --measure.", "To use DRAFT without measuring: `cpuchat --draft-model DRAFT`.")
    if measure and draft is not None:
        return _measure(path, library.resolve(draft), library, chosen, keep=keep, as_json=as_json)
    if draft is None:
        return _print_candidates(path, library, chosen, ask_hub=ask_hub, as_json=as_json)
    return _print_verdict(path, library.resolve(draft), library, chosen, as_json=as_json)


def _print_verdict(target: Path, draft: Path, library: Library, chosen: Settings, *, as_json: bool) -> int:
    verdict = check_files(target, draft, library=library)
    expected = None
    if verdict.ok:
        costs, machine = target_costs(target), machine_for(target, chosen)
        expected = expected_pair(read_model(target), read_model(draft), costs, machine)
    if as_json:
        facts = {"target": str(target), "draft": str(draft), **msgspec.structs.asdict(verdict)}
        print_json({**facts, "expected": msgspec.to_builtins(expected)})
    elif verdict.ok:
        click.echo(f"{clean_line(draft.name)} can draft for {clean_line(target.name)}.")
    else:
        click.echo(f"{clean_line(draft.name)} cannot draft for {clean_line(target.name)}: {verdict.reason}.")
    for line in (verdict.note, verdict.hint, f"Expected: {expected.words}." if expected is not None else ""):
        if line and not as_json:
            click.echo(f"  {line}")
    return 0 if verdict.ok else DraftMismatch.exit_code


def _measure(target: Path, draft: Path, library: Library, chosen: Settings, *, keep: bool, as_json: bool) -> None:
    """Measure a pair and offer to keep the draft model. Raises DraftMismatch, Interrupted, MeasureFailed."""
    from cpuchat.bench.run import pair_bench, pair_result
    from cpuchat.cli.bench import run_bench
    from cpuchat.models.drafts.choice import ChosenDrafts
    from cpuchat.present import bench as words

    require_pair(target, draft, library)
    report, _ = run_bench(lambda tell: pair_bench(target, draft, chosen, tell))
    found = pair_result(report.results)
    asks = not as_json and is_terminal(sys.stdin) and is_terminal(sys.stderr)
    kept = found.worth_keeping and (keep or (asks and click.confirm(f"Make {draft.name} the draft model?", err=True)))
    if kept:
        ChosenDrafts().put(target, str(draft))
        settings.update({"speculation": {"draft_model": "", "depth": 0, "drafters": "auto"}})
    if as_json:
        facts = {**msgspec.to_builtins(found), "speed_up": found.speed_up}
        facts["worth_keeping"] = found.worth_keeping
        return print_json({"target": str(target), "draft": str(draft), **facts, "kept": kept})
    for line in table([words.PAIR_HEADINGS, *words.pair_rows(found)], right=(1, 2, 3, 4)):
        click.echo(line)
    click.echo(f"\n{words.pair_verdict(found)}")
    if kept:
        click.echo(f"{draft.name} is now the draft model of {target.name}.")
    elif found.worth_keeping:
        click.echo(f"Add --keep to make it the draft model of {target.name}.")


def _print_candidates(target: Path, library: Library, chosen: Settings, *, ask_hub: bool, as_json: bool) -> int:
    header, costs, models = read_model(target), target_costs(target), library.local_models(beside=target)
    found = candidates(header, models, load_catalog(), costs, machine_for(target, chosen))
    found = _checked(found, header, ask_hub=ask_hub)
    best = recommended(found)
    specs = dict(zip((model.path for model in models), specs_of(models), strict=True))
    here = {specs[one.path]: one for one in found if one.path is not None and one.fits}
    on_hub = {one.spec: one for one in found if one.path is None}
    if as_json:
        _print_json(target, here, on_hub, best)
    else:
        _print_tables(target, here, on_hub, best)
    return 0 if here else DraftMismatch.exit_code


def _checked(found: list[DraftCandidate], target: GGUFHeader, *, ask_hub: bool) -> list[DraftCandidate]:
    hub, terminal = Hub() if ask_hub else None, TerminalOutput()
    checked: list[DraftCandidate] = []
    try:
        for one in found:
            terminal.status(f"comparing {clean_line(one.name)}")
            checked.append(check(one, target, hub))
    finally:
        terminal.clear_progress()
    return checked


def _print_tables(
    target: Path, here: dict[str, DraftCandidate], on_hub: dict[str, DraftCandidate], best: DraftCandidate | None
) -> None:
    headings = ("DRAFT MODEL", "SIZE", "EXPECTED", "")
    if here:
        rows = [(spec, size(one.size), _gain(one), _mark(one, best)) for spec, one in here.items()]
        echo_table([headings, *rows], right=(1,))
    else:
        click.echo(f"cpuchat: No smaller local model can draft for {clean_line(target.name)}.", err=True)
        if not on_hub:
            click.echo(f"  {suggestion(target, [])}", err=True)
    if on_hub:
        if here:
            click.echo()
        click.echo("On Hugging Face, recommended by the catalog:")
        rows = [(spec, _size(one), _gain(one), f"{_fit(one)} {_mark(one, best)}") for spec, one in on_hub.items()]
        echo_table([headings, *rows], right=(1,))
    notes = [_note(spec, one) for spec, one in on_hub.items()]
    shown = [one for one in (*here.values(), *on_hub.values()) if one.fits is not False]
    notes += [f"No speed-up predicted: {one.expected.why}." for one in shown if not one.expected.gains]
    for note in dict.fromkeys(filter(None, notes)):
        click.echo()
        echo_paragraph(clean_line(note))


def _size(candidate: DraftCandidate) -> str:
    """Return the size of one on the hub: from its repository, before that approximately from the catalog."""
    if not candidate.size:
        return ""
    return f"{'≈ ' if candidate.verdict is None else ''}{size(candidate.size)}"


def _gain(candidate: DraftCandidate) -> str:
    """Return the speed-up; "" where it is not known, or the model does not fit."""
    return candidate.expected.words if candidate.expected.gains and candidate.fits is not False else ""


def _mark(candidate: DraftCandidate, best: DraftCandidate | None) -> str:
    return "← recommended" if candidate is best else ""


def _fit(candidate: DraftCandidate) -> str:
    if candidate.verdict is None:
        return "not checked"
    return "fits" if candidate.verdict.ok else "does not fit"


def _note(spec: str, candidate: DraftCandidate) -> str:
    """Return why it does not fit or was not checked; "" when it fits."""
    if candidate.failed:
        return f"Not checked: {candidate.failed}"
    if candidate.verdict is None:
        return "Not checked: add --hub to read a few MB of each."
    return "" if candidate.verdict.ok else f"{spec} does not fit: {candidate.verdict.reason}."


def _print_json(
    target: Path, here: dict[str, DraftCandidate], on_hub: dict[str, DraftCandidate], best: DraftCandidate | None
) -> None:
    def row(spec: str, one: DraftCandidate) -> dict[str, Any]:
        return {
            "spec": spec,
            "path": str(one.path) if one.path is not None else None,
            "size": one.size,
            "name": one.name,
            "named_by_catalog": one.named,
            "fits": one.fits,
            "reason": one.verdict.reason if one.verdict is not None else one.failed,
            "expected": msgspec.to_builtins(one.expected),
            "recommended": one is best,
        }

    rows = [[row(spec, one) for spec, one in group.items()] for group in (here, on_hub)]
    print_json({"target": str(target), "drafts": rows[0], "hub": rows[1]})
