"""Entries of the list of models, their order, and their lines and details. Plain data and functions, no widgets."""

from __future__ import annotations

import os
import re
import stat
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlparse

from cpuchat.base import paths
from cpuchat.base.errors import UsageError
from cpuchat.base.text import clean_line, folded
from cpuchat.config.servers import ServerModel, Source, host, is_url
from cpuchat.models.catalog import Catalog, CatalogModel, Ranked, match_local, n_params
from cpuchat.models.downloads.state import RUNNING, Download
from cpuchat.models.file_names import without_quantization
from cpuchat.models.gguf.header import known_as
from cpuchat.models.hub.errors import host as hub_host
from cpuchat.models.hub.repository import FoundRepository
from cpuchat.models.library.deleting import Deletion
from cpuchat.models.library.library import MAX_BELOW, is_named
from cpuchat.models.library.places import PLACES, STORES, LocalModel, grouped, only_drafts, place_of, shown_name
from cpuchat.models.ollama import file_name
from cpuchat.models.support import why_unknown
from cpuchat.present import downloads
from cpuchat.present import models as prediction
from cpuchat.present.models import Rows, predicted_speed, verdict
from cpuchat.present.table import ListRow
from cpuchat.telemetry import units
from cpuchat.telemetry.units import tokens

if TYPE_CHECKING:
    from cpuchat.backend.remote.adapter import ListedModel
    from cpuchat.models.prediction import Prediction


_HOST_AND_PORT = re.compile(r"(localhost|\d+(\.\d+){3}):\d{1,5}(/v1/?)?")  # other names may be models: `qwen3:8`
HERE_HEADING = "on this machine"
SEARCH = "search"
"""Key of the search on Hugging Face."""


@dataclass(frozen=True)
class TypedFile:
    """A file that the user typed or pasted; why it cannot be loaded."""

    path: Path
    problem: str = ""


@dataclass(frozen=True)
class TypedFolder:
    """A folder that is typed whole (`text` ""), or the `text` of one that continues what is typed. `note`: what is in
    it; `is_known`: its models are listed anyway."""

    path: Path
    text: str = ""
    note: str = ""
    is_known: bool = False


@dataclass(frozen=True)
class TypedPath:
    """What is at the path that was typed as `text`: why it is no file to load (`FOLDER` for a folder), "" also before
    it is read; the models below a folder, or the one in the file (None: not read yet); and what continues the text."""

    text: str
    problem: str = ""
    models: tuple[LocalModel, ...] | None = None
    completions: tuple[str, ...] = ()
    is_known: bool = False


@dataclass(frozen=True)
class HubSearch:
    """A search on Hugging Face: to be done, running, or done. `problem` and `hint` when it failed."""

    query: str
    running: bool = False
    found: tuple[FoundRepository, ...] | None = None
    problem: str = ""
    hint: str = ""

    @property
    def is_link(self) -> bool:
        """Return whether it is a link to one repository; `owner/name` (one slash) is searched like other words."""
        return self.query.count("/") > 1


@dataclass(frozen=True)
class ServerEntry:
    """A model on a server, or (`model` None) the server itself: `problem` and `hint` say why its models are not known;
    "" while it is asked. `is_invalid`: what was typed is no address."""

    source: ServerModel
    kind: str = ""
    model: ListedModel | None = None
    problem: str = ""
    hint: str = ""
    is_invalid: bool = False


Subject = LocalModel | Download | CatalogModel | FoundRepository | TypedFile | TypedFolder | HubSearch | ServerEntry


@dataclass(frozen=True)
class ModelListEntry:
    """One line that can be selected. `key` is the same for the same subject while its figures change; `tag` is what a
    model of the catalog is recommended for, or where a file is if others of its model are elsewhere. A file of this
    machine has a `name`, and stands below its `model` if that has several."""

    key: str
    subject: Subject
    tag: str = ""
    name: str = ""
    model: str = ""


@dataclass(frozen=True)
class ModelListSection:
    """Lines under one heading; `note` while there are none."""

    heading: str
    entries: tuple[ModelListEntry, ...]
    note: str = ""


