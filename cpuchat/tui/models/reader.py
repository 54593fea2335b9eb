"""Reads models and this machine for the models screen. Every function that is not async blocks: not for the UI
thread.

Base of the models screen: reads files, the catalog and Hugging Face in threads, and keeps the results.

Shows everything in the header of one model.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rich.table import Table
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from cpuchat.base.errors import CpuchatError
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.base.text import clean, clean_line
from cpuchat.config.servers import ServerModel, Source, normalized, running_servers
from cpuchat.config.settings import Settings
from cpuchat.models.catalog import Catalog, CatalogModel, load_catalog, match_local, ranked
from cpuchat.models.downloads.state import Download
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.inspect import Inspection, inspect
from cpuchat.models.library.deleting import Deletion
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import LocalModel
from cpuchat.present.models import sections
from cpuchat.tui import keys
from cpuchat.tui.models.entries import Entry, HubSearch, ModelDetails, ModelListState, ServerEntry, Subject, catalog_key
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import Dismissable
from cpuchat.tui.widgets.key_footer import KeyFooter
from cpuchat.tui.widgets.model_list import ListScreen

if TYPE_CHECKING:
    from cpuchat.backend.remote.backend import RemoteBackend
    from cpuchat.backend.remote.keys import KeyRing
    from cpuchat.models.machine import Machine, TunedMachine
    from cpuchat.models.prediction import Prediction
    from cpuchat.protocol.model_info import ModelInfo


@dataclass(frozen=True)
class ModelsReader:
    """Reads with the current settings; `loaded` is the model that another one would replace."""

    library: Library
    settings: Settings
    loaded: ModelInfo | None = None

    def local_models(self) -> list[LocalModel]:
        return self.library.local_models()

    def server_urls(self) -> list[str]:
        """Return the servers of the settings, those that run here, and that of the loaded model, each once."""
        found = [normalized(url) for url in self.settings.servers.urls]
        found += [one.url for one in running_servers()]
        if self.loaded is not None and self.loaded.server:
            found.append(ServerModel.of(self.loaded.path).server)
        return list(dict.fromkeys(found))

    async def server_entries(self, server: str, keys: KeyRing) -> list[ServerEntry]:
        """Return the models of a server, or one entry that says why there are none. Does not block."""
        backend = (await run_in_daemon_thread(_remote_backend))(keys)
        try:
            kind, models = await backend.models(server)
        except CpuchatError as error:
            return [ServerEntry(ServerModel(server), problem=error.message, hint=error.hint)]
        if not models:
            return [ServerEntry(ServerModel(server), kind, problem="lists no models", hint="Load one on the server.")]
        return [ServerEntry(ServerModel(server, model.name), kind, model) for model in models]

    def catalog(self) -> Catalog:
        """Return the built-in and the user's catalog."""
        return load_catalog()

    def machine(self) -> Machine:
        """Return the machine as if the loaded model were unloaded."""
        from cpuchat.models.machine import this_machine

        return this_machine(self.settings, loaded=self.loaded)

    def header(self, path: Path) -> GGUFHeader:
        """Return the header, of all parts of a split model. Raises ModelDamaged, ModelNotFound."""
        from cpuchat.models.gguf.header import read_model

        return read_model(path)

    def deletion(self, model: LocalModel) -> Deletion:
        """Return what deleting the model would do; loaded files are kept."""
        return self.library.deletion(model, in_use=self._in_use())

    def _in_use(self) -> list[Path]:
        """Return the files of the loaded model, and of those that may be its draft model, known by name only."""
        loaded = self.loaded
        if loaded is None or loaded.server:
            return []
        drafts = [
            model.path for model in self.library.local_models()
            if loaded.draft and (model.name, model.quantization) == (loaded.draft, loaded.draft_quantization)
        ]  # fmt: skip
        return [Path(loaded.path), *drafts]

    def predictions(self, subjects: Mapping[str, Subject], machine: Machine) -> dict[str, Prediction]:
        """Predict fit and speed by the same keys, from the sizes alone; of models that are tuned, on the cores that
        they use."""
        from cpuchat.models.machine import TunedMachine

        tuned = TunedMachine(self.settings, machine, self.loaded)
        found = {key: _estimate(subject, machine, tuned) for key, subject in subjects.items()}
        return {key: prediction for key, prediction in found.items() if prediction is not None}

    def known_here(self, catalog: Catalog, local: Iterable[LocalModel]) -> frozenset[str]:
        """Return the ids of the catalog's models that are local, in the quantization that the catalog would choose."""
        found = ((match_local(catalog, model), model.quantization) for model in local if model.damaged is None)
        return frozenset(entry.id for entry, quantization in found if entry and entry.quantization == quantization)

    def details(self, model: LocalModel, machine: Machine) -> ModelDetails:
        """Return the details of one model on this machine, with the draft model that would be loaded beside it."""
        from cpuchat.models.drafts.choice import choose_draft
        from cpuchat.models.fit import kv_growth
        from cpuchat.models.machine import TunedMachine
        from cpuchat.models.prediction import predict

        tuned = TunedMachine(self.settings, machine, self.loaded)
        chosen = tuned.settings(model.path)
        options, wanted = chosen.load_options(), chosen.speculation.wanted_draft
        try:
            header = self.header(model.path)
            draft, note = choose_draft(model.path, wanted, self.library, strict=False, heads=True)
            beside = self.header(draft) if draft not in (None, model.path) else None  # it contains its head
        except (CpuchatError, OSError) as error:
            return ModelDetails(problem=str(error))
        kv_per_token, kv_windowed = kv_growth(header, options)
        return ModelDetails(
            prediction=predict(header, options, tuned.of(model.path), draft=beside),
            kv_per_token=kv_per_token,
            kv_windowed=kv_windowed,
            draft=beside.name if beside is not None else note,
        )


