"""`cpuchat models show`: the header of a model, local or on the hub."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from cpuchat.cli.output import json_line
from cpuchat.cli.terminal import echo_table
from cpuchat.errors import ModelNotFound, UsageError
from cpuchat.telemetry.units import size

if TYPE_CHECKING:
    from cpuchat.models.gguf.header import GGUFHeader
    from cpuchat.models.inspect import Inspection

_SHOW_EPILOG = """\b
Examples:
  cpuchat models show ~/models/big.gguf
  cpuchat models show unsloth/Qwen3-8B-GGUF:Q4_K_M --tensors
  cpuchat models show demo --template

MODEL is what --model takes, or a model on Hugging Face, of which only the header is fetched (a few MB). A repository
without a quantization is listed as by `models files`."""


@click.command("show", epilog=_SHOW_EPILOG)
@click.argument("model")
@click.option("--tensors", is_flag=True, help="Also list all tensors.")
@click.option("--metadata", is_flag=True, help="Also list all metadata.")
@click.option(
    "--template", is_flag=True, help="Print only the chat template; control characters are escaped (not in --json)."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, sizes in bytes.")
def show(model: str, tensors: bool, metadata: bool, template: bool, as_json: bool) -> int:
    """Show MODEL: architecture, tensors by type, bytes per token, experts, tokenizer, chat template.

    Only the header is read; nothing is loaded.
    """
    if template and (as_json or tensors or metadata):
        raise UsageError("--template cannot be combined with other options.", "Omit the other options.")
    from cpuchat import settings
    from cpuchat.cli.models.specs import find_header
    from cpuchat.models.hub.client import Hub
    from cpuchat.models.inspect import inspect

    header = find_header(model, settings.load().model.folders, Hub(), listed=True)
    if header is None:
        return _list_files(model, as_json=as_json)
    found = inspect(header)
    if template:
        return _print_template(found)
    if as_json:
        return _print_json(found, header, tensors=tensors)
    return _print(found, header, tensors=tensors, metadata=metadata)


def _list_files(repo: str, *, as_json: bool) -> int:
    from cpuchat.cli.models.files import files

    return click.get_current_context().invoke(files, repo=repo, as_json=as_json)


def _print_template(found: Inspection) -> int:
    if not found.templates:
        click.echo("cpuchat: This model has no chat template.", err=True)
        return ModelNotFound.exit_code
    click.echo(found.templates[0].text)
    return 0


def _print_json(found: Inspection, header: GGUFHeader, *, tensors: bool) -> int:
    plain = msgspec.to_builtins(found) | {"settings": dict(found.settings), "path": str(header.path)}
    if tensors:
        plain["tensor_list"] = msgspec.to_builtins(header.tensors)
    click.echo(json_line(plain))
    return 0


def _print(found: Inspection, header: GGUFHeader, *, tensors: bool, metadata: bool) -> int:
    from cpuchat.present.inspection import sections

    shown = sections(found, settings=metadata)
    for number, (heading, rows) in enumerate(shown):
        click.echo(f"{heading}" if not number else f"\n{heading}")
        width = max(len(label) for label, _ in rows)
        for label, text in rows:
            click.echo(f"  {label:<{width}}  {text}" if width else f"  {text}")
    if tensors:
        _print_tensors(header)
    return 0


def _print_tensors(header: GGUFHeader) -> None:
    rows = [(t.name, t.type, " × ".join(map(str, t.shape)), size(t.nbytes)) for t in header.tensors]
    click.echo("")
    echo_table([("TENSOR", "TYPE", "SHAPE", "SIZE"), *rows], right=(3,))
