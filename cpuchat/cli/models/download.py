"""`cpuchat models download`: download a model and verify it; shows its memory need and speed here first."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cpuchat.cli.models.specs import hub_address
from cpuchat.cli.options import ctx_option, laid_over
from cpuchat.cli.output import json_line
from cpuchat.cli.terminal import Terminal
from cpuchat.errors import Interrupted, UsageError, from_code
from cpuchat.models.heads import ONLY_ENGINE, kind_named, title
from cpuchat.models.hub.choice import choose
from cpuchat.models.hub.client import Hub
from cpuchat.models.machine import this_machine
from cpuchat.telemetry import units
from cpuchat.text import clean_line

if TYPE_CHECKING:
    from cpuchat.models.downloads.state import Download
    from cpuchat.models.hub.repository import RepoModel, Repository
    from cpuchat.models.repository_prediction import ModelPrediction
    from cpuchat.settings import Settings

_DOWNLOAD_EPILOG = f"""\b
Examples:
  cpuchat models download qwen2.5-1.5b-instruct               an id from `cpuchat models catalog`
  cpuchat models download Qwen/Qwen2.5-1.5B-Instruct-GGUF
  cpuchat models download bartowski/Qwen2.5-7B-Instruct-GGUF:Q8_0
  cpuchat models download https://huggingface.co/OWNER/NAME/blob/main/x.gguf
  cpuchat models download ggml-org/gpt-oss-20b-GGUF:eagle3-gpt-oss-20b-Q8_0      a draft head

Default quantization: Q4_K_M, or the nearest available. Files go into the Hugging Face cache (HF_HOME, HF_HUB_CACHE) and
are verified against the SHA-256 that Hugging Face publishes. An interrupted download resumes from its last byte.
Exit code {Interrupted.exit_code} after Ctrl+C."""


@click.command("download", epilog=_DOWNLOAD_EPILOG)
@click.argument("repo", metavar="REPO[:QUANT|:FILE]|ID[:QUANT]|URL")
@click.option("--revision", metavar="REV", default="", help="Branch, tag or commit; default: newest commit.")
@ctx_option()
@click.option("--yes", "-y", is_flag=True, help="Don't ask if it is too large for this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when done, sizes in bytes.")
def download(repo: str, revision: str, yes: bool, as_json: bool, **values: Any) -> int:
    """Download a model and print the path of its (first) file."""
    chosen = laid_over(values)
    address = hub_address(repo)
    hub, terminal = Hub(), Terminal()
    repository = hub.repository(address.repo, revision or address.revision or "main")
    model = choose(repository, address.wanted, heads=True)
    _introduce(terminal, repository, model)
    if model.kind == "head":
        _explain_head(terminal, model)
    else:
        predicted = _predicted(hub, repository, model, chosen)
        _explain(terminal, predicted)
        if predicted.damaged or predicted.prediction.verdict == "too large":
            _ask(yes, as_json)
    done = asyncio.run(_download(repository, model, _Shown(terminal)))
    terminal.clear_progress()
    if done.state == "failed":
        raise from_code(done.code, done.message, done.hint)
    if done.state != "done":
        raise Interrupted(
            f"Stopped at {_share(done)}; the partial file is kept.",
            f"Resume with `cpuchat models download {repo}`.",
        )
    _tell(terminal, repository, done, as_json=as_json)
    return 0


def _predicted(hub: Hub, repository: Repository, model: RepoModel, chosen: Settings) -> ModelPrediction:
    from cpuchat.models.repository_prediction import predict_repository

    alone = msgspec.structs.replace(repository, models=(model,))
    return next(predict_repository(hub, alone, chosen.load_options(), this_machine(chosen)))


def _introduce(terminal: Terminal, repository: Repository, model: RepoModel) -> None:
    files = f", {len(model.files)} files" if len(model.files) > 1 else ""
    terminal.note(f"{clean_line(repository.id)}: {clean_line(model.name)} ({units.size(model.size)}{files})")


def _explain_head(terminal: Terminal, model: RepoModel) -> None:
    """Memory and speed depend on the target, which is not named here."""
    kind = kind_named(model.files[0].path)
    terminal.note(f"  {title(kind) if kind is not None else 'draft head'}: {ONLY_ENGINE}")


def _explain(terminal: Terminal, predicted: ModelPrediction) -> None:
    if predicted.problem:
        terminal.warn(f"  ! {clean_line(predicted.problem)}")
    if not predicted.damaged:
        terminal.note(f"  {predicted.prediction.explained}")
        speed = predicted.prediction.tok_s
        about = f"≈ {units.about(speed)} tok/s: " if speed is not None else ""
        terminal.note(f"  {about}{predicted.prediction.basis}")


def _ask(yes: bool, as_json: bool) -> None:
    """Ask whether to download it anyway. Raises Interrupted or UsageError if not."""
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        raise UsageError("It does not fit into the available memory.", "Add --yes to download it anyway.")
    if not click.confirm("Download it anyway?", err=True):
        raise Interrupted("Nothing was downloaded.")


async def _download(repository: Repository, model: RepoModel, shown: _Shown) -> Download:
    """Return its last state. Ctrl+C cancels this task, which pauses the download."""
    from cpuchat.models.downloads.manager import Downloads

    downloads = Downloads(changed=shown.show)
    try:
        id = downloads.start(repository.id, repository.revision, model, repository.newest_at).id
        try:
            return await downloads.wait(id)
        except asyncio.CancelledError:
            downloads.pause(id)
            return await downloads.wait(id)
    finally:
        await downloads.close()


class _Shown:
    """Shows the progress: one updated line on a terminal, else a line for each tenth and for each fault."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._last = ""

    def show(self, download: Download) -> None:
        if self._terminal.moves:
            self._terminal.status(_line(download))
            return
        tenth = int(10 * download.share)
        step = download.message if download.state == "waiting" else f"{download.state} {tenth}"
        if step != self._last and download.state in ("running", "waiting", "checking"):
            self._terminal.note(_line(download))
            self._last = step


def _line(download: Download) -> str:
    far = f"{_share(download):>5}  {units.size(download.done)} of {units.size(download.total)}"
    match download.state:
        case "running" if download.seconds_left is not None:
            return f"{far}  {units.size(int(download.speed))}/s  {units.time_left(download.seconds_left)}"
        case "waiting":
            again = f" Retrying in {download.retry_in:.0f} s." if download.retry_in else ""
            return f"{far}  {download.message}{again}"
        case "checking":
            checked = 100 * download.checked // max(download.total, 1)
            return f"{far}  verifying {checked} %"
        case _:
            return far


def _share(download: Download) -> str:
    return f"{100 * download.done // max(download.total, 1)} %"


def _tell(terminal: Terminal, repository: Repository, done: Download, *, as_json: bool) -> None:
    if as_json:
        files = [{"path": file.path, "size": file.size, "sha256": file.sha256} for file in done.model.files]
        facts = {"repo": done.repo, "revision": done.revision, "quantization": done.model.quantization}
        click.echo(json_line({**facts, "path": done.path, "size": done.total, "files": files}))
        return
    terminal.line(clean_line(done.path))
    if done.model.kind == "head":
        head = clean_line(done.path)
        terminal.note(f"Downloaded and verified. Use it: `cpuchat --model MODEL --draft-model {head}`.")
        return
    spec = f"{repository.id}:{done.model.quantization}" if done.model.quantization else done.path
    terminal.note(f"Downloaded and verified. Start it: `cpuchat --model {clean_line(spec)}`.")