def _estimate(subject: Subject, machine: Machine, tuned: TunedMachine) -> Prediction | None:
    """Predict by the size of the file; None if that is unknown."""
    from cpuchat.models.catalog import estimate_entry
    from cpuchat.models.prediction import estimate, estimate_local

    match subject:
        case LocalModel(damaged=None) as model if model.size:
            return estimate_local(model, tuned.of(model.path))
        case Download() as download if download.total:
            return estimate(download.total, machine, quantization=download.order.model.quantization)
        case CatalogModel() as model if model.size:
            return estimate_entry(model, machine)
        case _:
            return None


def _remote_backend() -> type[RemoteBackend]:
    """Import what httpx makes slow to import."""
    from cpuchat.backend.remote.backend import RemoteBackend

    return RemoteBackend


_LOADED_SECONDS = 0.5  # between two looks at which model is loaded


class ReadingScreen(ListScreen[Source | None]):
    """`state`, `predictions` (for the list, by key of the entry) and `details` (of entries that were selected) fill in
    as they are found; `state_changed` is called then."""

    def __init__(self, services: Services, reader: ModelsReader | None = None) -> None:
        super().__init__()
        self.services = services
        self.reader = reader or ModelsReader(services.library, services.settings, services.conversation.model)
        self.state = ModelListState()
        self.catalog: Catalog | None = None
        self.machine: Machine | None = None
        self.predictions: dict[str, Prediction] = {}
        self.details: dict[str, ModelDetails] = {}
        self._model: ModelInfo | None = None
        self._current: set[str] = set()  # keys of details that need not be read again

    def on_mount(self) -> None:
        self.services.downloading.changed.subscribe(self, self._download_changed)
        self.services.quantizing.changed.subscribe(self, self._model_made)
        self._model = self.services.conversation.model
        self.set_interval(_LOADED_SECONDS, self._follow_load)
        self._update(downloads=tuple(self.services.downloading.all()))
        self.refresh_models()

    def state_changed(self) -> None:
        """React to new entries or details."""

    def _update(self, **changes: object) -> None:
        self.state = dataclasses.replace(self.state, **changes)
        self.state_changed()

    # Files, catalog and machine

    def refresh_models(self) -> None:
        """Read everything again; what is shown stays until then."""
        self._current.clear()
        self._read_catalog()
        self._read_files()
        self._read_servers()

    # Servers

    @work(exclusive=True, group="servers")
    async def _read_servers(self) -> None:
        urls = await asyncio.to_thread(self.reader.server_urls)
        wanted = dict.fromkeys((*urls, *self.services.servers_seen))
        self._update(on_servers=tuple(one for one in self.state.on_servers if one.source.server in wanted))
        for url in wanted:
            self._ask(url)

    def connect(self, server: str) -> None:
        """Ask a server for its models; what was known of it stays until then."""
        self.services.servers_seen[server] = None
        self._ask(server)

    def _ask(self, server: str) -> None:
        self.run_worker(self._connect(server), group=f"server {server}", exclusive=True)

    async def _connect(self, server: str) -> None:
        if not any(one.source.server == server for one in self.state.on_servers):
            self._update(on_servers=(*self.state.on_servers, ServerEntry(ServerModel(server))))
        found = await self.reader.server_entries(server, self.services.keys)
        entries = self.state.on_servers
        at = next((n for n, one in enumerate(entries) if one.source.server == server), None)
        if at is not None:  # else it has ended meanwhile
            others = [one for one in entries if one.source.server != server]
            self._update(on_servers=(*others[:at], *found, *others[at:]))
            self.services.served = [one.source for one in self.state.on_servers if one.model is not None]

    @work(exclusive=True, group="files")
    async def _read_files(self) -> None:
        local: tuple[LocalModel, ...] = ()
        problem = ""
        try:
            local = tuple(await asyncio.to_thread(self.reader.local_models))
        except (CpuchatError, OSError) as error:
            problem = str(error)
        self._update(local=local, local_problem=problem)
        self._predict_listed()

    @work(exclusive=True, group="catalog")
    async def _read_catalog(self) -> None:
        reader, first = self.reader, self.catalog is None
        catalog = await asyncio.to_thread(reader.catalog)
        machine = await asyncio.to_thread(reader.machine)
        models = {model.id: model for model in catalog.models}
        found = await asyncio.to_thread(reader.predictions, models, machine)
        if catalog.problems and first:
            problems = "\n".join(catalog.problems)
            self.notify(problems, title="Catalog entries skipped", severity="warning", timeout=10, markup=False)
        self.catalog, self.machine = catalog, machine
        self.predictions.update((catalog_key(models[id]), prediction) for id, prediction in found.items())
        self._update(catalog=ranked(catalog.models, found))
        self._predict_listed()

    def _follow_load(self) -> None:
        """Update when the load that ran as this screen opened has ended."""
        model = self.services.conversation.model
        if model is not self._model:
            self._model, self.reader = model, dataclasses.replace(self.reader, loaded=model)
            self.refresh_models()  # it frees memory, and may lie in a folder that was not searched
            self.state_changed()

    # Fit and speed

    @work(exclusive=True, group="predictions")
    async def _predict_listed(self) -> None:
        if self.machine is None or self.catalog is None:
            return
        listed = [entry for section in self.state.sections("") for entry in section.entries]
        subjects = {entry.key: entry.subject for entry in listed if not isinstance(entry.subject, CatalogModel)}
        found = await asyncio.to_thread(self.reader.predictions, subjects, self.machine)
        here = await asyncio.to_thread(self.reader.known_here, self.catalog, self.state.local or ())
        self.predictions.update((key, one) for key, one in found.items() if key not in self._current)
        self._update(here=here)

    @work(exclusive=True, group="details")
    async def read_details(self, entry: Entry) -> None:
        """Read the header of a model on this machine, unless that was done."""
        machine, model = self.machine, entry.subject
        if entry.key in self._current or machine is None or not isinstance(model, LocalModel):
            return
        details = await asyncio.to_thread(self.reader.details, model, machine)
        self.details[entry.key] = details
        self._current.add(entry.key)
        if details.prediction is not None:
            self.predictions[entry.key] = details.prediction
        self.state_changed()

    # Downloads

    def _download_changed(self, download: Download) -> None:
        self._update(downloads=tuple(self.services.downloading.all()))
        if download.state == "done":
            self._read_files()

    def _model_made(self, path: Path | None) -> None:
        if path is not None:
            self._read_files()

    # The hub

    @work(exclusive=True, group="search")
    async def search_hub(self, query: str) -> None:
        """Search; the result of an earlier search is dropped."""
        self._update(search=HubSearch(query, running=True))
        try:
            found = tuple(await run_in_daemon_thread(lambda: self.services.hub.search(query)))
            search = HubSearch(query, found=found)
        except CpuchatError as error:
            search = HubSearch(query, problem=error.message, hint=error.hint)
        self._update(search=search)

    def leave_search(self) -> None:
        """Forget the search and what it found."""
        self.workers.cancel_group(self, "search")
        self._update(search=None)


