"""`cpuchat models files`: the models of a repository, with fit and speed here, before anything is downloaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cpuchat.cli.models.specs import find_header, hub_address
from cpuchat.cli.options import ctx_option, laid_over
from cpuchat.cli.output import json_line
from cpuchat.cli.terminal import Terminal, echo_table
from cpuchat.errors import UsageError
from cpuchat.models.heads import ONLY_ENGINE, TITLES, kind_named
from cpuchat.models.hub.choice import choose
from cpuchat.models.hub.client import Hub
from cpuchat.models.machine import this_machine
from cpuchat.present.prediction import fit, verdict
from cpuchat.telemetry import units
from cpuchat.telemetry.units import size
from cpuchat.text import clean_line

if TYPE_CHECKING:
    from cpuchat.models.gguf.header import GGUFHeader
    from cpuchat.models.hub.repository import RepoModel, Repository
    from cpuchat.models.repository_prediction import ModelPrediction
    from cpuchat.settings import Settings

_FILES_EPILOG = """\b
Examples:
  cpuchat models files unsloth/Qwen3-8B-GGUF
  cpuchat models files unsloth/Qwen3-8B-GGUF:Q8_0
  cpuchat models files unsloth/Qwen3-8B-GGUF --ctx 32768 --draft unsloth/Qwen3-0.6B-GGUF:Q8_0

Reads the header of one quantization (Q4_K_M, or the one named; a few MB, cached) and estimates the others ("≈") from
it and their sizes. FIT assumes the context of --ctx or of the settings, and the memory free now."""


@click.command("files", epilog=_FILES_EPILOG)
@click.argument("repo", metavar="REPO[:QUANT]")
@ctx_option()
@click.option("--draft", metavar="FILE|REPO", help="Include this draft model, local or on Hugging Face.")
@click.option("--revision", metavar="REV", default="", help="Branch, tag or commit; default: newest commit.")
@click.option("--no-header", is_flag=True, help="Estimate from file sizes alone.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, sizes in bytes.")
def files(repo: str, draft: str | None, revision: str, no_header: bool, as_json: bool, **values: Any) -> int:
    """List the models of a repository by quantization, with size, fit and predicted speed on this machine.

    REPO is OWNER/NAME, a Hugging Face link, or an id from `cpuchat models catalog`.
    """
    chosen = laid_over(values)
    if no_header and draft:
        raise UsageError("--no-header and --draft are mutually exclusive.", "Omit one of them.")
    address = hub_address(repo)
    hub, terminal = Hub(), Terminal()
    terminal.status("contacting Hugging Face")
    try:
        repository = hub.repository(address.repo, revision or address.revision or "main")
        named = address.quantization or address.path.lower().endswith(".gguf")  # not the link of a folder
        first = choose(repository, address.wanted) if named else None
        header = find_header(draft, chosen.model.folders, hub) if draft else None
        found = _predicted(None if no_header else hub, repository, chosen, first, header)
    finally:
        terminal.clear_progress()
    if as_json:
        return _print_json(repository, found)
    return _print(repository, found)


def _predicted(
    hub: Hub | None, repository: Repository, chosen: Settings, first: RepoModel | None, draft: GGUFHeader | None
) -> dict[str, ModelPrediction]:
    """Return the predictions by the path of the model's first file."""
    from cpuchat.models.repository_prediction import predict_repository

    told = predict_repository(hub, repository, chosen.load_options(), this_machine(chosen), first=first, draft=draft)
    return {one.model.files[0].path: one for one in told}


