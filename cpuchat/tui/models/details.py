"""Details of the selected entry as labelled lines. Plain functions, no widgets."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuchat import paths
from cpuchat.models.catalog import Catalog, CatalogModel, match_local
from cpuchat.models.downloads.state import RUNNING, Download
from cpuchat.models.hub.repository import FoundRepository
from cpuchat.models.library.deleting import Deletion
from cpuchat.models.library.model import LocalModel
from cpuchat.present import downloads, prediction
from cpuchat.present.inspection import kv_growth
from cpuchat.servers import Source
from cpuchat.telemetry import units
from cpuchat.telemetry.units import tokens
from cpuchat.text import clean_line
from cpuchat.tui.models.entries import HubSearch, ServerEntry, Subject, TypedFile

if TYPE_CHECKING:
    from cpuchat.models.prediction import Prediction

Row = tuple[str, str]

_MOST_FILES = 4  # of a deletion that are named

SOURCES = {"demo": "comes with cpuchat", "huggingface": "Hugging Face", "folder": "your folder"}


@dataclass(frozen=True)
class ModelDetails:
    """The facts about one entry. `kv_per_token` and `kv_windowed` as in `Inspection`; `draft` is what would be loaded
    beside it, and `problem` why its header cannot be read. `reading`: it is being read, `prediction` is estimated by
    the size so far; None: unknown.
    """

    prediction: Prediction | None = None
    kv_per_token: int = 0
    kv_windowed: int = 0
    draft: str = ""
    problem: str = ""
    reading: bool = False


def rows(subject: Subject, known: ModelDetails, catalog: Catalog | None, loaded: Source | None) -> list[Row]:
    """Return labels and cleaned texts, the most important first: small terminals cut the last lines."""
    match subject:
        case LocalModel() as model:
            entry = match_local(catalog, model) if catalog is not None and not model.damaged else None
            found = _local(model, known, loaded, entry)
        case Download() as download:
            found = downloads.details(download)
        case CatalogModel() as model:
            found = _catalog(model, known, catalog)
        case FoundRepository() as repository:
            found = _repository(repository)
        case TypedFile() as file:
            found = [("path", paths.shown(file.path)), ("problem", file.problem)]
        case ServerEntry() as served:
            found = _on_server(served)
        case HubSearch() as search:
            found = _search(search)
    return [(label, clean_line(text)) for label, text in found if text]


def keys(subject: Subject) -> str:
    """Return what the keys do with the subject, for the border of the pane."""
    match subject:
        case LocalModel(damaged=str()) as model:
            return "Enter resume the download · Del delete" if resumable(model) else "Del delete"
        case LocalModel():
            return "Enter load · F5 quantize · Del delete"
        case Download() as download:
            return f"Enter {_download_key(download)}"
        case CatalogModel() | FoundRepository():
            return "Enter show files"
        case TypedFile(problem=""):
            return "Enter load"
        case ServerEntry(is_invalid=True):
            return ""
        case ServerEntry() as served:
            return "Enter retry" if served.problem else "Enter connect" if served.model is None else "Enter use"
        case HubSearch(running=False, found=None, problem=problem):
            return "Enter retry" if problem else "Enter open" if subject.is_link else "Enter search"
        case _:
            return ""


def resumable(model: LocalModel) -> bool:
    """Return whether it is a partial download of a known repository."""
    return model.unfinished is not None and bool(model.repo)


def _local(model: LocalModel, known: ModelDetails, loaded: Source | None, entry: CatalogModel | None) -> list[Row]:
    if model.damaged:
        return [
            ("problem", model.damaged),
            ("size", units.size(model.size) if model.size else ""),
            *_place(model),
        ]
    kind = [f"{units.parameters(model.n_params)} parameters" if model.n_params else "", model.architecture]
    if model.n_expert:
        active = f"{units.parameters(model.n_params_active)} active, " if model.n_params_active else ""
        kind[0] += f", {active}{model.n_expert_used} of {model.n_expert} experts per token"
    kind.append(f"{tokens(model.n_ctx_train)} context" if model.n_ctx_train else "")
    speed = prediction.speed_with_basis(known.prediction)
    if model.measured_tok_s:
        measured = [f"{units.rate(model.measured_tok_s)} tok/s plain"]
        if model.drafted_tok_s:
            measured.append(f"{units.rate(model.drafted_tok_s)} with drafts")
        speed = f"{', '.join(measured)}: measured in the last chat"
    if not model.has_template:
        kind.append("no chat template: base model, continues text")
    return [
        ("model", " · ".join(filter(None, kind))),
        *_memory(known),
        ("speed", speed),
        ("purpose", prediction.purpose(entry) if entry is not None else ""),
        ("draft", _draft(known, is_loaded=model.path == loaded)),
        ("reads", _reads(known)),
        *_place(model, "now" if model.path == loaded else units.ago(model.last_used, time.time())),
    ]


def _place(model: LocalModel, used: str = "") -> list[Row]:
    where = filter(None, (SOURCES.get(model.source, model.source), model.repo, f"used {used}" if used else ""))
    return [("from", " · ".join(where)), ("path", paths.shown(model.path))]


def _memory(known: ModelDetails) -> list[Row]:
    if known.problem:
        return [("problem", known.problem)]
    return [("memory", known.prediction.explained)] if known.prediction is not None else []


def _reads(known: ModelDetails) -> str:
    if known.reading:
        return "Reading the header…"
    if known.prediction is None:
        return ""
    reads = [f"{units.size(known.prediction.bytes_per_token)} per token" if known.prediction.bytes_per_token else ""]
    growth = kv_growth(known.kv_per_token, known.kv_windowed)
    reads.append(f"KV {growth}" if growth else "")
    return " · ".join(filter(None, reads))


def _draft(known: ModelDetails, *, is_loaded: bool) -> str:
    if known.reading:
        return "…"
    if known.problem:
        return ""
    return known.draft or f"none: Ctrl+L lists candidates{'' if is_loaded else ' when it is loaded'}"


def _catalog(model: CatalogModel, known: ModelDetails, catalog: Catalog | None) -> list[Row]:
    kind = [f"{units.parameters(round(1e9 * model.params))} parameters"]
    if model.is_moe:
        kind[0] += f", {units.parameters(round(1e9 * model.active_params))} active"
    kind.append(f"{tokens(model.context)} context" if model.context else "")
    sizes = [f"{name} {units.size(round(size * 1e9))}" for name, size in model.sizes.items()]
    drafts = [draft.name for draft in catalog.drafts_of(model)] if catalog is not None else []
    if sizes and model.quantization not in model.verified:
        sizes.append("estimated")
    return [
        ("model", " · ".join(filter(None, (*kind, str(model.year), model.license)))),
        *_memory(known),
        ("speed", prediction.speed_with_basis(known.prediction)),
        ("purpose", prediction.purpose(model)),
        ("note", model.note),
        ("drafts", ", ".join(drafts) or (f"none ({model.why_no_draft})" if model.why_no_draft else "")),
        ("sizes", " · ".join(sizes)),
        ("from", model.repos[0]),
    ]


def _repository(found: FoundRepository) -> list[Row]:
    kind = [f"{units.parameters(found.n_params)} parameters" if found.n_params else "", found.architecture]
    gated = "accept its terms on huggingface.co, then run `hf auth login`" if found.gated else ""
    return [
        ("model", " · ".join(filter(None, kind))),
        ("downloads", f"{units.count(found.downloads)} in 30 days · {units.plural(found.likes, 'like')}"),
        ("updated", found.updated),
        ("gated", gated),
        ("private", "needs your token" if found.private else ""),
    ]


def _on_server(served: ServerEntry) -> list[Row]:
    model = served.model
    if model is None:
        problem = [("problem", served.problem), ("what to do", served.hint)]
        return [*problem, ("server", served.source.server)]
    kind = [f"{units.parameters(model.n_params)} parameters" if model.n_params else "", model.architecture]
    kind.append(f"{tokens(model.n_ctx)} context" if model.n_ctx else "")
    return [
        ("model", " · ".join(filter(None, kind))),
        ("name", model.name),
        ("server", f"{served.kind} · {served.source.server}"),
    ]


def _download_key(download: Download) -> str:
    if download.state in RUNNING:
        return "shows all downloads"
    return "resumes" if download.state == "paused" else "retries"


def _search(search: HubSearch) -> list[Row]:
    if search.running:
        return [("", "Contacting Hugging Face…")]
    if search.problem:
        return [("problem", search.problem), ("what to do", search.hint)]
    if search.found is not None:
        return [("", "No GGUF repositories match.")]
    if search.is_link:
        return [("", "Opens this repository.")]
    return [("", f"Searches GGUF repositories for “{search.query}”.")]


def deletion_question(deletion: Deletion) -> str:
    """Return the question before deleting: what is deleted, what that frees, and what is kept."""
    files = units.plural(len(deletion.files), "file")
    lines = [f"Delete {deletion.model.name}? {units.size(deletion.freed)} will be freed ({files})."]
    lines += [paths.shown(file) for file in deletion.files[:_MOST_FILES]]
    if len(deletion.files) > _MOST_FILES:
        lines.append(f"and {len(deletion.files) - _MOST_FILES} more")
    return "\n".join(clean_line(line) for line in (*lines, *deletion.stays))