@dataclass(frozen=True)
class ModelListState:
    """The state of the models list. `local` None: still being read. `here`: ids of the catalog's models that `local`
    has. `unavailable`: which folders cannot be read, and why. `typed`: what is at the typed path. `hub_problem`: why
    nothing can be downloaded."""

    local: tuple[LocalModel, ...] | None = None
    downloads: tuple[Download, ...] = ()
    catalog: Ranked = field(default_factory=Ranked)
    here: frozenset[str] = frozenset()
    search: HubSearch | None = None
    local_problem: str = ""
    unavailable: tuple[str, ...] = ()
    typed: TypedPath = TypedPath("")
    on_servers: tuple[ServerEntry, ...] = ()
    hub_problem: str = ""

    def sections(self, text: str) -> list[ModelListSection]:
        """Return the sections for the filter text: local models first, then what can be downloaded."""
        text = text.strip()
        if _HOST_AND_PORT.fullmatch(text):
            text = f"http://{text}"
        if _is_server(text):
            try:
                source = ServerModel.of(text)
            except UsageError as error:
                invalid = ServerEntry(ServerModel(text), problem=error.message, hint=error.hint, is_invalid=True)
                return [ModelListSection("", (ModelListEntry("server", invalid),))]
            there = [entry for entry in self.on_servers if entry.source.server == source.server]
            listed = (ModelListEntry(f"server {served.source}", served) for served in there or [ServerEntry(source)])
            return [ModelListSection("", tuple(listed))]
        if (path := typed_path(text)) is not None:
            return self._at_path(path, self.typed if self.typed.text == text else TypedPath(text))
        words = text.lower().split()
        found = (*self._coming(words), *self._here(words), *self._offered(words), *self._on_hub(text, words))
        return [section for section in found if section.entries or section.note]

    def _at_path(self, path: Path, typed: TypedPath) -> list[ModelListSection]:
        """Return what can be done with a typed path: load the file, add the folder, or type on."""
        problem, below, models = typed.problem, list[ModelListEntry](), typed.models or ()
        listed = {model.path.absolute() for model in models}
        for text in typed.completions:
            one = TypedFolder(path, text) if text.endswith("/") else TypedFile(paths.expanded(text))
            if one.path.absolute() not in listed:
                below.append(ModelListEntry(f"path {text}", one))
        if problem == FOLDER:
            more = " or more" if len(models) >= MAX_BELOW else ""
            note = f"{units.plural(len(models), 'model')}{more}" if typed.models is not None else "reading…"
            folder = ModelListEntry("folder", TypedFolder(path, note=note, is_known=typed.is_known))
            here = (ModelListEntry(f"local {model.path}", model, name=shown_name([model])) for model in models)
            return [ModelListSection("", (folder, *here, *below))]
        found, name = (models[0], shown_name([*models])) if models else (TypedFile(path, problem), "")
        file = ModelListEntry(f"local {path}", found, name=name)
        return [ModelListSection("", tuple(below) if problem and below else (file,))]

    def _coming(self, words: list[str]) -> Iterator[ModelListSection]:
        coming = (
            ModelListEntry(f"download {download.id}", download)
            for download in self.downloads
            if download.state != "done" and _has(words, download.order.model.name, download.order.repo)
        )
        yield ModelListSection("downloads", tuple(coming))

    def _here(self, words: list[str]) -> Iterator[ModelListSection]:
        """Yield this machine model by model, the demo after the others, damaged files last; what only drafts; and each
        server (those whose models are not known together)."""
        ours = [model for model in self.local or () if not only_drafts(model)]
        none = self.local_problem or "no models yet: choose one below, or paste the path of a file or folder"
        note = "" if words else none if self.local is not None else "Reading…"
        yield ModelListSection(HERE_HEADING, file_entries(ours, words), note)
        for closed in () if words else self.unavailable:
            yield ModelListSection("", (), f"! {closed}")
        draft_only = [model for model in self.local or () if only_drafts(model)]
        yield ModelListSection("only for drafting", file_entries(draft_only, words))
        by_heading: dict[str, list[ModelListEntry]] = {}
        for served in self.on_servers:
            if _has(words, str(served.source), served.kind):
                is_listed = served.model is not None
                heading = f"on {host(served.source.server)} · {served.kind}" if is_listed else "on servers"
                by_heading.setdefault(heading, []).append(ModelListEntry(f"server {served.source}", served))
        yield from (ModelListSection(heading, tuple(entries)) for heading, entries in by_heading.items())

    def _offered(self, words: list[str]) -> Iterator[ModelListSection]:
        """Yield the catalog. Models that only draft are offered where drafts are chosen; who searches for one finds it
        last."""
        if self.hub_problem and not words:
            yield ModelListSection("", (), f"! {downloads.without_hub(self.hub_problem, 'Ctrl+R')}")
        for heading, models in (
            ("recommended for this machine", self.catalog.suits),
            ("catalog", self.catalog.others),
            ("too large or too slow for this machine", self.catalog.unsuitable),
        ):
            entries = (
                ModelListEntry(catalog_key(model), model, self.catalog.purposes.get(model.id, ""))
                for model in sorted(models, key=lambda model: model.use == "draft")
                if (model.use != "draft" or words) and model.id not in self.here
                and _has(words, model.name, model.family, model.publisher, model.quantization, model.repos[0])
            )  # fmt: skip
            yield ModelListSection(heading, tuple(entries))

    def _on_hub(self, text: str, words: list[str]) -> Iterator[ModelListSection]:
        search = self.search
        if search is not None and search.found:
            found = [one for one in search.found if _has(words, one.id) or text == search.query]
            entries = tuple(ModelListEntry(f"hub {one.id}", one) for one in found)
            yield ModelListSection(f"on Hugging Face: “{search.query}”", entries)
        if search is None or search.query != text:
            search = HubSearch(text)
        if text and not search.found:
            yield ModelListSection("on Hugging Face", (ModelListEntry(SEARCH, search),))


