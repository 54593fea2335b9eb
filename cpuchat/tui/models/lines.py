"""Formats entries as lines of the list. Plain functions, no widgets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from cpuchat.models.catalog import CatalogModel
from cpuchat.models.downloads.state import Download
from cpuchat.models.hub.repository import FoundRepository
from cpuchat.models.library.model import LocalModel
from cpuchat.present import downloads
from cpuchat.present.prediction import speed, verdict
from cpuchat.present.rows import ListRow
from cpuchat.servers import Source, host
from cpuchat.telemetry import units
from cpuchat.tui.models.entries import Entry, HubSearch, Section, ServerEntry, TypedFile

if TYPE_CHECKING:
    from cpuchat.models.prediction import Prediction

HERE, LOADED, NOT_HERE, DAMAGED, NOT_ALONE = "○", "●", "◌", "!", "·"


def rows(
    sections: list[Section], local: Iterable[LocalModel], predictions: Mapping[str, Prediction], loaded: Source | None
) -> list[ListRow]:
    """Return all lines, headings included. `predictions` by key of the entry. `local`: all models of this machine,
    listed or not; one with the name of another is listed by its file.
    """
    found: list[ListRow] = []
    names = Counter((model.name, model.quantization) for model in local)
    for section in sections:
        if section.heading:
            found.append(ListRow(name=section.heading))
        for entry in section.entries:
            line, model = row(entry, predictions.get(entry.key), loaded), entry.subject
            if isinstance(model, LocalModel) and names[model.name, model.quantization] > 1:
                line = replace(line, name=model.path.stem)
            found.append(line)
        if not section.entries:
            found.append(ListRow(note=section.note))
    return found


def row(entry: Entry, prediction: Prediction | None, loaded: Source | None) -> ListRow:
    """`● Qwen2.5-1.5B-Instruct   Q8_0   1.6 GB  here   31 tok/s`."""
    key = entry.key
    match entry.subject:
        case LocalModel() as model:
            return _local(key, model, prediction, loaded)
        case Download() as download:
            state = "paused" if download.state == "paused" else downloads.percent(download).strip()
            columns = (download.model.quantization, units.size(download.total), state, speed(prediction))
            mark, name = downloads.mark(download), downloads.name(download.model)
            return ListRow(key, mark, name, columns)
        case CatalogModel() as model:
            size = units.size(model.size) if model.size else ""
            columns = (model.quantization, size, verdict(prediction), speed(prediction))
            tag = "" if model.use == "chat" else model.use
            return ListRow(key, NOT_HERE, model.name, columns, tag=tag)
        case FoundRepository() as found:
            closed = " · gated" if found.gated else " · private" if found.private else ""
            note = f"{units.count(found.downloads)} downloads" + (f" · {found.updated}" if found.updated else "")
            return ListRow(key, NOT_HERE, found.id, note=note + closed)
        case TypedFile() as file:
            return ListRow(key, DAMAGED if file.problem else HERE, str(file.path), note=file.problem)
        case ServerEntry() as served:
            return _on_server(key, served, loaded)
        case HubSearch() as search:
            return _search(key, search)


def _local(key: str, model: LocalModel, prediction: Prediction | None, loaded: Source | None) -> ListRow:
    if model.damaged and model.unfinished is None:
        return ListRow(key, DAMAGED if model.kind == "model" else NOT_ALONE, model.name, note=model.damaged, dim=True)
    size = units.size(model.size) if model.size else ""
    if model.unfinished is not None:
        state = f"{100 * model.unfinished:.0f} %" if model.unfinished >= 0 else "part"
        return ListRow(key, "↓", model.name, (model.quantization, size, state, ""), dim=True)
    is_loaded = model.path == loaded
    state = "loaded" if is_loaded else verdict(prediction)
    rate = f"{units.rate(model.measured_tok_s)} tok/s" if model.measured_tok_s else speed(prediction)
    mark = LOADED if is_loaded else HERE
    return ListRow(key, mark, model.name, (model.quantization, size, state, rate), strong=is_loaded)


def _on_server(key: str, served: ServerEntry, loaded: Source | None) -> ListRow:
    place = host(served.source.server)
    if served.problem:
        return ListRow(key, DAMAGED, place, note=served.problem)
    if served.model is None:
        return ListRow(key, "→", f"connect to {place}", note="Enter")
    model, is_loaded = served.model, served.source == loaded
    state = "loaded" if is_loaded else "ready" if model.loaded else ""
    size = units.size(model.size) if model.size else ""
    columns = (model.quantization, size, state, "")
    return ListRow(key, LOADED if is_loaded else HERE, served.source.stem, columns, strong=is_loaded)


def _search(key: str, search: HubSearch) -> ListRow:
    if search.running:
        return ListRow(key, "…", f"searching for “{search.query}”", note="Esc stops it")
    if search.problem:
        return ListRow(key, DAMAGED, search.problem, note=search.hint)
    if search.found is not None:
        return ListRow(key, "·", f"no matches for “{search.query}”")
    if search.is_link:
        return ListRow(key, "→", f"open {search.query}", note="Enter")
    return ListRow(key, "→", f"search Hugging Face for “{search.query}”", note="Enter")
