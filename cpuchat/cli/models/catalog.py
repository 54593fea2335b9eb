"""`cpuchat models catalog`: recommended models, with fit and speed on this machine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cpuchat import settings
from cpuchat.cli.output import json_line
from cpuchat.cli.terminal import echo_paragraph, echo_table
from cpuchat.models.catalog import load_catalog, match_local
from cpuchat.models.library.library import Library
from cpuchat.models.machine import NOT_PROBED, this_machine
from cpuchat.present.prediction import purpose, verdict
from cpuchat.telemetry import units
from cpuchat.telemetry.units import size
from cpuchat.text import clean_line

if TYPE_CHECKING:
    from cpuchat.models.catalog import Catalog, CatalogModel
    from cpuchat.models.machine import Machine
    from cpuchat.models.prediction import Prediction

_CATALOG_EPILOG = """\b
Examples:
  cpuchat models catalog                 list all
  cpuchat models catalog qwen3           list those that match: name, family, publisher or repository
  cpuchat models catalog qwen3-8b        show one by its id
  cpuchat models download qwen3-8b       download it from its first repository

FIT and TOK/S are estimated from the file size; `cpuchat models files REPO` computes them from the header. Add your own
entries to catalog.toml in the config folder, in the format of the built-in one."""


@click.command("catalog", epilog=_CATALOG_EPILOG)
@click.argument("words", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, sizes in GB by quantization.")
def catalog(words: tuple[str, ...], as_json: bool) -> int:
    """List chat models with their GGUF repositories, fit and speed on this machine, and draft models."""
    from cpuchat.models.shortlist import estimates

    known = load_catalog()
    for problem in known.problems:
        _complain(problem)
    wanted = " ".join(words)
    one = known.find(wanted.lower())
    found = [one] if one is not None else known.search(wanted)
    chosen = settings.load()
    matches = (match_local(known, model) for model in Library(chosen.model.folders).local_models())
    here = {entry.id for entry in matches if entry is not None}
    machine = this_machine(chosen)
    expected = estimates(known.models, machine)
    if as_json:
        return _print_json(found, here, expected)
    if not found:
        _complain(f"No catalog entry matches {wanted!r}.")
        click.echo("  Search Hugging Face: cpuchat models search WORDS.", err=True)
    elif len(found) == 1:
        _print_one(found[0], known, here, expected.get(found[0].id))
    else:
        _print_all(found, known, here, machine, expected)
    return 0


def _complain(text: str) -> None:
    click.echo(f"cpuchat: {clean_line(text)}", err=True)


def _print_all(
    found: list[CatalogModel],
    known: Catalog,
    here: Collection[str],
    machine: Machine,
    expected: Mapping[str, Prediction],
) -> None:
    from cpuchat.models.fit import gigabytes
    from cpuchat.models.shortlist import ranked

    recommended = [model.id for model in ranked(known.models, expected).suits]
    found = [model for id in recommended for model in found if model.id == id] + [
        model for model in found if model.id not in recommended
    ]

    headings = ("ID", "PARAMS", "SIZE", "FIT", "TOK/S")
    echo_table(
        [headings, *(_row(model, expected.get(model.id), here, recommended) for model in found)], right=(1, 2, 4)
    )
    free = gigabytes(machine.available)
    footnotes = [
        f"FIT and TOK/S are estimated from the file size, for the {free} GB that are free now.",
        "★ recommended for this machine. ○ downloaded. ? repository not verified. ≈ size not verified.",
        "Details and download command: cpuchat models catalog ID.",
    ]
    if machine.profile is None:
        footnotes.append(f"No TOK/S: {machine.peak_source}.")
    elif not machine.probed:
        footnotes.append(f"Speeds are {NOT_PROBED}.")
    click.echo()
    for note in footnotes:
        echo_paragraph(note)


def _row(
    model: CatalogModel, expected: Prediction | None, here: Collection[str], recommended: Collection[str]
) -> tuple[str, ...]:
    marks = [
        mark
        for mark, applies in (
            (" ★", model.id in recommended), (" ○", model.id in here), (" ?", "repo" not in model.verified)
        )
        if applies
    ]  # fmt: skip
    return (
        model.id + "".join(marks),
        _parameters(model),
        _gigabytes(model, model.quantization) if model.size else "",
        verdict(expected),
        _speed(expected),
    )


def _speed(expected: Prediction | None) -> str:
    return units.about(expected.tok_s) if expected is not None and expected.tok_s is not None else ""


def _parameters(model: CatalogModel) -> str:
    """Return `7.6B`; `30.5B (3.3B)` for a mixture of experts: total (active)."""
    total = units.parameters(round(1e9 * model.params))
    return f"{total} ({units.parameters(round(1e9 * model.active_params))})" if model.is_moe else total


def _print_one(model: CatalogModel, known: Catalog, here: Collection[str], expected: Prediction | None) -> None:
    drafts = [
        f"{draft.name} ({draft.id}{', downloaded' if draft.id in here else ''})" for draft in known.drafts_of(model)
    ]
    speed = _speed(expected)
    prediction = f"{expected.explained}{f'; ≈ {speed} tok/s' if speed else ''}" if expected is not None else ""
    facts = (
        ("", f"{model.name}{' · downloaded' if model.id in here else ''}"),
        ("", " · ".join(filter(None, (model.id, model.family, model.publisher, str(model.year), model.license)))),
        ("parameters", f"{_parameters(model)}{', mixture of experts' if model.is_moe else ''}"),
        ("context", f"{model.context:,} tokens" if model.context else ""),
        ("sizes", ", ".join(f"{name} {_gigabytes(model, name)}" for name in model.sizes)),
        ("fit", prediction),
        ("drafts", ", ".join(drafts) or (f"none: {model.why_no_draft}" if model.why_no_draft else "none known")),
        ("purpose", purpose(model)),
        ("note", model.note),
        ("repositories", ", ".join(model.repos)),
        ("verified", ", ".join(model.verified) or "nothing"),
        ("download", f"cpuchat models download {model.spec}"),
    )
    for label, text in facts:
        if text:
            echo_paragraph(clean_line(text), f"{label:<14}" if label else "", " " * 14 if label else "")


def _gigabytes(model: CatalogModel, quantization: str) -> str:
    return f"{'' if quantization in model.verified else '≈ '}{size(round(1e9 * model.sizes[quantization]))}"


def _print_json(found: list[CatalogModel], here: Collection[str], predictions: Mapping[str, Prediction]) -> int:
    rows: list[dict[str, Any]] = []
    for model in found:
        expected = predictions.get(model.id)
        rows.append(
            {
                **msgspec.to_builtins(model),
                "spec": model.spec,
                "here": model.id in here,
                "fit": verdict(expected) or None,
                "tok_s": expected.tok_s if expected is not None else None,
            }
        )
    click.echo(json_line(rows))
    return 0
