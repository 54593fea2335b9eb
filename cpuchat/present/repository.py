"""How the models of a repository read: one line each in the list, and all about the marked one. Plain functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat import paths
from cpuchat.errors import AccessDenied, CpuchatError
from cpuchat.models.downloads.state import Download
from cpuchat.models.hub.repository import RepoModel, Repository
from cpuchat.present import downloads, prediction
from cpuchat.present.rows import ListRow
from cpuchat.telemetry import units
from cpuchat.text import clean_line

if TYPE_CHECKING:
    from cpuchat.models.drafts.beside import Beside
    from cpuchat.models.prediction import Prediction

_PARTS_HEADING = "draft heads, image and audio parts: not models"


def key_of(model: RepoModel) -> str:
    """The path of its first file: no other model of the repository has it."""
    return model.files[0].path


@dataclass(frozen=True)
class Known:
    """What is known about one model of a repository. `path`: it is here, and can be loaded from there;
    `arrived`: bytes of it that are here, whatever became of their download.

    `outlook` is None until it is known, and for what is no language model; `draft` is counted in it. `problem`: why the
    header can't be read.
    """

    model: RepoModel
    path: Path | None = None
    arrived: int = 0
    loaded: bool = False
    download: Download | None = None
    outlook: Prediction | None = None
    draft: Beside | None = None
    problem: CpuchatError | None = None

    @property
    def key(self) -> str:
        return key_of(self.model)


def heading(repository: Repository) -> str:
    """`1.2M downloads · 2025-11-03 · apache-2.0 · gated`."""
    parts = [
        f"{units.count(repository.downloads)} downloads" if repository.downloads else "",
        repository.updated,
        repository.license,
        "gated" if repository.gated else "",
        "private" if repository.private else "",
    ]
    return " · ".join(clean_line(part) for part in parts if part)


def rows(models: Sequence[Known]) -> list[ListRow]:
    """Language models first, then heads and the parts for images and sound under a heading."""
    chat = [row(known) for known in models if known.model.kind == "model"]
    other = [row(known) for known in models if known.model.kind != "model"]
    return chat + ([ListRow(name=_PARTS_HEADING), *other] if other else [])


def row(known: Known) -> ListRow:
    """`◌ Qwen2.5-7B-Instruct  Q4_K_M  4.7 GB  fits  ≈10 tok/s`."""
    model, download, outlook = known.model, known.download, known.outlook
    speed = "" if outlook is None or known.loaded else prediction.speed(outlook)
    mark, state = "◌", "" if outlook is None else prediction.verdict(outlook)
    if not model.complete:
        mark, state = "!", "incomplete"
    elif isinstance(known.problem, AccessDenied):
        state = "closed"
    if known.path is not None:
        mark, state = ("●", "loaded") if known.loaded else ("○", "here")
    elif download is not None:
        mark = downloads.mark(download)
        state = {"paused": "paused", "failed": "failed", "queued": "queued", "checking": "checking"}.get(
            download.state, downloads.percent(download).strip()
        )
    elif part := _part(known):
        state = f"{part} here"
    columns = (model.quantization or "–", units.size(model.size), state, speed)
    return ListRow(known.key, mark, downloads.name(model), columns, strong=known.loaded,
                   dim=known.path is None and download is None)  # fmt: skip


def details(known: Known, repository: Repository) -> list[tuple[str, str]]:
    """Label and text, what matters most first: a small screen cuts off the end."""
    model, outlook, download = known.model, known.outlook, known.download
    parts = f" in {units.plural(len(model.files), 'part')}" if len(model.files) > 1 else ""
    lines = [
        ("problem", clean_line(str(known.problem)) if known.problem is not None else ""),
        ("problem", downloads.problem(download) if download is not None else ""),
        ("size", units.size(model.size) + parts),
        ("memory", outlook.explained if outlook is not None else ""),
        ("speed", prediction.speed_and_why(outlook) if outlook is not None else ""),
        ("context", prediction.context(outlook) if outlook is not None else ""),
        ("draft", _draft(known)),
        ("next", _next(known)),
        ("file", clean_line(known.key)),
        ("made from", clean_line(repository.base_model)),
        ("path", clean_line(paths.shown(known.path)) if known.path is not None else ""),
    ]
    return [(label, text) for label, text in lines if text]


def _draft(known: Known) -> str:
    """Which draft model is counted, and whether it is here."""
    if known.draft is None or known.outlook is None or known.outlook.draft_need is None:
        return ""
    return known.draft.name + ("" if known.draft.here else ": the catalog's for it, not here yet")


def _next(known: Known) -> str:
    """What Enter does, in words."""
    download = known.download
    if known.loaded:
        return "this is the loaded model"
    if known.path is not None:
        return "Enter loads it" if known.model.kind == "model" else "it is here"
    if isinstance(known.problem, AccessDenied):
        return "Ctrl+R asks again, once it is open for you"
    if not known.model.complete:
        return "parts of it are missing in the repository: choose another one"
    if download is not None and download.state == "failed":
        return "Enter tries again"
    if download is not None and download.state == "paused":
        return "Enter goes on with the download"
    if download is not None:
        return "it is on its way; Space pauses it"
    if part := _part(known):
        missing = units.size(known.model.size - known.arrived)
        return f"Enter goes on with its download: {part} is here already, {missing} are missing"
    return f"Enter downloads it: {units.size(known.model.size)}"


def _part(known: Known) -> str:
    """`61 %` of it that an earlier download left; "" for less than one hundredth."""
    share = int(100 * known.arrived / known.model.size) if known.model.size else 0
    return f"{min(share, 99)} %" if share else ""
