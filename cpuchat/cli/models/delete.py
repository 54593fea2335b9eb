"""`cpuchat models delete`: delete a model, after showing what goes and what stays."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from cpuchat.cli.models.specs import find_model
from cpuchat.cli.output import json_line
from cpuchat.errors import Interrupted, UsageError
from cpuchat.telemetry.units import size
from cpuchat.text import clean_line

if TYPE_CHECKING:
    from cpuchat.models.library.deleting import Deletion

_DELETE_EPILOG = """\b
Examples:
  cpuchat models delete bartowski/Qwen2.5-1.5B-Instruct-GGUF:Q4_K_M
  cpuchat models delete ~/models/old.gguf --yes

Cached files that another model or revision shares are kept. Nothing outside the Hugging Face cache and your folders
is deleted."""


@click.command("delete", epilog=_DELETE_EPILOG)
@click.argument("spec", metavar="MODEL")
@click.option("--yes", "-y", is_flag=True, help="Don't ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; needs --yes.")
def delete_model(spec: str, yes: bool, as_json: bool) -> int:
    """Delete MODEL, named as in `cpuchat models list`, and report the freed space."""
    from cpuchat import settings
    from cpuchat.models.library.deleting import delete
    from cpuchat.models.library.library import Library

    library = Library(settings.load().model.folders)
    deletion = library.deletion(find_model(library, spec))
    if deletion.refused:
        raise UsageError(f"{deletion.model.name} was not deleted. {deletion.refused}")
    if not yes:
        if as_json or not sys.stdin.isatty():
            raise UsageError("Refusing to delete without --yes.", "Add --yes to confirm.")
        _explain(deletion)
        if not click.confirm("Delete?", err=True):
            raise Interrupted("Nothing was deleted.")
    freed = delete(deletion)
    if as_json:
        files = [str(file) for file in deletion.files]
        click.echo(json_line({"freed": freed, "files": files, "stays": list(deletion.stays)}))
        return 0
    if yes:  # else it was shown before
        for line in deletion.stays:
            click.echo(f"  {clean_line(line)}")
    click.echo(f"Freed {size(freed)}.")
    return 0


def _explain(deletion: Deletion) -> None:
    click.echo(f"Deleting {clean_line(deletion.model.name)} frees {size(deletion.freed)}:", err=True)
    for file in deletion.files:
        click.echo(f"  delete {clean_line(str(file))}", err=True)
    for line in deletion.stays:
        click.echo(f"  {clean_line(line)}", err=True)
