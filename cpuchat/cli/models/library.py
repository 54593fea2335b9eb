"""`cpuchat models list`, `show`, `delete`, `verify` and `files`, and the names of models that commands take."""

from __future__ import annotations

import difflib
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import click
import msgspec

from cpuchat.base import paths
from cpuchat.base.errors import Interrupted, ModelDamaged, ModelNotFound, UsageError
from cpuchat.base.text import clean_line
from cpuchat.cli.options import laid_over, setting
from cpuchat.cli.output import print_json
from cpuchat.cli.terminal import TerminalOutput, echo_table
from cpuchat.config import settings
from cpuchat.config.settings import Settings
from cpuchat.models.catalog import load_catalog
from cpuchat.models.downloads.hf_cache import bytes_here
from cpuchat.models.drafts.candidates import DraftCandidate
from cpuchat.models.fit import gigabytes
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.heads import ONLY_ENGINE, TITLES, kind_named
from cpuchat.models.hub.client import Address, Hub, parse_address
from cpuchat.models.hub.repository import RepoModel, Repository, choose_repo_model
from cpuchat.models.inspect import Inspection
from cpuchat.models.library.deleting import Deletion, Verification, delete
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import DEMO_FILES, LocalModel, hub_cache, is_same_model
from cpuchat.models.machine import NOT_PROBED, TunedMachine, this_machine
from cpuchat.models.prediction import ModelPrediction, estimate_local, predict_repository
from cpuchat.present.models import fit, sections, verdict
from cpuchat.telemetry import units
from cpuchat.telemetry.units import about, parameters, rate, size

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
def show(model: str, tensors: bool, metadata: bool, template: bool, as_json: bool) -> int | None:
    """Show MODEL: architecture, tensors by type, bytes per token, experts, tokenizer, chat template.

    Only the header is read; nothing is loaded.
    """
    if template and (as_json or tensors or metadata):
        raise UsageError("--template cannot be combined with other options.", "Omit the other options.")
    from cpuchat.models.inspect import inspect

    chosen = settings.load()
    header = find_header(model, chosen.model.folders, Hub(), listed=True)
    if header is None:
        return click.get_current_context().invoke(files, repo=model, as_json=as_json)
    found = inspect(header)
    if template:
        has_one = bool(found.templates)
        click.echo(found.templates[0].text if has_one else "cpuchat: This model has no chat template.", err=not has_one)
        return 0 if has_one else ModelNotFound.exit_code
    drafts = _own_drafts(header, chosen)
    if as_json:
        return _print_json(found, header, drafts, tensors=tensors)
    return _print(found, header, drafts, tensors=tensors, metadata=metadata)


def _own_drafts(header: GGUFHeader, chosen: Settings) -> list[DraftCandidate]:
    """Return the smaller quantizations of a model on this machine: they can be its draft models."""
    from cpuchat.models.drafts.candidates import candidates, target_costs
    from cpuchat.models.machine import machine_for

    path = header.path
    here = [one for one in Library(chosen.model.folders).local_models(path) if is_same_model(header, one)]
    if not path.is_file() or not any(one.size < header.file_size for one in here):
        return []
    found = candidates(header, here, load_catalog(), target_costs(path), machine_for(path, chosen))
    return [one for one in found if one.same_model]


_HEADER_FIGURES = (
    "name", "version", "architecture", "quantization", "size", "file_size", "n_params", "n_params_active",
    "n_ctx_train", "n_layer", "n_embd", "n_ff", "key_length", "value_length",
)  # fmt: skip


def _print_json(found: Inspection, header: GGUFHeader, drafts: Sequence[DraftCandidate], *, tensors: bool) -> None:
    described = {name: value for name, value in msgspec.structs.asdict(found).items() if name != "header"}
    plain = {name: getattr(header, name) for name in _HEADER_FIGURES} | msgspec.to_builtins(described)
    plain |= {"file": header.path.name, "path": str(header.path), "parts": header.split_count, "heads": header.n_head}
    plain["settings"] = dict(found.settings)
    plain["drafts"] = [{"spec": one.spec, "expected": msgspec.to_builtins(one.expected)} for one in drafts]
    if tensors:
        plain["tensor_list"] = msgspec.to_builtins(header.tensors)
    return print_json(plain)


def _print(
    found: Inspection, header: GGUFHeader, drafts: Sequence[DraftCandidate], *, tensors: bool, metadata: bool
) -> None:
    shown = sections(found, settings=metadata)
    if drafts:
        shown.append(("Draft models", [(one.path.name if one.path else "", one.expected.words) for one in drafts]))
    for number, (heading, rows) in enumerate(shown):
        click.echo(f"{heading}" if not number else f"\n{heading}")
        width = max(len(label) for label, _ in rows)
        for label, text in rows:
            click.echo(f"  {label:<{width}}  {text}" if width else f"  {text}")
    if tensors:
        rows = [(t.name, t.type, " × ".join(map(str, t.shape)), size(t.nbytes)) for t in header.tensors]
        click.echo("")
        echo_table([("TENSOR", "TYPE", "SHAPE", "SIZE"), *rows], right=(3,))


