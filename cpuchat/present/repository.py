"""Formats models of a repository as list rows and details."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat import paths
from cpuchat.errors import AccessDenied, CpuchatError
from cpuchat.models.downloads.state import Download
from cpuchat.models.heads import ONLY_ENGINE, TITLES, kind_named
from cpuchat.models.hub.repository import RepoModel, Repository
from cpuchat.present import downloads, prediction
from cpuchat.present.rows import ListRow
from cpuchat.telemetry import units
from cpuchat.text import clean_line

if TYPE_CHECKING:
    from cpuchat.models.drafts.choice import PlannedDraft
    from cpuchat.models.prediction import Prediction

_PARTS_HEADING = "Draft heads and multimodal projectors (not models)"


def key_of(model: RepoModel) -> str:
    """Return the path of its first file, which is unique in the repository."""
    return model.files[0].path


@dataclass(frozen=True)
class Known:
    """One model of a repository. `path`: where it is on this machine; `arrived`: bytes of it on this machine, whatever
    became of their download.

    `prediction` is None until it is known, and for what is no language model; `draft` is counted in it. `problem`: why
    the header can't be read.
    """

    model: RepoModel
    path: Path | None = None
    arrived: int = 0
    loaded: bool = False
    download: Download | None = None
    prediction: Prediction | None = None
    draft: PlannedDraft | None = None
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
    """Return the rows: language models first, then heads and multimodal projectors under a heading."""
    chat = [row(known) for known in models if known.model.kind == "model"]
    other = [row(known) for known in models if known.model.kind != "model"]
    return chat + ([ListRow(name=_PARTS_HEADING), *other] if other else [])


def row(known: Known) -> ListRow:
    """`◌ Qwen2.5-7B-Instruct  Q4_K_M  4.7 GB  fits  ≈10 tok/s`."""
    model, download, predicted = known.model, known.download, known.prediction
    mark, state = "◌", "" if predicted is None else prediction.fit(predicted)
    if not model.complete:
        mark, state = "!", "incomplete"
    elif isinstance(known.problem, AccessDenied):
        state = "no access"
    if known.path is not None:
        mark, state = ("●", "loaded") if known.loaded else ("○", "downloaded")
    elif download is not None:
        mark = downloads.mark(download)
        state = {"paused": "paused", "failed": "failed", "queued": "queued", "checking": "verifying"}.get(
            download.state, downloads.percent(download).strip()
        )
    elif part := _part(known):
        state = f"paused {part}"
    speed = "" if known.loaded else prediction.speed(predicted)
    columns = (model.quantization or "–", units.size(model.size), state, speed)
    return ListRow(known.key, mark, downloads.name(model), columns, strong=known.loaded,
                   dim=known.path is None and download is None)  # fmt: skip


def details(known: Known, repository: Repository) -> list[tuple[str, str]]:
    """Return labels and texts, the most important first: a small screen cuts off the end."""
    model, predicted, download = known.model, known.prediction, known.download
    parts = f" in {units.plural(len(model.files), 'part')}" if len(model.files) > 1 else ""
    lines = [
        ("problem", clean_line(str(known.problem)) if known.problem is not None else ""),
        ("problem", downloads.problem(download) if download is not None else ""),
        ("size", units.size(model.size) + parts),
        ("memory", predicted.explained if predicted is not None else ""),
        ("speed", prediction.speed_with_basis(predicted)),
        ("context", prediction.context(predicted) if predicted is not None else ""),
        ("draft", _draft(known)),
        ("head", _head(known)),
        ("next", _next(known)),
        ("file", clean_line(known.key)),
        ("base model", clean_line(repository.base_model)),
        ("path", clean_line(paths.shown(known.path)) if known.path is not None else ""),
    ]
    return [(label, text) for label, text in lines if text]


def _head(known: Known) -> str:
    """Return what kind of draft head it is, and what can use it; "" for other files."""
    kind = kind_named(known.key)
    return "" if kind is None else f"{TITLES[kind]}, drafts for the models of this repository; {ONLY_ENGINE}"


def _draft(known: Known) -> str:
    """Return which draft model is counted, and whether it is downloaded."""
    if known.draft is None or known.prediction is None or known.prediction.draft_need is None:
        return ""
    return known.draft.name + ("" if known.draft.here else " (from the catalog, not downloaded)")


def _next(known: Known) -> str:
    """Return what Enter does, in words."""
    download = known.download
    if known.loaded:
        return "currently loaded"
    if known.path is not None:
        if known.model.kind == "head":
            return "downloaded: load its model, then Ctrl+L"
        return "Enter load" if known.model.kind == "model" else "downloaded"
    if isinstance(known.problem, AccessDenied):
        return "Ctrl+R retry once you have access"
    if not known.model.complete:
        return "parts are missing in the repository: choose another file"
    if download is not None and download.state == "failed":
        return "Enter retry"
    if download is not None and download.state == "paused":
        return "Enter resume the download"
    if download is not None:
        return "downloading · Space pause"
    if part := _part(known):
        missing = units.size(known.model.size - known.arrived)
        return f"Enter resume the download ({part} done, {missing} left)"
    return f"Enter download {units.size(known.model.size)}"


def _part(known: Known) -> str:
    """Return `61 %` for an earlier partial download; "" for less than one hundredth."""
    share = int(100 * known.arrived / known.model.size) if known.model.size else 0
    return f"{min(share, 99)} %" if share else ""
