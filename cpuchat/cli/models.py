"""`cpuchat models`: what is on this machine, which draft fits which model, synthetic models for measuring."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cpuchat.errors import CpuchatError, DraftMismatch, UsageError

if TYPE_CHECKING:
    from cpuchat.models.library import Library, LocalModel

_LIST_EPILOG = """The last column is what --model takes. More folders are searched if config.toml names them:

\b
  [model]
  folders = ["~/models"]"""

_PAIR_EPILOG = f"""\b
Examples:
  cpuchat models pair demo demo-draft
  cpuchat models pair ~/models/big.gguf

TARGET and DRAFT are what --model takes. Exit codes: 0 the draft fits (without DRAFT: there is one),
{DraftMismatch.exit_code} it does not, 3 no such model, 4 damaged model."""

_SYNTHETIC_EPILOG = """\b
Examples:
  cpuchat models synthetic 1.5b m.gguf --quant Q4_K_M
  cpuchat models synthetic 70b m.gguf --layers 4
  cpuchat models synthetic 1.5b t.gguf --pair-alpha 0.8 --draft-out d.gguf"""


@click.group(short_help="List models, pair drafts with them; write synthetic ones.")
def models() -> None:
    """The GGUF models of this machine."""


@models.command("list", epilog=_LIST_EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, sizes in bytes.")
def list_models(as_json: bool) -> int:
    """List the models of the package, the Hugging Face cache and your folders."""
    import msgspec

    from cpuchat import settings
    from cpuchat.cli.render import json_line
    from cpuchat.models.library import Library
    from cpuchat.text import clean

    found = Library(settings.load().model.folders).local_models()
    specs = specs_of(found)
    if as_json:
        rows = [
            {**msgspec.structs.asdict(model), "path": str(model.path), "spec": spec}
            for model, spec in zip(found, specs, strict=True)
        ]
        print(json_line(rows))
        return 0
    if not found:
        click.echo("cpuchat: no models found; download one, for instance with `hf download OWNER/REPO`.", err=True)
        return 0
    table = [("NAME", "QUANT", "PARAMS", "SIZE", "--model"), *map(_row, found, specs)]
    cleaned = [[clean(cell).replace("\n", " ") for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*cleaned, strict=True)]
    for name, quant, params, size, spec in cleaned:
        fixed = f"{name:<{widths[0]}}  {quant:<{widths[1]}}  {params:>{widths[2]}}  {size:>{widths[3]}}"
        click.echo(f"{fixed}  {spec}")
    return 0


@models.command("pair", epilog=_PAIR_EPILOG)
@click.argument("target")
@click.argument("draft", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def pair(target: str, draft: str | None, as_json: bool) -> int:
    """Say whether DRAFT can draft for TARGET; without DRAFT, list the models of this machine that can.

    A draft model must have the target's vocabulary. Only the headers of the files are read.
    """
    from cpuchat import settings
    from cpuchat.models.library import Library

    library = Library(settings.load().model.folders)
    path = library.resolve(target)
    if draft is None:
        return _print_fitting(path, library, as_json=as_json)
    return _print_verdict(path, library.resolve(draft), library, as_json=as_json)


def _print_verdict(target: Path, draft: Path, library: Library, *, as_json: bool) -> int:
    import msgspec

    from cpuchat.cli.render import json_line
    from cpuchat.models.pairing import check_files
    from cpuchat.text import clean_line

    verdict = check_files(target, draft, library=library)
    if as_json:
        click.echo(json_line({"target": str(target), "draft": str(draft), **msgspec.structs.asdict(verdict)}))
    elif verdict.ok:
        click.echo(f"{clean_line(draft.name)} can draft for {clean_line(target.name)}.")
    else:
        click.echo(f"{clean_line(draft.name)} cannot draft for {clean_line(target.name)}: {verdict.reason}.")
    for line in (verdict.note, verdict.hint):
        if line and not as_json:
            click.echo(f"  {line}")
    return 0 if verdict.ok else DraftMismatch.exit_code


def _print_fitting(target: Path, library: Library, *, as_json: bool) -> int:
    from cpuchat.cli.render import json_line, size
    from cpuchat.models.pairing import fitting_drafts, suggestion
    from cpuchat.text import clean_line

    found = fitting_drafts(target, library)
    if as_json:
        rows = [
            {"spec": spec, "path": str(m.path), "size": m.size} for m, spec in zip(found, specs_of(found), strict=True)
        ]
        click.echo(json_line({"target": str(target), "drafts": rows}))
    else:
        for model, spec in zip(found, specs_of(found), strict=True):
            click.echo(f"{clean_line(spec)}  {size(model.size)}")
        if not found:
            click.echo(f"cpuchat: No smaller model here can draft for {clean_line(target.name)}.", err=True)
            click.echo(f"  {suggestion(target, found)}", err=True)
    return 0 if found else DraftMismatch.exit_code


def specs_of(found: list[LocalModel]) -> list[str]:
    """The shortest text by which `Library.resolve` finds each model."""
    from cpuchat.models.library import DEMO_FILES

    demo = {file: name for name, file in DEMO_FILES.items()}
    per_repo = Counter((model.repo, model.quantization) for model in found)
    specs: list[str] = []
    for model in found:
        if model.source == "demo":
            specs.append(demo[model.path.name])
        elif model.repo and model.quantization and per_repo[model.repo, model.quantization] == 1:
            specs.append(f"{model.repo}:{model.quantization}")
        else:
            specs.append(str(model.path))
    return specs


def _row(model: LocalModel, spec: str) -> tuple[str, str, str, str, str]:
    from cpuchat.cli.render import size

    if model.damaged is not None:
        return model.name, "damaged", "", "", f"{spec}  ({model.damaged})"
    return model.name, model.quantization, _count(model.n_params), size(model.size), spec


def _count(n: int) -> str:
    """`8.1M`, `1.5B`: parameters as model names give them."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if n >= unit:
            return f"{n / unit:.1f}{letter}"
    return str(n)