def specs_of(found: Sequence[LocalModel]) -> list[str]:
    """Return the shortest text by which `Library.resolve` finds each model; the path of what cannot be loaded."""
    demo = {file: name for name, file in DEMO_FILES.items()}
    named = [
        (m.repo, m.quantization) if m.repo and m.quantization and m.unfinished is None and m.kind == "model" else None
        for m in found
    ]
    times = Counter(named)
    specs: list[str] = []
    for model, name in zip(found, named, strict=True):
        if model.source == "demo":
            specs.append(demo[model.path.name])
        elif name is not None and times[name] == 1:
            specs.append(f"{model.repo}:{model.quantization}")
        else:
            specs.append(str(model.path))
    return specs


def find_model(library: Library, spec: str) -> LocalModel:
    """Return the one model of the library that `spec` names, as in `models list` (damaged ones too) or for --model.

    Never guesses where --model would choose among several. Raises ModelNotFound: there is none, or it is not in the
    library; UsageError: it is ambiguous.
    """
    found = library.local_models()
    specs = specs_of(found)
    path = paths.expanded(spec).absolute()
    exact = [model for model, name in zip(found, specs, strict=True) if spec == name or path == model.path.absolute()]
    if exact:
        return exact[0]
    meant = [name for model, name in zip(found, specs, strict=True) if spec.lower() in _names(model)]
    if len(meant) > 1:
        raise UsageError(f"{spec} is ambiguous: {len(meant)} models match.", f"Use {' or '.join(meant)}.")
    real = os.path.realpath(library.resolve(spec))
    for model in found:
        if os.path.realpath(model.path) == real:
            return model
    raise ModelNotFound(
        f"{spec} is neither in the Hugging Face cache nor in a folder named in config.toml.",
        "See `cpuchat models list`.",
    )


def _names(model: LocalModel) -> set[str]:
    """Return its possible names in lower case; a partial download has none but its path."""
    if model.unfinished is not None:
        return set()
    of_repo = {model.repo, f"{model.repo}:{model.quantization}"} if model.repo else set()
    return {name.lower() for name in (*of_repo, model.path.name, model.path.stem)}


def hub_address(text: str) -> Address:
    """Return where a model is on the hub: `text` as for `parse_address`, or a catalog id such as `qwen3-8b:Q8_0`.
    Raises UsageError: it is neither; the hint names similar ids.
    """
    if "/" in text:
        return parse_address(text)
    catalog = load_catalog()
    id, _, quantization = text.strip().lower().partition(":")
    if (model := catalog.find(id)) is not None:
        return Address(repo=model.repos[0], quantization=quantization.upper())
    try:
        return parse_address(text)
    except UsageError as error:
        close = difflib.get_close_matches(id, [one.id for one in catalog.models], n=3)
        guess = f"Did you mean {' or '.join(close)}? " if close else ""
        hint = f"{guess}{error.hint} `cpuchat models catalog` lists ids."
        raise UsageError(error.message, hint) from None


def find_header(spec: str, folders: Sequence[str], hub: Hub, *, listed: bool = False) -> GGUFHeader | None:
    """Read the header of a local model (a value of --model), else of one on the hub.

    Args:
        folders: of the settings.
        listed: return None for a repository on the hub of which `spec` names no model, instead of its usual one.

    Raises:
        ModelNotFound: it is neither local nor the name of a repository.
        HubError and its kinds; ModelDamaged.
    """
    try:
        return read_model(Library(folders).resolve(spec))
    except ModelNotFound as error:
        missing = error
    if spec.lower().endswith(".gguf") and "://" not in spec:
        raise missing
    try:
        address = hub_address(spec)
    except UsageError:
        raise missing from None
    if listed and not address.wanted:
        return None
    repository = hub.repository(address.repo, address.revision or "main")
    return hub.header(repository, choose_repo_model(repository, address.wanted))


_LIST_EPILOG = """The last column is what --model takes. tok/s is the last measured plain decoding speed; ≈ marks a
prediction. To search more folders, name them in config.toml:

\b
  [model]
  folders = ["~/models"]"""
_HEADINGS = ("NAME", "ARCH", "PARAMS", "QUANT", "CONTEXT", "SIZE", "TOK/S", "USED", "--model")


