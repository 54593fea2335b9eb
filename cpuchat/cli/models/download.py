"""`cpuchat models download`, `catalog` (recommended models, with fit and speed here) and `search` on Hugging Face."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

import click
import msgspec

from cpuchat.base import errors
from cpuchat.base.errors import CpuchatError, Interrupted, ModelDamaged, ModelUnsupported, UsageError
from cpuchat.base.text import clean_line
from cpuchat.cli.completion import NamesByTab
from cpuchat.cli.models.library import how_to_use, hub_address
from cpuchat.cli.options import laid_over, setting
from cpuchat.cli.output import is_terminal, print_json
from cpuchat.cli.terminal import TerminalOutput, echo_paragraph, echo_table
from cpuchat.config import settings
from cpuchat.models.catalog import CatalogModel, estimates, load_catalog, match_local, ranked
from cpuchat.models.downloads.manager import Downloads
from cpuchat.models.downloads.state import Download
from cpuchat.models.drafts.candidates import usual_head
from cpuchat.models.heads import kind_named, title
from cpuchat.models.hub.client import Hub
from cpuchat.models.hub.repository import RepoModel, Repository, choose_repo_model
from cpuchat.models.library.library import Library
from cpuchat.models.machine import this_machine
from cpuchat.models.prediction import Prediction, estimate, predict
from cpuchat.models.support import check_supported
from cpuchat.present import downloads as progress
from cpuchat.present.models import decision_rows, doubt, verdict
from cpuchat.present.plan import not_free
from cpuchat.telemetry import units
from cpuchat.telemetry.units import size

_DOWNLOAD_EPILOG = """\b
Examples:
  cpuchat models download qwen2.5-1.5b-instruct    an id of the catalog
  cpuchat models download https://huggingface.co/OWNER/NAME/blob/main/x.gguf
  cpuchat models download ggml-org/gpt-oss-20b-GGUF:eagle3-gpt-oss-20b-Q8_0

