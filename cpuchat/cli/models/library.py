"""`cpuchat models list`, `show`, `delete` and `verify`, and the names of models that commands take."""

from __future__ import annotations

import difflib
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain

import click
import msgspec

from cpuchat.base import paths
from cpuchat.base.errors import Declined, ModelDamaged, ModelNotFound, UsageError
from cpuchat.base.text import clean_line
from cpuchat.cli.completion import MODEL
from cpuchat.cli.options import tell_choice
from cpuchat.cli.output import is_terminal, print_json
from cpuchat.cli.terminal import TerminalOutput, echo_paragraph, echo_table
from cpuchat.config import settings
from cpuchat.models.catalog import load_catalog
from cpuchat.models.drafts.candidates import own_head
from cpuchat.models.file_names import shortened
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.hub.client import Address, Hub, parse_address
from cpuchat.models.hub.repository import choose_repo_model
from cpuchat.models.inspect import inspect
from cpuchat.models.library.deleting import UNCHECKED, delete
from cpuchat.models.library.library import Library, as_typed, is_named, short_specs, specs_of
from cpuchat.models.library.places import LocalModel, grouped, place_of, shown_name, unavailable
from cpuchat.models.machine import TunedMachine, this_machine
from cpuchat.models.ollama import file_name
from cpuchat.models.prediction import estimate_local
from cpuchat.present.models import doubt, head_words, sections, speed_rows, verdict
from cpuchat.telemetry.units import about, rate, size

_SHOW_EPILOG = """\b
Examples:
  cpuchat models show unsloth/Qwen3-8B-GGUF:Q4_K_M --tensors
  cpuchat models show demo --template

MODEL is what --model takes, or a model on Hugging Face, of which only the header is fetched (a few MB)."""


_HEADER_FIGURES = (
    "name", "version", "architecture", "quantization", "n_params", "n_params_active", "n_ctx_train", "n_layer",
    "n_embd", "n_ff", "key_length", "value_length",
)  # fmt: skip