@click.command("list", epilog=_LIST_EPILOG)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, sizes in bytes.")
def list_models(as_json: bool) -> None:
    """List the bundled models and those in the Hugging Face cache and your folders, last used first."""
    chosen = settings.load()
    found = Library(chosen.model.folders).local_models()
    found.sort(key=lambda model: (model.damaged is not None, -model.last_used))
    specs = specs_of(found)
    if as_json:
        rows = [msgspec.to_builtins(model, enc_hook=str) for model in found]
        for row, model, spec in zip(rows, found, specs, strict=True):
            del row["work"]
            row |= {"spec": spec, "state": model.state}
        return print_json(rows)
    if not found:
        click.echo("cpuchat: No models found. Search for some: cpuchat models search WORDS.", err=True)
        return
    machine = this_machine(chosen)
    tuned = TunedMachine(chosen, machine)
    rows = [_row(model, spec, tuned) for model, spec in zip(found, specs, strict=True)]
    echo_table([_HEADINGS, *rows], right=(2, 4, 5, 6))
    if machine.profile is None:
        click.echo(f"cpuchat: No predicted speed: {machine.peak_source}.", err=True)
    elif not machine.probed:
        click.echo(f"cpuchat: Predicted speeds are {NOT_PROBED}.", err=True)


def _row(model: LocalModel, spec: str, tuned: TunedMachine) -> tuple[str, ...]:
    if model.damaged is not None:
        return (
            model.name, model.architecture, _parameters(model), model.state, "", size(model.size), "",
            _day(model.last_used), f"{spec} ({model.damaged})",
        )  # fmt: skip
    return (
        model.name,
        model.architecture,
        _parameters(model),
        model.quantization,
        f"{model.n_ctx_train:,}" if model.n_ctx_train else "",
        size(model.size),
        _speed(model, tuned),
        _day(model.last_used),
        spec if model.has_template else f"{spec} (no chat template)",
    )


def _parameters(model: LocalModel) -> str:
    """Return `1.5B`; for a mixture of experts `30.5B/3.3B`: total and active."""
    if not model.n_params:
        return ""
    active = f"/{parameters(model.n_params_active)}" if model.n_params_active < model.n_params else ""
    return parameters(model.n_params) + active


def _speed(model: LocalModel, tuned: TunedMachine) -> str:
    """Return `31.2` as measured, `≈41` as predicted, `≈0.4 (too slow)`, `too large` or `no SIMD`."""
    if model.measured_tok_s:
        return rate(model.measured_tok_s)
    expected = estimate_local(model, tuned.of(model.path))
    if expected.tok_s is not None:
        return f"≈{about(expected.tok_s)}" + (f" ({verdict(expected)})" if expected.too_slow else "")
    why_none = verdict(expected)
    return why_none if why_none in ("too large", "no SIMD") else ""


def _day(seconds: float) -> str:
    """Return `2026-11-21` in local time, "" for never."""
    return time.strftime("%Y-%m-%d", time.localtime(seconds)) if seconds else ""


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
def delete_model(spec: str, yes: bool, as_json: bool) -> None:
    """Delete MODEL, named as in `cpuchat models list`, and report the freed space."""
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
        return print_json({"freed": freed, "files": files, "stays": list(deletion.stays)})
    if yes:  # else it was shown before
        for line in deletion.stays:
            click.echo(f"  {clean_line(line)}")
    click.echo(f"Freed {size(freed)}.")


def _explain(deletion: Deletion) -> None:
    click.echo(f"Deleting {clean_line(deletion.model.name)} frees {size(deletion.freed)}:", err=True)
    for file in deletion.files:
        click.echo(f"  delete {clean_line(str(file))}", err=True)
    for line in deletion.stays:
        click.echo(f"  {clean_line(line)}", err=True)


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
    terminal = TerminalOutput(quiet=as_json)
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
        print_json(rows)
    return ModelDamaged.exit_code if any(one.state == "damaged" for one in checked) else 0


def _check(library: Library, model: LocalModel, terminal: TerminalOutput) -> Verification:
    def progress(done: int, total: int) -> None:
        terminal.status(f"checking {model.path.name} {100 * done // max(total, 1)} %")

    result = library.verify(model, progress)
    terminal.clear_progress()
    return result


_FILES_EPILOG = """\b
Examples:
  cpuchat models files unsloth/Qwen3-8B-GGUF
  cpuchat models files unsloth/Qwen3-8B-GGUF:Q8_0
  cpuchat models files unsloth/Qwen3-8B-GGUF --ctx 32768 --draft unsloth/Qwen3-0.6B-GGUF:Q8_0

Reads the header of one quantization (Q4_K_M, or the one named; a few MB, cached) and estimates the others ("≈") from
it and their sizes. FIT assumes the context of --ctx or of the settings, and the memory free now."""