def _print(repository: Repository, found: Mapping[str, ModelPrediction]) -> int:
    facts = (repository.id, repository.license, repository.updated, "gated" if repository.gated else "")
    click.echo(" · ".join(clean_line(fact) for fact in facts if fact))
    models = [model for model in repository.models if model.kind == "model"]
    others = [model for model in repository.models if model.kind != "model"]
    if models:
        names = Counter(model.quantization for model in models)
        rows = [_row(repository, model, found.get(model.files[0].path), names) for model in models]
        headings = ("MODEL", "SIZE", "FIT", "NEEDS", "TOK/S", "FILES", "HERE")
        click.echo("")
        echo_table([headings, *rows], right=(1, 3, 4, 5))
    else:
        click.echo("cpuchat: This repository has no GGUF models.", err=True)
    for model in others:
        kind = kind_named(model.files[0].path)
        use = f" ({TITLES[kind]}; {ONLY_ENGINE})" if kind is not None else ""
        click.echo(f"{model.kind}: {clean_line(model.files[0].path)}  {size(model.size)}{use}")
    notes = _notes(repository, found)
    for note in ("", *notes) if notes else ():
        click.echo(clean_line(note))
    return 0


def _row(
    repository: Repository, model: RepoModel, predicted: ModelPrediction | None, names: Mapping[str, int]
) -> tuple[str, ...]:
    name = model.quantization if model.quantization and names[model.quantization] == 1 else model.name
    count = str(len(model.files)) if len(model.files) > 1 else ""
    here = _share(_bytes_here(repository, model), model.size)
    if predicted is None or predicted.damaged:
        fault = "damaged" if predicted is not None else "incomplete"
        return name, size(model.size), fault, "", "", count, here
    expected = predicted.prediction
    about = "" if expected.exact else "≈ "
    return (
        name,
        size(model.size),
        fit(expected),
        f"{about}{size(expected.needed)}",
        f"≈ {units.about(expected.tok_s)}" if expected.tok_s is not None else "",
        count,
        here,
    )


def _bytes_here(repository: Repository, model: RepoModel) -> int:
    from cpuchat.models.downloads.hf_cache import bytes_here
    from cpuchat.models.library.places import hub_cache

    return bytes_here(hub_cache(), repository.id, model.files)


def _share(done: int, total: int) -> str:
    """Return `yes`; `61 %` of a partial download; "" for none of it."""
    return "" if not done else "yes" if done == total else f"{100 * done // total} %"


def _notes(repository: Repository, found: Mapping[str, ModelPrediction]) -> list[str]:
    """Return what the figures are based on, and each problem once."""
    from cpuchat.models.fit import gigabytes

    notes: list[str] = []
    judged = [one.prediction for one in found.values() if not one.damaged]
    if judged:
        expected = max(judged, key=lambda one: (one.exact, one.tok_s or 0))
        context = f" with {expected.n_ctx:,} tokens of context" if expected.exact else ""
        draft = f" and the draft model ({gigabytes(expected.draft_need.least)} GB)" if expected.draft_need else ""
        notes.append(f"FIT{context}{draft}, for the {gigabytes(expected.available)} GB that are free now.")
        notes.append(f"TOK/S: {expected.basis}.")
    notes += [f"! {problem}" for problem in repository.problems]
    notes += dict.fromkeys(f"! {one.problem}" for one in found.values() if one.problem)
    return notes


def _print_json(repository: Repository, found: Mapping[str, ModelPrediction]) -> int:
    rows: list[dict[str, Any]] = []
    for model in repository.models:
        row = {**msgspec.to_builtins(model), "size": model.size, "here": _bytes_here(repository, model)}
        predicted = found.get(model.files[0].path)
        if predicted is not None:
            row["prediction"] = _prediction_json(predicted)
        rows.append(row)
    click.echo(json_line({**msgspec.to_builtins(repository), "models": rows}))
    return 0


_FIGURES = (
    "exact", "needed", "available", "n_ctx", "context_that_fits", "bytes_per_token", "tok_s", "basis",
    "explained",
)  # fmt: skip


def _prediction_json(predicted: ModelPrediction) -> dict[str, Any]:
    figures = {name: getattr(predicted.prediction, name) for name in _FIGURES}
    figures["verdict"] = verdict(predicted.prediction)
    return figures | {"problem": predicted.problem, "damaged": predicted.damaged}