def file_entries(models: list[LocalModel], words: Collection[str] = ()) -> tuple[ModelListEntry, ...]:
    """Return the files that have `words` in their names, several of one model below its name. Those that would look
    the same are told apart."""
    found: list[tuple[LocalModel, ModelListEntry]] = []
    looks: dict[tuple[str, ...], list[LocalModel]] = {}
    alike = Counter(map(shown_name, groups := grouped(models)))
    for group in groups:
        over = shown_name(group)
        over = over if alike[over] == 1 or len(group) > 1 else without_quantization(known_as(group[0].path))
        is_scattered = len({*map(place_of, group)}) > 1
        for model in group:
            name = model.alias if model.source == "ollama" else known_as(model.path)
            names = (name, over) if len(group) > 1 else (over, "")
            tag = place_of(model) if is_scattered else ""
            found.append((model, ModelListEntry(f"local {model.path}", model, tag, *names)))
            looks.setdefault((*names, model.quantization), []).append(model)
    named = [(model, entry) for model, entry in found if is_named(model, words, _STORE_WORDS.get(model.source, ""))]
    same = [looks[entry.name, entry.model, model.quantization] for model, entry in named]
    return tuple(
        replace(entry, name=f"{entry.name} · {_apart(model, others)}", tag="") if len(others) > 1 else entry
        for (model, entry), others in zip(named, same, strict=True)
    )


def _apart(model: LocalModel, same: list[LocalModel]) -> str:
    """Return what tells `model` from others that look the `same`: who published it, else where it is."""
    tells = (lambda one: one.repo.partition("/")[0], place_of, lambda one: paths.shown(one.path.parent))
    return next((tell(model) for tell in tells if len({*map(tell, same)}) == len(same)), paths.shown(model.path))


_STORE_WORDS = {"huggingface": "Hugging Face HF cache", "ollama": "Ollama", "lmstudio": "LM Studio lmstudio"}
"""What finds all models of a store; not `llama`, by which people mean a model."""


def catalog_key(model: CatalogModel) -> str:
    return f"catalog {model.id}"


def _is_server(text: str) -> bool:
    """Return whether `text` is meant as the address of a server, not as a link to a repository of the hub."""
    if not is_url(text) or host(text) in (hub_host(), "huggingface.co", "www.huggingface.co", "hf.co"):
        return False
    try:
        path = urlparse(text).path.rstrip("/")
    except ValueError:  # "http://[" on the way to "http://[::1]"
        return True
    return path.count("/") < 2 or path.endswith("/v1")


def _has(words: Iterable[str], *texts: str) -> bool:
    haystack = folded(" ".join(texts))
    return all(folded(word) in haystack for word in words)


FOLDER = "a folder"