@click.command("show", epilog=_SHOW_EPILOG)
@click.argument("model", type=MODEL)
@click.option("--tensors", is_flag=True, help="Also list all tensors.")
@click.option("--metadata", is_flag=True, help="Also list all metadata.")
@click.option(
    "--template", is_flag=True, help="Print only the chat template; control characters are escaped (not in --json)."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, sizes in bytes.")
def show(model: str, tensors: bool, metadata: bool, template: bool, as_json: bool) -> int | None:
    """Show MODEL by its header: architecture, tensors by type, bytes per token, experts, tokenizer, chat template."""
    if template and (as_json or tensors or metadata):
        raise UsageError("--template cannot be combined with other options.", "Omit the other options.")
    header = find_header(model, settings.load().model.folders, Hub())
    found = inspect(header)
    if template:
        has_one = bool(found.templates)
        click.echo(found.templates[0].text if has_one else "cpuchat: This model has no chat template.", err=not has_one)
        return 0 if has_one else ModelNotFound.exit_code
    if as_json:
        described = {name: value for name, value in msgspec.structs.asdict(found).items() if name != "header"}
        plain = {name: getattr(header, name) for name in _HEADER_FIGURES} | msgspec.to_builtins(described)
        plain |= {"size": header.file_size, "path": str(header.path), "parts": header.split_count}
        plain |= {"heads": header.n_head, "settings": dict(found.settings)}
        if tensors:
            plain["tensor_list"] = msgspec.to_builtins(header.tensors)
        return print_json(plain)
    here = [("On this machine", _here(header))] if found.kind == "model" and not found.problem else []
    for number, (heading, rows) in enumerate([*sections(found, settings=metadata), *here]):
        click.echo(f"{heading}" if not number else f"\n{heading}")
        width = max(len(label) for label, _ in rows)
        for label, text in rows:
            first = f"  {label:<{width}}  " if width else "  "
            echo_paragraph(text, first, " " * len(first))
    if tensors:
        rows = [(t.name, t.type, " × ".join(map(str, t.shape)), size(t.nbytes)) for t in header.tensors]
        click.echo("")
        echo_table([("TENSOR", "TYPE", "SHAPE", "SIZE"), *rows], right=(3,))
    return None


def _here(header: GGUFHeader) -> list[tuple[str, str]]:
    """Return fit and predicted speed of a model, and what its draft head gains."""
    from cpuchat.models.drafts.choice import predict_load

    chosen = settings.load()
    tuned = TunedMachine(chosen, this_machine(chosen))
    expected, draft = predict_load(header, tuned, Library(chosen.model.folders))
    head = own_head(header, tuned.settings(header.path).load_options(), tuned.of(header.path))
    rows = [
        ("memory", expected.explained),
        ("draft", draft if expected.draft_need is not None else ""),
        *speed_rows(expected, tuned.of(header.path)),
        ("draft head", head_words(head)),
        ("", doubt(tuned.of(header.path))),
    ]
    return [row for row in rows if row[1]]


def find_model(library: Library, spec: str, *, exact: bool = False) -> LocalModel:
    """Return the model that `spec` names as `models list` does, damaged ones too, or by its path; unless `exact`, as
    all commands take it if that is one file. Raises ModelNotFound."""
    found, path = library.local_models(), paths.expanded(spec).absolute()
    for model, *names in zip(found, specs_of(found), short_specs(found), strict=True):
        if spec in names or path == model.path.absolute():
            return model
    files = [model for group in library.matching(spec) for model in group]
    if not exact and len(files) < 2:
        path = library.resolve(spec)
        if (known := next((model for model in found if model.path == path), library.at(path))) is not None:
            return known
    hint = f"You have {', '.join(library.typed_names(files))}." if files else "`cpuchat models list` has them all."
    many = f"{spec} names {len(files)} files." if len(files) > 1 else f"No model is named exactly {spec}."
    raise ModelNotFound(many, hint)


def hub_address(text: str) -> Address:
    """Return where a model is on the hub: `text` as for `parse_address`, or a catalog id such as `qwen3-8b:Q8_0`.
    Raises UsageError: it is neither; the hint names similar ids."""
    if "/" in text:
        return parse_address(text)
    catalog = load_catalog().on(this_machine(settings.load()))
    id, _, quantization = text.strip().lower().partition(":")
    if (model := catalog.find(id)) is not None:
        return Address(repo=model.repos[0], quantization=quantization.upper() or model.file)
    try:
        return parse_address(text)
    except UsageError as error:
        close = difflib.get_close_matches(id, [one.id for one in catalog.models], n=3)
        guess = f"Did you mean {' or '.join(close)}? " if close else ""
        hint = f"{guess}{error.hint} `cpuchat models catalog` lists ids."
        raise UsageError(error.message, hint) from None


def how_to_use(name: str, *, drafts: bool) -> str:
    """Return the command that uses a new model, which `drafts` for another one."""
    return f"Use it: `cpuchat -m MODEL --draft-model {name}`." if drafts else f"Start it: `cpuchat -m {name}`."


def find_header(spec: str, folders: Sequence[str], hub: Hub) -> GGUFHeader:
    """Read the header of a local model (a value of --model), else of one on the hub. `folders`: of the settings. Raises
    ModelNotFound: it is neither local nor the name of a repository; HubError and its kinds; ModelDamaged."""
    try:
        return read_model(Library(folders).resolve(spec, tell_choice))
    except ModelNotFound as error:
        missing = error
    if spec.lower().endswith(".gguf") and "://" not in spec:
        raise missing
    try:
        address = hub_address(spec)
    except UsageError:
        raise missing from None
    repository = hub.repository(address.repo, address.revision or "main")
    return hub.header(repository, choose_repo_model(repository, address.wanted))


_LIST_EPILOG = """The column -m is what --model takes; any part of a name that no other model has will do, too: `qwen`,
`qwen2.5-coder:q8_0`. TOK/S was measured in the last answer, ≈ is predicted. Folders of yours are searched once they
were typed into Ctrl+O in the app, or are in config.toml: `folders = ["/mnt/models"]` below [model]."""
_HEADINGS = ("QUANT", "SIZE", "FIT", "TOK/S", "-m", "PLACE", "USED", "CONTEXT", "FILE")
_LEAST_NAME, _LEAST_REST = 20, 44
"""Characters of a name on a narrow terminal, and with its size and type: -m may take the others, or is left out."""
_ORDERS: dict[str, Callable[[LocalModel], float]] = {"size": lambda one: one.size, "used": lambda one: one.last_used}


@click.command("list", epilog=_LIST_EPILOG)
@click.argument("words", nargs=-1)
@click.option("--sort", type=click.Choice([*_ORDERS]), help="Sort by this, the largest or latest first.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, sizes in bytes.")
def list_models(words: tuple[str, ...], sort: str | None, as_json: bool) -> None:
    """List the bundled models, those in the Hugging Face cache and your folders, and those of Ollama, LM Studio and
    llama.cpp: model by model, damaged ones last. WORDS filter by name and place."""
    chosen = settings.load()
    machine = this_machine(chosen)
    tuned = TunedMachine(chosen, machine)
    every = Library(chosen.model.folders).local_models()
    known = dict(zip((model.path for model in every), short_specs(every), strict=True))
    groups = grouped([one for one in every if is_named(one, [word.lower() for word in words], place_of(one))])
    if sort:
        groups = [[model] for model in sorted(chain(*groups), key=_ORDERS[sort], reverse=True)]
    found = [*chain(*groups)]
    specs = [known[model.path] for model in found]
    if as_json:
        rows = [msgspec.to_builtins(model, enc_hook=str) for model in found]
        for row, model, spec in zip(rows, found, specs, strict=True):
            del row["work"]
            row |= {key: row[key] or None for key in ("last_used", "measured_tok_s", "drafted_tok_s")}
            expected = estimate_local(model, tuned.of(model.path)) if model.damaged is None else None
            row |= {"spec": spec, "state": model.state, "fit": verdict(expected) or None}
            row["predicted_tok_s"] = expected.tok_s if expected is not None else None
        return print_json(rows)
    if not found:
        click.echo("cpuchat: No models found. Search for some: cpuchat models search WORDS.", err=True)
        return
    for closed in unavailable(chosen.model.folders):
        click.echo(f"cpuchat: {closed}.", err=True)
    names = [shown_name(group) for group in groups for _ in group]
    room = shutil.get_terminal_size((80, 24)).columns if is_terminal(sys.stdout) else 10_000
    typed = [spec if len(spec) <= max(room - _LEAST_REST, _LEAST_NAME) else "" for spec in map(as_typed, specs)]
    columns = [_HEADINGS, *(_columns(one, spec, tuned) for one, spec in zip(found, typed, strict=True))]
    *beside, place = (2 + max(len(row[n]) for row in columns) for n in range(6))
    left = room - sum(beside)
    names = shortened(names, max(left - place if left - place >= _LEAST_NAME else left, _LEAST_NAME))
    rows = [(name, *row) for name, row in zip(["NAME", *names], columns, strict=True)]
    echo_table(rows, right=(2, 4, 8), drop=(9, 8, 7, 6, 4, 3, 1))
    notes = filter(None, map(_remark, found))
    for note in (*notes, *(f"≈ {words}" for words in [doubt(machine)] if words)):
        click.echo(f"cpuchat: {clean_line(note)}", err=True)


def _remark(model: LocalModel) -> str:
    """Return why a model cannot be used, and what to do; "" for most."""
    file = file_name(model.path)
    why = (model.damaged or "").removeprefix(f"{file} is ")
    return f"{file}: {why}" if model.state in ("damaged", "unsupported") else ""


def _columns(model: LocalModel, spec: str, tuned: TunedMachine) -> tuple[str, ...]:
    """Return what `_HEADINGS` stand over."""
    is_sound = model.damaged is None
    expected = estimate_local(model, tuned.of(model.path)) if is_sound else None
    predicted = f"≈{about(expected.tok_s)}" if expected is not None and expected.tok_s is not None else ""
    return (
        model.quantization,
        size(model.size),
        verdict(expected) or model.state,
        rate(model.measured_tok_s) if model.measured_tok_s else predicted,
        spec,
        place_of(model),
        time.strftime("%Y-%m-%d", time.localtime(model.last_used)) if model.last_used else "",
        f"{model.n_ctx_train:,}" if is_sound and model.n_ctx_train else "",
        paths.shown(model.path),
    )


_DELETE_EPILOG = """Cached files that another model or revision shares are kept. Nothing outside the Hugging Face cache
and your folders is deleted."""


@click.command("delete", epilog=_DELETE_EPILOG)
@click.argument("spec", type=MODEL, metavar="MODEL")
@click.option("--yes", "-y", is_flag=True, help="Don't ask for confirmation.")
def delete_model(spec: str, yes: bool) -> None:
    """Delete MODEL, named as in `cpuchat models list`, and report the freed space."""
    library = Library(settings.load().model.folders)
    deletion = library.deletion(find_model(library, spec, exact=yes))
    if deletion.refused:
        raise UsageError(f"{shown_name([deletion.model])} was not deleted. {deletion.refused}")
    if not yes:
        if not is_terminal(sys.stdin):
            raise UsageError("Refusing to delete without --yes.", "Add --yes to confirm.")
        click.echo(f"Deleting {clean_line(shown_name([deletion.model]))} frees {size(deletion.freed)}:", err=True)
        for line in (*(f"delete {file}" for file in deletion.files), *deletion.stays):
            click.echo(f"  {clean_line(line)}", err=True)
        if not click.confirm("Delete?", err=True):
            raise Declined("Kept; nothing was deleted.")
    freed = delete(deletion)
    if yes:  # else it was shown before
        for line in deletion.stays:
            click.echo(f"  {clean_line(line)}")
    click.echo(f"Freed {size(freed)}.")


_VERIFY_EPILOG = f"""Files in the Hugging Face cache, of `hf download --local-dir` and in Ollama's store are compared
with the SHA-256 that they were published with; of other files only the header is checked. Exit codes: 0 all intact,
{ModelDamaged.exit_code} a file is damaged."""


@click.command("verify", epilog=_VERIFY_EPILOG)
@click.argument("specs", nargs=-1, type=MODEL, metavar="[MODEL]...")
@click.option("--all", "everything", is_flag=True, help="Check all models on this machine.")
def verify(specs: tuple[str, ...], everything: bool) -> int:
    """Read each MODEL and compare its checksum; `cpuchat models list` then marks damaged models."""
    if bool(specs) == everything:
        raise UsageError("No models named.", "Name the models to verify, or give --all.")
    library = Library(settings.load().model.folders)
    models = library.local_models() if everything else [find_model(library, spec) for spec in specs]
    terminal, is_damaged, unchecked = TerminalOutput(), False, False
    for model, name in zip(models, library.typed_names(models), strict=True):
        result = library.verify(
            model, lambda done, of, name=name: terminal.status(f"checking {name} {100 * done // max(of, 1)} %")
        )
        is_damaged |= result.state == "damaged"
        why = f"  ({clean_line(result.words)})" if result.words != UNCHECKED else ""
        terminal.line(f"{result.state:<9}  {name}{why}")
        unchecked |= result.words == UNCHECKED
    if unchecked:
        terminal.note(f"unchecked: {UNCHECKED}.")
    return ModelDamaged.exit_code if is_damaged else 0
