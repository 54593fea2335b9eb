"""`cpuchat models quantize` and `pair` (which draft models fit a target, and the expected speed-up)."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import click
import msgspec

from cpuchat.base import paths
from cpuchat.base.errors import DraftMismatch, Interrupted, QuantizeFailed, UsageError
from cpuchat.base.text import clean_line
from cpuchat.cli.completion import MODEL, NamesByTab
from cpuchat.cli.models.library import how_to_use
from cpuchat.cli.options import tell_choice
from cpuchat.cli.output import print_json
from cpuchat.cli.terminal import TerminalOutput, echo_paragraph, echo_table
from cpuchat.config import settings
from cpuchat.models.catalog import load_catalog
from cpuchat.models.cpu_modules import engine_cpu
from cpuchat.models.drafts.candidates import DraftCandidate, candidates, check, expected_pair, recommended, target_costs
from cpuchat.models.drafts.pairing import OTHER_DRAFTS, check_files
from cpuchat.models.fit import format_of
from cpuchat.models.gguf.header import read_header, read_model
from cpuchat.models.kernels import chosen_types
from cpuchat.models.library.library import Library, as_typed, short_specs
from cpuchat.models.library.places import only_drafts
from cpuchat.models.machine import Machine, machine_for, this_machine
from cpuchat.models.ollama import file_name
from cpuchat.models.quantize.make import QuantizeJob, QuantizeProgress
from cpuchat.models.quantize.make import quantize as quantize_model
from cpuchat.models.quantize.types import (
    TYPES,
    MatrixTypes,
    QuantizeProcess,
    SpeedHere,
    forecast_type,
    is_folder,
    quant_type,
    source_header,
    speed_here,
    suggested_folder,
    suggested_path,
    typical_speeds,
)
from cpuchat.models.traffic import model_work
from cpuchat.present.models import doubt, here
from cpuchat.telemetry.units import size, time_left

_EPILOG = """\b
Examples:
  cpuchat models quantize ~/models/big-F16.gguf Q4_K_M
  cpuchat models quantize draft-Q8_0.gguf Q8_0 --output-tensor-type Q4_0
  cpuchat models quantize --list

SOURCE is what --model takes. Without OUT the file is named after SOURCE and put beside it; for a SOURCE in the Hugging
Face cache or the store of Ollama, LM Studio or llama.cpp it goes to the first of your folders, or to models/ in the
data folder (~/.local/share/cpuchat). Where SOURCE has TYPE already, only the matrices change whose types
are given. Ctrl+C deletes the partial file."""

_TYPE = NamesByTab(lambda: [one.name for one in TYPES])


@click.command("quantize", epilog=_EPILOG)
@click.argument("source", required=False, type=MODEL)
@click.argument("kind", metavar="[TYPE]", required=False, type=_TYPE)
@click.argument("out", required=False, type=click.Path(path_type=Path))
@click.option("--list", "as_list", is_flag=True, help="List the types: speed here (of SOURCE), and layout at load.")
@click.option(
    "--output-tensor-type", "output", type=_TYPE, metavar="TYPE", help="Of the output matrix, e.g. Q4_0 for drafts."
)
@click.option("--token-embedding-type", "embedding", type=_TYPE, metavar="TYPE", help="Of the token embeddings.")
@click.option("--threads", type=click.IntRange(min=0), default=0, metavar="N", help="Threads; default: one per core.")
@click.option("--allow-requantize", is_flag=True, help="Allow a SOURCE below Q8_0: loses quality twice.")
@click.option("--force", is_flag=True, help="Overwrite OUT.")
def quantize(
    source: str | None, kind: str | None, out: Path | None, as_list: bool, output: str | None, embedding: str | None,
    threads: int, allow_requantize: bool, force: bool,
) -> None:  # fmt: skip
    """Quantize SOURCE (F32, F16, BF16 or Q8_0) to TYPE (Q4_K_M, Q8_0, ...) and write it to OUT, at low priority."""
    library = Library(settings.load().model.folders)
    if as_list:
        return _list_types(library.resolve(source, tell_choice) if source is not None else None)
    if source is None or kind is None:
        missing = "TYPE is" if source else "SOURCE and TYPE are"
        raise UsageError(f"{missing} missing.", "`cpuchat models quantize --list` lists the types.")
    wanted, path = quant_type(kind), library.resolve(source, tell_choice)
    matrices = MatrixTypes(*(quant_type(text).tensor if text else "" for text in (output, embedding)))
    if out is None or is_folder(out):
        out = suggested_path(read_header(path), wanted, out or suggested_folder(path, library), matrices)
    elif out.suffix.lower() != ".gguf":
        raise UsageError(f"Not a model file name: {out}.", "Give one that ends in .gguf.")
    job = QuantizeJob(
        source=path, out=out, type=wanted, matrices=matrices, threads=threads, requantize=allow_requantize, force=force
    )
    terminal = TerminalOutput()
    terminal.note(f"{file_name(path)} → {paths.shown(out)}")

    def show(progress: QuantizeProgress) -> None:
        """`tensor 87 of 291 · 0.5 GB of 1.0 GB written · 34 s left · blk.9.ffn_up.weight`."""
        left = f"{time_left(progress.seconds_left)} · " if progress.seconds_left is not None else ""
        terminal.status(
            f"tensor {progress.done_tensors + 1} of {progress.tensors} · "
            f"{size(progress.bytes_out)} of {size(progress.total_out)} written · {left}{progress.tensor}"
        )

    try:
        made = asyncio.run(quantize_model(job, show))
    except KeyboardInterrupt:
        raise Interrupted("Stopped; the partial file was deleted.") from None
    finally:
        terminal.clear_progress()
    terminal.line(f"{made}  {size(made.stat().st_size)}")
    model = library.at(made)
    assert model is not None
    terminal.note(how_to_use(library.typed_names([model])[0], drafts=only_drafts(model)))


async def _forecasts(path: Path, machine: Machine) -> dict[str, tuple[float, SpeedHere]]:
    """Return bits per weight and speed of a model in each type that it can have, as the app shows them."""
    source, found = await source_header(path), dict[str, tuple[float, SpeedHere]]()
    async with QuantizeProcess() as process:
        for kind in TYPES:
            with contextlib.suppress(QuantizeFailed):
                made = (await forecast_type(process, source, kind)).header
                found[kind.name] = made.bits_per_weight, speed_here(machine, model_work(made), model_work(source))
    return found


def _list_types(source: Path | None) -> None:
    chosen, cpu = settings.load(), engine_cpu()
    machine = machine_for(source, chosen) if source is not None else this_machine(chosen)
    speeds = asyncio.run(_forecasts(source, machine)) if source is not None else typical_speeds(machine)
    ours = chosen_types(cpu)
    rows = [("TYPE", "BITS", "HERE", "AT LOAD", "")]
    for kind in TYPES:
        layout, (bits, speed) = format_of(kind.tensor, cpu, ours), speeds.get(kind.name, (kind.bits, None))
        known = "no SIMD" if kind.tensor in machine.scalar_types else here(speed) if speed else "n/a"
        arranged = layout.words if layout is not None else "as is"
        rows.append((kind.name, f"{bits:.2f}", known, arranged, kind.about))
    echo_table(rows, right=(1, 2), drop=(3, 1))
    click.echo(err=True)
    what = file_name(source) if source is not None else "Q8_0, both of 8B,"
    about = f"HERE: decoding against {what} on this machine; ≈ predicted, else by measured passes of the type"
    for words in filter(None, (about, doubt(machine))):
        echo_paragraph(f"{words[:1].upper()}{words[1:]}.", err=True)


_PAIR_EPILOG = """\b
Examples:
  cpuchat models pair demo demo-draft