def problem_at(path: Path) -> str:
    """Return why `path` is not a file to load, "" when it may be one, `FOLDER` for a folder. A mount may hang."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            return FOLDER
        return "" if stat.S_ISREG(mode) else "not a regular file"
    except FileNotFoundError:
        return "no such file"
    except ValueError:
        return "a path cannot contain a NUL character"
    except OSError as error:  # a name that is too long, a folder that may not be read
        return (error.strerror or str(error)).lower()


def typed_path(text: str) -> Path | None:
    """Return the file that a typed or pasted text names, or None when it looks like a search.

    Takes what terminals paste when a file is dropped on them: quotes, `file://`, backslashes as for a shell."""
    text = text.strip()
    if is_quoted := len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    is_file = text.lower().endswith(".gguf") and os.sep in text
    looks_so = is_file or text.startswith(("/", "~", "./", "../", "file://"))
    if not looks_so or "://" in text.removeprefix("file://"):  # links of the hub are searched there
        return None
    return paths.expanded(text if is_quoted else re.sub(r"\\(.)", r"\1", text))


ORDERS = ("name", "size", "speed")
"""How the models on this machine can be sorted."""
HERE, LOADED, LOADING, NOT_HERE, DAMAGED, NOT_ALONE, FILES = "○", "●", "◐", "◌", "!", "·", ""


def list_rows(
    sections: list[ModelListSection], predictions: Mapping[str, Prediction], loaded: Source | None,
    *, is_loading: bool = False, writing: str = "", order: str = "name",
) -> list[ListRow]:  # fmt: skip
    """Return all lines, headings included. `predictions` by key of the entry; `is_loading`: `loaded` still is;
    `writing`: name of the file that is being quantized; `order`: one of `ORDERS`."""
    rows: list[ListRow] = []
    for section in sections:
        entries = section.entries
        if section.heading == HERE_HEADING and entries:
            rows.append(ListRow(name=f"{HERE_HEADING}, by {order}"))
            entries = entries if order == "name" else _sorted(entries, predictions, order)
        elif section.heading:
            rows.append(ListRow(name=section.heading))
        if section.heading == HERE_HEADING and writing:
            rows.append(ListRow(mark=LOADING, name=writing))
        over = ""
        for entry in entries:
            if entry.model and entry.model != over:
                rows.append(ListRow(mark=FILES, name=entry.model))
            over = entry.model
            line = row(entry, predictions.get(entry.key), loaded)
            if is_loading and line.mark == LOADED and line.columns is not None:
                line = replace(line, mark=LOADING, columns=(*line.columns[:2], "loading", line.columns[3]))
            rows.append(replace(line, mark=f"  {line.mark}") if entry.model else line)
        if not section.entries:
            rows.append(ListRow(note=section.note))
    return rows


def _sorted(
    entries: Iterable[ModelListEntry], predictions: Mapping[str, Prediction], order: str
) -> tuple[ModelListEntry, ...]:
    """Return files, the largest or fastest first, damaged ones last."""

    def rank(entry: ModelListEntry) -> tuple[bool, float]:
        model = entry.subject
        assert isinstance(model, LocalModel)
        known = predictions.get(entry.key)
        speed = model.measured_tok_s or (known.tok_s if known is not None else None) or 0.0
        return model.damaged is not None, -(model.size if order == "size" else speed)

    return tuple(replace(entry, model="") for entry in sorted(entries, key=rank))


def row(entry: ModelListEntry, prediction: Prediction | None, loaded: Source | None) -> ListRow:
    """`● Qwen2.5-1.5B-Instruct   Q8_0   1.6 GB  here   31 tok/s`."""
    key, speed = entry.key, predicted_speed(prediction)
    match entry.subject:
        case LocalModel(damaged=str() as problem) as model:
            mark = DAMAGED if model.kind == "model" else NOT_ALONE
            return ListRow(key, mark, entry.name, note=problem.removeprefix(f"{file_name(model.path)} "), dim=True)
        case LocalModel() as model:
            rate = f"{units.rate(model.measured_tok_s)} tok/s" if model.measured_tok_s else speed
            line = _loadable(key, entry.name, model, verdict(prediction), rate, is_loaded=model.path == loaded)
            return replace(line, tag=entry.tag)
        case Download() as download:
            return replace(downloads.row(download), key=key)
        case CatalogModel() as model:
            columns = (model.quantization, _size(model.size), verdict(prediction), speed)
            tag = entry.tag or model.use
            return ListRow(key, NOT_HERE, model.name, columns, tag="" if tag == "chat" else tag)
        case FoundRepository() as repository:
            closed = "gated" if repository.gated else "private" if repository.private else ""
            unsupported = "unsupported" if why_unknown(repository.architecture) else ""
            note = (f"{units.count(repository.downloads)} downloads", repository.updated, closed or unsupported)
            return ListRow(key, NOT_HERE, repository.id, note=" · ".join(filter(None, note)))
        case TypedFile() as file:
            return ListRow(key, DAMAGED if file.problem else HERE, str(file.path), note=file.problem)
        case TypedFolder(text="") as folder:
            shown = paths.shown(folder.path)
            what = f"{shown} is searched already" if folder.is_known else f"add {shown} to your model folders"
            return ListRow(key, "→", what, note=f"{folder.note} · Enter")
        case TypedFolder() as folder:
            return ListRow(key, "→", folder.text, note="Tab")
        case ServerEntry(problem="", model=None) as served:
            return ListRow(key, "→", f"connect to {host(served.source.server)}", note="Enter")
        case ServerEntry(problem="", model=model) as served if model is not None:
            state = "ready" if model.loaded else ""
            return _loadable(key, served.source.stem, model, state, "", is_loaded=served.source == loaded)
        case ServerEntry() as served:
            return ListRow(key, DAMAGED, host(served.source.server), note=served.problem)
        case HubSearch(running=True) as search:
            return ListRow(key, "…", f"searching for “{search.query}”", note="Esc stops it")
        case HubSearch(problem="") as search if search.found is not None:
            return ListRow(key, "·", f"no matches for “{search.query}”")
        case HubSearch(problem="") as search:
            what = f"open {search.query}" if search.is_link else f"search Hugging Face for “{search.query}”"
            return ListRow(key, "→", what, note="Enter")
        case HubSearch() as search:
            return ListRow(key, DAMAGED, search.problem, note=search.hint)


def _size(count: int) -> str:
    return units.size(count) if count else ""


def _loadable(
    key: str, name: str, model: LocalModel | ListedModel, state: str, speed: str, *, is_loaded: bool
) -> ListRow:
    columns = (model.quantization, _size(model.size), "loaded" if is_loaded else state, speed)
    return ListRow(key, LOADED if is_loaded else HERE, name, columns, strong=is_loaded)


_MAX_FILES = 4  # of a deletion that are named


@dataclass(frozen=True)
class ModelDetails:
    """The facts about one entry. `draft` is what would be loaded beside it, `head` describes the head that it contains,
    `target` is where its links lead ("" for none), and `problem` why its header cannot be read. `prediction` is None
    while unknown."""

    prediction: Prediction | None = None
    draft: str = ""
    head: str = ""
    target: str = ""
    problem: str = ""


_ADDS = "Enter adds it: its models are listed from then on. Nothing is copied."


def detail_rows(subject: Subject, known: ModelDetails, catalog: Catalog | None, loaded: Source | None) -> Rows:
    """Return labels and cleaned texts, the most important first: small terminals cut the last lines."""
    match subject:
        case LocalModel(damaged=str() as problem) as model:
            deletes = "" if model.state != "damaged" or model.source in STORES else "Del deletes it"
            rows = [("problem", problem), ("keys", deletes), ("size", _size(model.size)), *_place(model)]
        case LocalModel() as model:
            entry = match_local(catalog, model) if catalog is not None else None
            rows = _local_rows(model, known, loaded, entry)
        case Download() as download:
            does = "pauses it" if download.state in RUNNING else "resumes it"
            rows = [*downloads.download_details(download), ("keys", f"Enter {does} · Del cancels it")]
        case CatalogModel() as model:
            active = f", {units.parameters(round(1e9 * model.active_params))} active" if model.is_moe else ""
            sizes = [f"{name} {units.size(round(size * 1e9))}" for name, size in model.sizes.items()]
            drafts = [draft.name for draft in catalog.drafts_of(model)] if catalog is not None else []
            if sizes and model.quantization not in model.verified:
                sizes.append("estimated")
            rows = [
                *prediction.decision_rows(known.prediction, prediction.purpose(model)),
                ("model", _kind(round(1e9 * model.params), "", model.context, active, str(model.year), model.license)),
                ("note", model.note),
                ("drafts", ", ".join(drafts) or (f"none ({model.why_no_draft})" if model.why_no_draft else "")),
                ("draft head", f"{known.head} (files of {model.head_repo})" if known.head else ""),
                ("sizes", " · ".join(sizes)),
                ("from", model.repos[0]),
            ]
        case FoundRepository() as found:
            gated = "accept its terms on huggingface.co, then run `hf auth login`" if found.gated else ""
            rows = [
                ("problem", why_unknown(found.architecture)),
                ("model", _kind(found.n_params, found.architecture)),
                ("downloads", f"{units.count(found.downloads)} in 30 days · {units.plural(found.likes, 'like')}"),
                ("updated", found.updated),
                ("gated", gated),
                ("private", "needs your token" if found.private else ""),
            ]
        case TypedFile() as file:
            rows = [("path", paths.shown(file.path)), ("problem", file.problem)]
        case TypedFolder(text="") as folder:
            rows = [("folder", paths.shown(folder.path)), ("", "" if folder.is_known else _ADDS)]
        case TypedFolder():
            rows = [("", "Tab or Enter completes the path.")]
        case ServerEntry(model=None) as served:
            problem = [("problem", served.problem), ("what to do", served.hint)]
            rows = [*problem, ("server", served.source.server)]
        case ServerEntry(model=model) as served:
            assert model is not None
            kind = _kind(model.n_params, model.architecture, model.n_ctx)
            rows = [("model", kind), ("name", model.name), ("server", f"{served.kind} · {served.source.server}")]
        case HubSearch() as search:
            rows = [("problem", search.problem), ("what to do", search.hint)]
    return [(label, clean_line(text)) for label, text in rows if text]


def _kind(n_params: int, architecture: str, n_ctx: int = 0, parts: str = "", *more: str) -> str:
    """`30.5B parameters, 3.3B active · qwen3moe · 256k context`; `parts` is about the parameters."""
    size = f"{units.parameters(n_params)} parameters{parts}" if n_params else parts
    return " · ".join(filter(None, (size, architecture, f"{tokens(n_ctx)} context" if n_ctx else "", *more)))


def title(subject: Subject) -> str:
    match subject:
        case LocalModel() as model:
            return f"{model.alias if model.source == 'ollama' else known_as(model.path)} · {place_of(model)}"
        case CatalogModel(name=name) | FoundRepository(id=name):
            return name
        case Download(order=order):
            return order.model.name
        case ServerEntry(source=source):
            return source.stem if source.name else host(source.server)
        case _:
            return "About"


def _local_rows(model: LocalModel, known: ModelDetails, loaded: Source | None, entry: CatalogModel | None) -> Rows:
    experts = ""
    if model.n_expert:
        active = f"{units.parameters(model.n_params_active)} active, " if model.n_params_active else ""
        experts = f", {active}{model.n_expert_used} of {model.n_expert} experts per token"
    use = prediction.purpose(entry) if entry is not None else ""
    use = use if model.has_template else "base model: continues text (no chat template)"
    is_loaded = model.path == loaded
    is_read = known.prediction is not None and known.prediction.exact
    decision = prediction.decision_rows(known.prediction, use, model.measured_tok_s, model.drafted_tok_s)
    return [
        ("problem", known.problem),
        *(decision if is_read or known.problem else decision[:1]),  # the header says how much, and of which draft model
        ("model", _kind(n_params(model), model.architecture, model.n_ctx_train, experts)),
        ("draft", known.draft or ("none: F9 lists candidates" if is_read else "")),
        ("draft head", known.head),
        *_place(model, known.target, "now" if is_loaded else units.ago(model.last_used, time.time())),
    ]


def _place(model: LocalModel, target: str = "", used: str = "") -> Rows:
    used = "never used" if used == "never" else f"used {used}" if used else ""
    where = filter(None, (PLACES.get(model.source, "your folder"), model.alias, model.repo, used))
    link = f" → {target}" if target else ""
    return [("file", f"{paths.shown(model.path)}{link}"), ("from", " · ".join(where))]


def deletion_question(deletion: Deletion) -> str:
    """Return the question before deleting: what is deleted, what that frees, and what is kept."""
    files = units.plural(len(deletion.files), "file")
    name = f"{shown_name([deletion.model])} {deletion.model.quantization}".rstrip()
    lines = [f"Delete {name}? {units.size(deletion.freed)} will be freed ({files})."]
    lines += [paths.shown(file) for file in deletion.files[:_MAX_FILES]]
    if len(deletion.files) > _MAX_FILES:
        lines.append(f"and {len(deletion.files) - _MAX_FILES} more")
    return "\n".join(clean_line(line) for line in (*lines, *deletion.stays))