Default quantization: Q4_K_M, or the nearest available. Files go into the Hugging Face cache (HF_HOME, HF_HUB_CACHE) and
are verified against the SHA-256 that Hugging Face publishes. An interrupted download resumes from its last byte."""


@click.command("download", epilog=_DOWNLOAD_EPILOG)
@click.argument(
    "repo",
    type=NamesByTab(lambda: [one.id for one in load_catalog().models]),
    metavar="REPO[:QUANT|:FILE]|ID[:QUANT]|URL",
)
@setting("engine.ctx")
@click.option("--yes", "-y", is_flag=True, help="Don't ask if it is too large or unsupported here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when done, sizes in bytes.")
def download(repo: str, yes: bool, as_json: bool, **values: Any) -> None:
    """Download a model and print the path of its (first) file."""
    chosen = laid_over(values)
    address = hub_address(repo)
    hub, terminal = Hub(), TerminalOutput()
    repository = hub.repository(address.repo, address.revision or "main")
    model = choose_repo_model(repository, address.wanted, heads=True)
    parts = f", {len(model.files)} files" if model.files[1:] else ""
    terminal.note(f"{clean_line(repository.id)}: {clean_line(model.name)} ({units.size(model.size)}{parts})")
    is_head = model.kind == "head"
    if is_head:  # memory and speed depend on the target, which is not named here
        kind = kind_named(model.files[0].path)
        terminal.note(f"  {title(kind) if kind is not None else 'draft head'}")
    elif (why_not := _explain(terminal, hub, repository, model, chosen)) and not yes:
        if as_json or not is_terminal(sys.stdin):
            raise UsageError(clean_line(why_not), "Add --yes to download it anyway.")
        if not click.confirm("Download it anyway?", err=True):
            raise errors.Declined("Nothing was downloaded.")
    done = asyncio.run(_download(repository, model, terminal))
    terminal.clear_progress()
    if done.state == "failed":
        raise errors.from_code(done.code, done.message, done.hint)
    if done.state != "done":
        raise Interrupted(
            f"Stopped at{progress.percent(done)}; the partial file is kept.",
            f"Resume with `cpuchat models download {repo}`.",
        )
    if as_json:
        files = [{"path": file.path, "size": file.size, "sha256": file.sha256} for file in model.files]
        facts = {"repo": repository.id, "revision": done.order.revision, "quantization": model.quantization}
        return print_json({**facts, "path": done.path, "size": done.total, "files": files})
    path = clean_line(done.path)
    terminal.line(path)
    spec = clean_line(f"{repository.id}:{model.quantization}") if model.quantization else path
    terminal.note(f"Downloaded and verified. {how_to_use(path if is_head else spec, drafts=is_head)}")


def _explain(
    terminal: TerminalOutput, hub: Hub, repository: Repository, model: RepoModel, chosen: settings.Settings
) -> str:
    """Print fit and speed by the header of a model, by its size where the header cannot be read. Returns why not to
    download it, or ""."""
    machine = this_machine(chosen)
    try:
        header = hub.header(repository, model)
        check_supported(header)
    except (ModelDamaged, ModelUnsupported) as error:
        terminal.warn(f"  ! {clean_line(error.message)}")
        return error.message
    except CpuchatError:  # the download says why, if it fails, too
        terminal.warn("  ! The header could not be read; what follows is estimated from the size.")
        predicted = estimate(model.size, machine, quantization=model.quantization)
    else:
        predicted = predict(header, chosen.load_options(), machine)
    for _, text in decision_rows(predicted):
        terminal.note(f"  {text}")
    return "It does not fit into the available memory." if predicted.needed > predicted.available else ""


async def _download(repository: Repository, model: RepoModel, terminal: TerminalOutput) -> Download:
    """Return its last state; shows one updated line on a terminal, else a line for each tenth and for each fault.

    Ctrl+C cancels this task, which pauses the download."""
    last = ""

    def show(download: Download) -> None:
        nonlocal last
        is_waiting = download.state == "waiting"
        state = download.message if is_waiting else progress.state(download)
        line = f"{progress.percent(download)}  {progress.amount(download)}  {state}".rstrip()
        step = download.message if is_waiting else f"{download.state} {int(10 * download.share)}"
        if terminal.moves:
            terminal.status(line)
        elif step != last and download.state in ("running", "waiting", "checking"):
            terminal.note(line)
            last = step

    downloads = Downloads(changed=show)
    try:
        id = downloads.start(repository.id, repository.revision, model, repository.newest_at).id
        try:
            return await downloads.wait(id)
        except asyncio.CancelledError:
            downloads.pause(id)
            return await downloads.wait(id)
    finally:
        await downloads.close()


_CATALOG_EPILOG = """WORDS filter by name, family or publisher. `models download` computes fit and speed from the header
first. Add your own entries to catalog.toml in the config folder, in the format of the built-in one."""


@click.command("catalog", epilog=_CATALOG_EPILOG)
@click.argument("words", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array, sizes in bytes by quantization.")
def catalog(words: tuple[str, ...], as_json: bool) -> None:
    """List chat models with their GGUF repositories, fit and speed on this machine, and draft models."""
    chosen = settings.load()
    machine = this_machine(chosen)
    known = load_catalog().on(machine)
    for problem in known.problems:
        click.echo(f"cpuchat: {clean_line(problem)}", err=True)
    wanted = " ".join(words)
    one = known.find(wanted.lower())
    found = [one] if one is not None else known.search(wanted)
    matches = ((match_local(known, model), model) for model in Library(chosen.model.folders).local_models())
    here: dict[str, dict[str, int]] = {}  # sizes by quantization
    for entry, model in matches:
        if entry is not None:
            here.setdefault(entry.id, {})[model.quantization] = model.size
    expected = estimates(known.models, machine)
    if as_json:
        rows = list[dict[str, Any]]()
        for model in found:
            predicted = expected.get(model.id)
            figures = {"fit": verdict(predicted) or None, "predicted_tok_s": predicted and predicted.tok_s}
            figures["head"] = msgspec.to_builtins(usual_head(model, machine))
            figures["sizes"] = {name: round(1e9 * size) for name, size in model.sizes.items()}
            rows.append({**msgspec.to_builtins(model), "spec": model.spec, "here": model.id in here, **figures})
        return print_json(rows)
    if not found:
        click.echo(f"cpuchat: No catalog entry matches {clean_line(repr(wanted))}.", err=True)
        click.echo("  Search Hugging Face: cpuchat models search WORDS.", err=True)
        return
    recommended = ranked(known.models, expected).purposes
    found.sort(key=lambda model: [*recommended, model.id].index(model.id))
    rows = [_row(model, expected.get(model.id), here, recommended) for model in found]
    echo_table([("ID", "PARAMS", "SIZE", "FIT", "TOK/S"), *rows], right=(1, 2, 4), drop=(1, 2))
    footnotes = [
        f"FIT and TOK/S are estimated from the file size; `not free` {not_free(machine.available)}",
        "★ recommended here, for chats if nothing else is named. ○ downloaded. ? repository, ≈ size not verified.",
        "Download one: cpuchat models download ID.",
    ]
    footnotes += filter(None, [doubt(machine)])
    click.echo(err=True)
    for note in footnotes:
        echo_paragraph(note, err=True)


def _row(
    model: CatalogModel, expected: Prediction | None, here: Mapping[str, Mapping[str, int]],
    recommended: Mapping[str, str],
) -> tuple[str, ...]:  # fmt: skip
    purpose_of = recommended.get(model.id, "")
    star = f" ★ {purpose_of}".removesuffix(" chat") if purpose_of else ""
    marks = f"{star}{' ○' * (model.id in here)}{' ?' * ('repo' not in model.verified)}"
    params = units.parameters(round(1e9 * model.params))
    if model.is_moe:  # total (active)
        params += f" ({units.parameters(round(1e9 * model.active_params))})"
    own = here.get(model.id, {}).get(model.quantization, 0)
    about = "" if own or model.quantization in model.verified else "≈"
    n_bytes = f"{about}{size(own or round(1e9 * model.sizes[model.quantization]))}" if own or model.size else ""
    speed = f"≈{units.about(expected.tok_s)}" if expected is not None and expected.tok_s is not None else ""
    return model.id + marks, params, n_bytes, verdict(expected), speed


_SEARCH_EPILOG = "Example: `cpuchat models search qwen3 8b`. Respects HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE."


@click.command("search", epilog=_SEARCH_EPILOG)
@click.argument("words", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def search(words: tuple[str, ...], as_json: bool) -> None:
    """Search Hugging Face for the 30 most downloaded repositories with GGUF files that match."""
    query = " ".join(words)
    found = Hub().search(query)
    if as_json:
        return print_json(msgspec.to_builtins(found))
    if not found:
        click.echo(f"cpuchat: No GGUF repositories match {clean_line(query)!r}.", err=True)
        click.echo("  Use fewer words: a repository's name must contain all of them.", err=True)
        return
    rows = [("REPOSITORY", "PARAMS", "ARCH", "DOWNLOADS", "UPDATED", "ACCESS")]
    for one in found:
        params = units.parameters(one.n_params) if one.n_params else ""
        access = "private" if one.private else "gated" if one.gated else ""
        rows.append((one.id, params, one.architecture, f"{one.downloads:,}", one.updated, access))
    echo_table(rows, right=(1, 3))
