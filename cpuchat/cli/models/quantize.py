"""`cpuchat models quantize`: quantize a model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cpuchat import settings
from cpuchat.cli.options import file_option
from cpuchat.cli.output import json_line
from cpuchat.cli.terminal import Terminal, echo_paragraph, echo_table
from cpuchat.errors import DiskFull, Interrupted, QuantizeFailed, UsageError
from cpuchat.hardware.instructions import instructions
from cpuchat.models.gguf.header import read_header, read_model
from cpuchat.models.library.library import Library
from cpuchat.models.machine import this_machine
from cpuchat.models.quantize.types import TYPES, quant_type
from cpuchat.models.repack import advice, format_of
from cpuchat.paths import made_models_dir, shown
from cpuchat.present.prediction import verdict
from cpuchat.telemetry import units
from cpuchat.telemetry.units import size, time_left

if TYPE_CHECKING:
    from cpuchat.hardware.instructions import Instructions
    from cpuchat.models.quantize.make import Job, QuantizeProgress
    from cpuchat.models.quantize.types import QuantType

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
@file_option("--imatrix", help="Importance matrix from llama-imatrix; required for the smallest types.")
@click.option("--threads", type=click.IntRange(min=0), default=0, metavar="N", help="Threads; default: one per core.")
@click.option("--allow-requantize", is_flag=True, help="Allow a SOURCE below Q8_0: loses quality twice.")
@click.option("--force", is_flag=True, help="Overwrite OUT.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, sizes in bytes.")
def quantize(
    source: str | None,
    kind: str | None,
    out: Path | None,
    as_list: bool,
    imatrix: Path | None,
    threads: int,
    allow_requantize: bool,
    force: bool,
    as_json: bool,
) -> int:
    """Quantize SOURCE (F32, F16, BF16 or Q8_0) to TYPE (Q4_K_M, Q8_0, ...) and write it to OUT.

    Runs at low priority in its own process.
    """
    if as_list:
        return _list_types(source, as_json=as_json)
    if source is None or kind is None:
        raise UsageError("SOURCE and TYPE are missing.", "`cpuchat models quantize --list` lists the types.")
    from cpuchat.models.quantize.make import Job
    from cpuchat.models.quantize.place import is_folder, suggested_folder, suggested_path

    wanted, library = quant_type(kind), _library()
    path = library.resolve(source)
    if out is None or is_folder(out):
        out = suggested_path(read_header(path), wanted, out or suggested_folder(path, library))
    elif out.suffix.lower() != ".gguf":
        raise UsageError(f"Not a model file name: {out}.", "Give one that ends in .gguf.")
    job = Job(
        source=path, out=out, type=wanted, threads=threads, imatrix=imatrix, requantize=allow_requantize, force=force
    )  # fmt: skip
    return _make(job, library, as_json=as_json)


def _library() -> Library:
    return Library(settings.load().model.folders)


def _make(job: Job, library: Library, *, as_json: bool) -> int:
    from cpuchat.models.library.places import is_inside
    from cpuchat.models.quantize.make import quantize

    terminal = Terminal(quiet=as_json)
    terminal.note(f"{job.source.name} → {job.out.name}")
    try:
        path = asyncio.run(quantize(job, lambda progress: terminal.status(_status(progress))))
    except KeyboardInterrupt:
        raise Interrupted("Stopped; the partial file was deleted.") from None
    finally:
        terminal.clear_progress()
    n_bytes = path.stat().st_size
    if as_json:
        click.echo(json_line({"path": str(path), "type": job.type.name, "size": n_bytes}))
        return 0
    terminal.line(f"{path}  {size(n_bytes)}")
    terminal.note(_repacking(job.type))
    if not any(is_inside(path.parent, folder) for folder in library.folders):
        terminal.note("`cpuchat models list` does not search this folder: add it to [model] folders in config.toml.")
    return 0


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


def _repacking(kind: QuantType) -> str:
    """Return one sentence on how it is repacked at load on this CPU."""
    layout = format_of(kind.tensor, instructions())
    return f"At load on this CPU, {kind.tensor} is {layout.words if layout is not None else 'used as it is'}."


def _list_types(spec: str | None, *, as_json: bool) -> int:
    cpu = instructions()
    path = _library().resolve(spec) if spec is not None else None
    rows = asyncio.run(_forecasts(path, cpu)) if path is not None else _types(cpu)
    if as_json:
        click.echo(json_line(rows))
        return 0
    limit = read_model(path).file_size if path is not None else 0
    listed = [row for row in rows if row.get("size", 0) < limit] if path is not None else rows
    headings = [("TYPE", "BITS", "SIZE", "FIT", "SPEED", "tok/s", "AT LOAD", "")]
    echo_table(headings + [_cells(row) for row in listed], right=(1, 2, 4, 5))
    click.echo()
    notes = [advice(cpu)]
    if spec is not None:
        notes.append("Types that would not make the file smaller are left out.")
        if any(row.get("requantizes") for row in listed):
            notes.append("SOURCE is already quantized; quantizing again loses more quality. Use F16, BF16 or Q8_0.")
        notes.append("SPEED is relative to SOURCE, where decoding is memory-bound.")
    for note in notes:
        echo_paragraph(note)
    return 0


def _types(cpu: Instructions) -> list[dict[str, Any]]:
    return [
        {
            "type": kind.name,
            "bits_per_weight": kind.bits,
            "needs_imatrix": kind.needs_imatrix,
            "at_load": layout.words if (layout := format_of(kind.tensor, cpu)) is not None else "as is",
            "about": kind.about,
        }
        for kind in TYPES
    ]


async def _forecasts(path: Path, cpu: Instructions) -> list[dict[str, Any]]:
    """Return `_types` with the forecast for the model; bits per weight are those of the file."""
    from cpuchat.models.quantize.forecast import forecast_type, source_header
    from cpuchat.models.quantize.process import QuantizeProcess
    from cpuchat.present.quantize import predict_type

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
                "needs_imatrix": forecast.needs_imatrix,
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
    if row["needs_imatrix"]:
        notes.append("needs --imatrix")
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
