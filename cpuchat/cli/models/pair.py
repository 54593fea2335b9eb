"""`cpuchat models pair`: which draft model fits which target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cpuchat.cli.models.specs import specs_of
from cpuchat.errors import DraftMismatch

if TYPE_CHECKING:
    from cpuchat.models.library import Library

_PAIR_EPILOG = f"""\b
Examples:
  cpuchat models pair demo demo-draft
  cpuchat models pair ~/models/big.gguf

TARGET and DRAFT are what --model takes. Exit codes: 0 the draft fits (without DRAFT: there is one),
{DraftMismatch.exit_code} it does not, 3 no such model, 4 damaged model."""


@click.command("pair", epilog=_PAIR_EPILOG)
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
    from cpuchat.models.drafts.pairing import check_files
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
    from cpuchat.models.drafts.pairing import fitting_drafts, suggestion
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