@models.command(epilog=_SYNTHETIC_EPILOG)
@click.argument("shape")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--quant", default="Q8_0", show_default=True, metavar="TYPE", help="Quantization: Q4_K_M, F16, ...")
@click.option("--layers", type=click.IntRange(min=1), metavar="N", help="Write N layers instead of the shape's own.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=1, show_default=True, metavar="N", help="Same seed, same file."
)
@click.option(
    "--pair-alpha", type=float, metavar="X",
    help="Write a target and a draft model whose acceptance rate is X, 0 to 1.",
)  # fmt: skip
@click.option(
    "--draft-out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Where the draft of a pair goes; default: OUT with `-draft` in its name.",
)  # fmt: skip
@click.option(
    "--draft-shape", default="0.05b", show_default=True, metavar="SHAPE", help="Shape of the draft of a pair."
)
@click.option("--force", is_flag=True, help="Replace files that are there already.")
def synthetic(
    shape: str,
    out: Path,
    quant: str,
    layers: int | None,
    seed: int,
    pair_alpha: float | None,
    draft_out: Path | None,
    draft_shape: str,
    force: bool,
) -> int:
    """Write a model of a real SHAPE with random weights to OUT.

    SHAPE is tiny, 0.05b, 0.5b, 1.5b, 3b, 7b, 8b, 14b, 32b, 70b or 30b-a3b. Such a model says nothing sensible, but
    computes exactly as much as a real one.
    """
    from cpuchat.models.synthetic import write_model, write_pair

    if pair_alpha is None:
        if draft_out is not None:
            raise UsageError("--draft-out is for a pair.", "Give --pair-alpha as well.")
        targets = [out]
    else:
        draft_out = draft_out or out.with_name(f"{out.stem}-draft.gguf")
        targets = [out, draft_out]
        if out == draft_out:
            raise UsageError("Target and draft cannot be the same file.", "Give --draft-out another name.")
    for file in targets:
        if file.exists() and not force:
            raise UsageError(f"{file} is there already.", "Give another name, or --force to replace it.")
    try:
        if pair_alpha is None:
            write_model(out, shape, quant, layers=layers, seed=seed)
        else:
            write_pair(
                out, draft_out, pair_alpha, target=shape, draft=draft_shape, quant=quant, layers=layers, seed=seed
            )
    except OSError as error:
        raise CpuchatError(f"Cannot write {error.filename or out}: {error.strerror}.") from None
    from cpuchat.cli.render import size

    for file in targets:
        click.echo(f"{file}  {size(file.stat().st_size)}")
    return 0
