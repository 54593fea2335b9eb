"""`cpuchat models verify`: compare files with their published checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cpuchat import settings
from cpuchat.cli.models.specs import find_model, specs_of
from cpuchat.cli.output import json_line
from cpuchat.cli.terminal import Terminal
from cpuchat.errors import ModelDamaged, UsageError
from cpuchat.models.library.library import Library
from cpuchat.text import clean_line

if TYPE_CHECKING:
    from cpuchat.models.library.model import LocalModel
    from cpuchat.models.library.verifying import Verification

_VERIFY_EPILOG = f"""Files in the Hugging Face cache are compared with the SHA-256 that Hugging Face published;
of other files only the header is checked. Exit codes: 0 all intact, {ModelDamaged.exit_code} a file is damaged."""


@click.command("verify", epilog=_VERIFY_EPILOG)
@click.argument("specs", nargs=-1, metavar="[MODEL]...")
@click.option("--all", "everything", is_flag=True, help="Check all models on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def verify(specs: tuple[str, ...], everything: bool, as_json: bool) -> int:
    """Read each MODEL and compare its checksum; `cpuchat models list` then marks damaged models."""
    if bool(specs) == everything:
        raise UsageError("No models named.", "Name the models to verify, or give --all.")
    library = Library(settings.load().model.folders)
    models = library.local_models() if everything else [find_model(library, spec) for spec in specs]
    terminal = Terminal(quiet=as_json)
    checked: list[Verification] = []
    for model, spec in zip(models, specs_of(models), strict=True):
        result = _check(library, model, terminal)
        checked.append(result)
        if not as_json:
            terminal.line(f"{result.state:<9}  {clean_line(spec)}  ({clean_line(result.words)})")
    if as_json:
        rows = [
            {"spec": spec, "path": str(one.model.path), "state": one.state, "words": one.words}
            for one, spec in zip(checked, specs_of(models), strict=True)
        ]
        click.echo(json_line(rows))
    return ModelDamaged.exit_code if any(one.state == "damaged" for one in checked) else 0


def _check(library: Library, model: LocalModel, terminal: Terminal) -> Verification:
    def progress(done: int, total: int) -> None:
        terminal.status(f"checking {model.path.name} {100 * done // max(total, 1)} %")

    result = library.verify(model, progress)
    terminal.clear_progress()
    return result
