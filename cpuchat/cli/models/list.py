"""`cpuchat models list`: what is on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cpuchat.cli.models.specs import specs_of

if TYPE_CHECKING:
    from cpuchat.models.library import LocalModel

_LIST_EPILOG = """The last column is what --model takes. More folders are searched if config.toml names them:

\b
  [model]
  folders = ["~/models"]"""


@click.command("list", epilog=_LIST_EPILOG)
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