TARGET and DRAFT are what --model takes. The speed-up is predicted from the pass costs of the target on this machine,
which are measured when it is loaded with drafting on. `cpuchat bench TARGET --draft-models DRAFT` measures it."""


@click.command("pair", epilog=_PAIR_EPILOG)
@click.argument("target", type=MODEL)
@click.argument("draft", required=False, type=MODEL)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def pair(target: str, draft: str | None, as_json: bool) -> int:
    """Check by headers if DRAFT can draft for TARGET; without DRAFT, list all that can, the catalog's too."""
    chosen = settings.load()
    library = Library(chosen.model.folders)
    path = library.resolve(target, tell_choice)
    if draft is None:
        return _print_candidates(path, library, chosen, as_json=as_json)
    other = library.resolve(draft, tell_choice)
    verdict, expected = check_files(path, other), None
    if verdict.ok:
        expected = expected_pair(read_model(path), read_model(other), target_costs(path), machine_for(path, chosen))
    if as_json:
        facts = {"target": str(path), "draft": str(other), **msgspec.structs.asdict(verdict)}
        print_json({**facts, "expected": msgspec.to_builtins(expected)})
    else:
        can = f"can draft for {file_name(path)}."
        cannot = f"cannot draft for {file_name(path)}: {verdict.reason}."
        click.echo(f"{clean_line(other.name)} {can if verdict.ok else cannot}")
        told = f"Expected: {expected.words}." if expected is not None else OTHER_DRAFTS
        for line in filter(None, (verdict.note, told)):
            click.echo(f"  {line}")
    return 0 if verdict.ok else DraftMismatch.exit_code


def _print_candidates(target: Path, library: Library, chosen: settings.Settings, *, as_json: bool) -> int:
    """List the models here that fit, and those on the hub that the catalog names, which are not checked."""
    header, models, terminal = read_model(target), library.local_models(beside=target), TerminalOutput()
    known = candidates(header, models, load_catalog(), target_costs(target), machine_for(target, chosen))
    found: list[DraftCandidate] = []
    for one in known:
        terminal.status(f"comparing {clean_line(one.name)}")
        found.append(check(one, header))
    terminal.clear_progress()
    specs = dict(zip((model.path for model in models), short_specs(models), strict=True))
    fitting = {specs[one.path]: one for one in found if one.path is not None and one.fits}
    listed, best = fitting | {one.spec: one for one in found if one.path is None}, recommended(found)
    if as_json:
        rows = [
            {
                "spec": spec, "path": str(one.path) if one.path else None, "size": one.size, "name": one.name,
                "fits": one.fits, "expected": msgspec.to_builtins(one.expected), "recommended": one is best,
            }
            for spec, one in listed.items()
        ]  # fmt: skip
        print_json({"target": str(target), "drafts": rows})
    else:
        if not fitting:
            click.echo(f"cpuchat: No smaller local model can draft for {file_name(target)}.", err=True)
        table = [("DRAFT MODEL", "SIZE", "EXPECTED", "")]
        for spec, one in listed.items():
            on_hub = "" if one.path is not None else "on Hugging Face, not checked"
            about = f"{'≈ ' if on_hub else ''}{size(one.size)}" if one.size else ""
            remark = " ".join(filter(None, (on_hub, "← recommended" * (one is best))))
            table.append((as_typed(spec), about, one.expected.words if one.expected.gains else "", remark))
        if listed:
            echo_table(table, right=(1,))
        why_none = (f"No speed-up predicted: {one.expected.why}." for one in listed.values() if not one.expected.gains)
        for note in dict.fromkeys(why_none):
            click.echo()
            echo_paragraph(clean_line(note))
    return 0 if fitting else DraftMismatch.exit_code
