"""Base of the models screen: reads files, the catalog and Hugging Face in threads, and keeps the results."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from textual import work

from cpuchat.daemon_thread import run_in_daemon_thread
from cpuchat.errors import CpuchatError
from cpuchat.models.catalog import Catalog, CatalogModel
from cpuchat.models.downloads.state import Download
from cpuchat.models.library.model import LocalModel
from cpuchat.models.shortlist import ranked
from cpuchat.servers import ServerModel, Source
from cpuchat.tui.models.details import ModelDetails
from cpuchat.tui.models.entries import Entry, HubSearch, ModelListState, ServerEntry, catalog_key
from cpuchat.tui.models.reader import ModelsReader
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.list_screen import ListScreen

if TYPE_CHECKING:
    from cpuchat.model_info import ModelInfo
    from cpuchat.models.machine import Machine
    from cpuchat.models.prediction import Prediction

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
