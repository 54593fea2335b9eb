"""`cpuchat models search`: GGUF repositories on the hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from cpuchat.cli.output import json_line
from cpuchat.cli.terminal import echo_table
from cpuchat.models.hub.client import Hub
from cpuchat.telemetry import units
from cpuchat.text import clean_line

if TYPE_CHECKING:
    from cpuchat.models.hub.repository import FoundRepository

_SEARCH_EPILOG = """\b
Examples:
  cpuchat models search qwen3 8b
  cpuchat models files unsloth/Qwen3-8B-GGUF      list the models in one of them

Respects HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE."""


@click.command("search", epilog=_SEARCH_EPILOG)
@click.argument("words", nargs=-1, required=True)
@click.option(
    "--limit",
    type=click.IntRange(1, 100),
    default=30,
    show_default=True,
    metavar="N",
    help="Maximum number of results.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def search(words: tuple[str, ...], limit: int, as_json: bool) -> int:
    """Search Hugging Face for repositories with GGUF files, most downloads first."""

    query = " ".join(words)
    found = Hub().search(query, limit=limit)
    if as_json:
        click.echo(json_line(msgspec.to_builtins(found)))
        return 0
    if not found:
        click.echo(f"cpuchat: No GGUF repositories match {clean_line(query)!r}.", err=True)
        click.echo("  Use fewer words: a repository's name must contain all of them.", err=True)
        return 0
    headings = ("REPOSITORY", "PARAMS", "ARCH", "DOWNLOADS", "UPDATED", "ACCESS")
    echo_table([headings, *map(_row, found)], right=(1, 3))
    return 0


def _row(found: FoundRepository) -> tuple[str, ...]:
    params = units.parameters(found.n_params) if found.n_params else ""
    access = "private" if found.private else "gated" if found.gated else ""
    return found.id, params, found.architecture, f"{found.downloads:,}", found.updated, access