_LABEL = 22
_MOST_TEMPLATE = 20_000  # characters of a template that are shown


class InspectionScreen(Dismissable[None]):
    """Reads the header in a thread: a large vocabulary takes a while, a remote one longer."""

    CSS_PATH = "inspection.tcss"
    AUTO_FOCUS = "#inspection"
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("inspection")

    def __init__(self, title: str, read: Callable[[], GGUFHeader]) -> None:
        """`read` gets the header and may raise CpuchatError; it runs in a thread."""
        super().__init__()
        self._about = clean_line(title)
        self._read_header = read

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="inspection") as pane:
            pane.border_title = Content(self._about)
            yield Static("Reading the header…", id="waiting", markup=False)
        yield KeyFooter()

    def on_mount(self) -> None:
        self._read()

    @work
    async def _read(self) -> None:
        try:
            self._show(await run_in_daemon_thread(lambda: inspect(self._read_header())))
        except (CpuchatError, OSError) as error:
            self.query_one("#waiting", Static).update(clean(str(error)))

    def _show(self, inspection: Inspection) -> None:
        parts: list[Static] = []
        for heading, rows in sections(inspection):
            parts += [Static(heading, classes="heading", markup=False), Static(_table(rows), classes="rows")]
        for template in inspection.templates:
            name = f" “{template.name}”" if template.name else ""
            cut = f"\n… {len(template.text) - _MOST_TEMPLATE:,} more characters" * (len(template.text) > _MOST_TEMPLATE)
            parts += [
                Static(clean_line(f"Text of the chat template{name}"), classes="heading", markup=False),
                Static(Text(clean(template.text[:_MOST_TEMPLATE]) + cut), classes="rows"),
            ]
        pane = self.query_one("#inspection")
        self.query_one("#waiting").remove()
        pane.mount_all(parts)
        pane.border_subtitle = Content(clean_line(inspection.header.path.name))


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    if any(label for label, _ in rows):
        table.add_column(width=_LABEL, style="dim", overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    for label, value in rows:
        table.add_row(*(Text(part) for part in ((label, value) if len(table.columns) > 1 else (value,))))
    return table