@click.command("files", epilog=_FILES_EPILOG)
@click.argument("repo", metavar="REPO[:QUANT]")
@setting("engine.ctx")
@click.option("--draft", metavar="FILE|REPO", help="Include this draft model, local or on Hugging Face.")
@click.option("--revision", metavar="REV", default="", help="Branch, tag or commit; default: newest commit.")
@click.option("--no-header", is_flag=True, help="Estimate from file sizes alone.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, sizes in bytes.")
def files(repo: str, draft: str | None, revision: str, no_header: bool, as_json: bool, **values: Any) -> None:
    """List the models of a repository by quantization, with size, fit and predicted speed on this machine.

    REPO is OWNER/NAME, a Hugging Face link, or an id from `cpuchat models catalog`.
    """
    chosen = laid_over(values)
    if no_header and draft:
        raise UsageError("--no-header and --draft are mutually exclusive.", "Omit one of them.")
    address = hub_address(repo)
    hub, terminal = Hub(), TerminalOutput()
    terminal.status("contacting Hugging Face")
    try:
        repository = hub.repository(address.repo, revision or address.revision or "main")
        named = address.quantization or address.path.lower().endswith(".gguf")  # not the link of a folder
        first = choose_repo_model(repository, address.wanted) if named else None
        header = find_header(draft, chosen.model.folders, hub) if draft else None
        options, machine, asked = chosen.load_options(), this_machine(chosen), None if no_header else hub
        predicted = predict_repository(asked, repository, options, machine, first=first, draft=header)
        found = {one.model.files[0].path: one for one in predicted}
    finally:
        terminal.clear_progress()
    if as_json:
        return _print_files_as_json(repository, found)
    return _print_files(repository, found)


def _print_files(repository: Repository, found: Mapping[str, ModelPrediction]) -> None:
    facts = (repository.id, repository.license, repository.updated, "gated" if repository.gated else "")
    click.echo(" · ".join(clean_line(fact) for fact in facts if fact))
    models = [model for model in repository.models if model.kind == "model"]
    others = [model for model in repository.models if model.kind != "model"]
    if models:
        names = Counter(model.quantization for model in models)
        rows = [_file_row(repository, model, found.get(model.files[0].path), names) for model in models]
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


def _file_row(
    repository: Repository, model: RepoModel, predicted: ModelPrediction | None, names: Mapping[str, int]
) -> tuple[str, ...]:
    name = model.quantization if model.quantization and names[model.quantization] == 1 else model.name
    count = str(len(model.files)) if len(model.files) > 1 else ""
    here = _share(_bytes_here(repository, model), model.size)
    if predicted is None or predicted.fault:
        fault = predicted.fault if predicted is not None else "incomplete"
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
    return bytes_here(hub_cache(), repository.id, model.files)


def _share(done: int, total: int) -> str:
    """Return `yes`; `61 %` of a partial download; "" for none of it."""
    return "" if not done else "yes" if done == total else f"{100 * done // total} %"


def _notes(repository: Repository, found: Mapping[str, ModelPrediction]) -> list[str]:
    """Return what the figures are based on, and each problem once."""
    notes: list[str] = []
    judged = [one.prediction for one in found.values() if not one.fault]
    if judged:
        expected = max(judged, key=lambda one: (one.exact, one.tok_s or 0))
        context = f" with {expected.n_ctx:,} tokens of context" if expected.exact else ""
        draft = f" and the draft model ({gigabytes(expected.draft_need.min_bytes)} GB)" if expected.draft_need else ""
        notes.append(f"FIT{context}{draft}, for the {gigabytes(expected.available)} GB that are free now.")
        notes.append(f"TOK/S: {expected.basis}.")
    notes += [f"! {problem}" for problem in repository.problems]
    notes += dict.fromkeys(f"! {one.problem}" for one in found.values() if one.problem)
    return notes


_FIGURES = (
    "exact", "needed", "available", "n_ctx", "context_that_fits", "bytes_per_token", "tok_s", "basis",
    "explained",
)  # fmt: skip


def _print_files_as_json(repository: Repository, found: Mapping[str, ModelPrediction]) -> None:
    rows: list[dict[str, Any]] = []
    for model in repository.models:
        row = {**msgspec.to_builtins(model), "size": model.size, "here": _bytes_here(repository, model)}
        predicted = found.get(model.files[0].path)
        if predicted is not None:
            figures = {name: getattr(predicted.prediction, name) for name in _FIGURES}
            about = {"verdict": verdict(predicted.prediction), "problem": predicted.problem}
            row["prediction"] = figures | about | {"fault": predicted.fault}
        rows.append(row)
    return print_json({**msgspec.to_builtins(repository), "models": rows})
