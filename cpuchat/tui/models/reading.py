"""A screen that knows the models: threads read files and headers and post messages, handlers here keep what they
found."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from textual import on, work
from textual.message import Message

from cpuchat.errors import CpuchatError
from cpuchat.models.catalog import Catalog, CatalogModel
from cpuchat.models.downloads.state import Download
from cpuchat.models.library.model import LocalModel
from cpuchat.models.shortlist import Ranked, ranked
from cpuchat.tui.models.details import Look
from cpuchat.tui.models.entries import Entry, HubSearch, Shelf, Subject, catalog_key
from cpuchat.tui.models.reader import ModelsReader
from cpuchat.tui.services import Services
from cpuchat.tui.threads import run_in_daemon_thread
from cpuchat.tui.widgets.list_screen import ListScreen

if TYPE_CHECKING:
    from cpuchat.models.machine import Machine
    from cpuchat.models.prediction import Prediction
    from cpuchat.protocol import ModelInfo

_LOADED_SECONDS = 0.5  # how often it is looked whether another model is loaded now


class ReadingScreen(ListScreen[Path | None]):
    """`shelf`, `outlooks` (estimates for the list, by key of the entry) and `looks` (all about an entry that was
    marked) fill in as they are found; `shelf_changed` is called then."""

    class Found(Message):
        """The files of this machine were read."""

        def __init__(self, models: tuple[LocalModel, ...], problem: str = "") -> None:
            super().__init__()
            self.models = models
            self.problem = problem

    class Known(Message):
        """The catalog and the machine were read, and what of the one fits the other."""

        def __init__(
            self, catalog: Catalog, machine: Machine, ranked: Ranked, outlooks: Mapping[str, Prediction]
        ) -> None:
            super().__init__()
            self.catalog = catalog
            self.machine = machine
            self.ranked = ranked
            self.outlooks = outlooks

    class Estimated(Message):
        """What of this machine's files fits, how fast it would be, and which models of the catalog they are."""

        def __init__(self, outlooks: Mapping[str, Prediction], here: frozenset[str]) -> None:
            super().__init__()
            self.outlooks = outlooks
            self.here = here

    class Looked(Message):
        """One entry was looked at closely."""

        def __init__(self, key: str, look: Look) -> None:
            super().__init__()
            self.key = key
            self.look = look

    def __init__(self, services: Services, reader: ModelsReader | None = None) -> None:
        super().__init__()
        self.services = services
        self.reader = reader or ModelsReader(services.library, services.settings, services.conversation.model)
        self.shelf = Shelf()
        self.catalog: Catalog | None = None
        self.machine: Machine | None = None
        self.outlooks: dict[str, Prediction] = {}
        self.looks: dict[str, Look] = {}
        self._model: ModelInfo | None = None
        self._fresh: set[str] = set()  # keys of looks that need not be taken again

    def on_mount(self) -> None:
        self.services.downloading.changed.subscribe(self, self._download_changed)
        self.services.quantizing.changed.subscribe(self, self._model_made)
        self._model = self.services.conversation.model
        self.set_interval(_LOADED_SECONDS, self._follow_load)
        self._take_downloads()
        self._read_catalog()
        self._scan()

    def shelf_changed(self) -> None:
        """Other entries, or more is known about them."""

    # Files

    def look_again(self) -> None:
        """Read everything anew; what is shown stays until it is there."""
        self._fresh.clear()
        self._read_catalog()
        self._scan()

    @work(thread=True, exclusive=True, group="scan")
    def _scan(self) -> None:
        try:
            self.post_message(self.Found(tuple(self.reader.local_models())))
        except (CpuchatError, OSError) as error:
            self.post_message(self.Found((), str(error)))

    @on(Found)
    def _found(self, event: Found) -> None:
        self.shelf = dataclasses.replace(self.shelf, local=event.models, local_problem=event.problem)
        self._estimate_all()
        self.shelf_changed()

    def _follow_load(self) -> None:
        """The load that was running when this screen was opened may end meanwhile."""
        model = self.services.conversation.model
        if model is not self._model:
            self._model, self.reader = model, dataclasses.replace(self.reader, loaded=model)
            self._fresh.clear()
            self._read_catalog()  # there is another amount of memory to be had
            self._scan()  # it may lie where nobody has looked
            self.shelf_changed()

    @work(thread=True, exclusive=True, group="catalog")
    def _read_catalog(self) -> None:
        catalog, machine = self.reader.catalog(), self.reader.machine()
        outlooks = self.reader.estimates({model.id: model for model in catalog.models}, machine)
        by_key = {catalog_key(model): outlooks[model.id] for model in catalog.models if model.id in outlooks}
        self.post_message(self.Known(catalog, machine, ranked(catalog.models, outlooks), by_key))

    @on(Known)
    def _known(self, event: Known) -> None:
        if event.catalog.problems and self.catalog is None:
            self.notify("\n".join(event.catalog.problems), title="Catalog entries skipped", severity="warning",
                        timeout=10, markup=False)  # fmt: skip
        self.catalog, self.machine = event.catalog, event.machine
        self.outlooks.update(event.outlooks)
        self.shelf = dataclasses.replace(self.shelf, catalog=event.ranked)
        self._estimate_all()
        self.shelf_changed()

    # Fit and speed

    def _estimate_all(self) -> None:
        if self.machine is not None and self.catalog is not None:
            listed = [entry for section in self.shelf.sections("") for entry in section.entries]
            subjects = {entry.key: entry.subject for entry in listed if not isinstance(entry.subject, CatalogModel)}
            self._estimate(subjects, self.shelf.local or (), self.catalog, self.machine)

    @work(thread=True, exclusive=True, group="estimate")
    def _estimate(
        self, subjects: Mapping[str, Subject], local: tuple[LocalModel, ...], catalog: Catalog, machine: Machine
    ) -> None:
        outlooks, here = self.reader.estimates(subjects, machine), self.reader.known_here(catalog, local)
        self.post_message(self.Estimated(outlooks, here))

    @on(Estimated)
    def _estimated(self, event: Estimated) -> None:
        self.outlooks.update((key, found) for key, found in event.outlooks.items() if key not in self._fresh)
        self.shelf = dataclasses.replace(self.shelf, here=event.here)
        self.shelf_changed()

    def look_at(self, entry: Entry) -> None:
        """Find out all about one entry, unless that is known."""
        if entry.key not in self._fresh and self.machine is not None and isinstance(entry.subject, LocalModel):
            self._look(entry.key, entry.subject, self.machine)

    @work(thread=True, exclusive=True, group="look")
    def _look(self, key: str, model: LocalModel, machine: Machine) -> None:
        self.post_message(self.Looked(key, self.reader.look(model, machine)))

    @on(Looked)
    def _looked(self, event: Looked) -> None:
        self.looks[event.key] = event.look
        self._fresh.add(event.key)
        if event.look.outlook is not None:
            self.outlooks[event.key] = event.look.outlook
        self.shelf_changed()

    # Downloads

    def _take_downloads(self) -> None:
        self.shelf = dataclasses.replace(self.shelf, downloads=tuple(self.services.downloading.all()))

    def _download_changed(self, download: Download) -> None:
        self._take_downloads()
        if download.state == "done":
            self._scan()
        self.shelf_changed()

    def _model_made(self, path: Path | None) -> None:
        if path is not None:
            self._scan()

    # The hub

    def search_hub(self, query: str) -> None:
        """Ask the hub; an answer to an earlier question is not waited for."""
        self.shelf = dataclasses.replace(self.shelf, search=HubSearch(query, running=True))
        self._search(query)
        self.shelf_changed()

    def leave_search(self) -> None:
        """Forget what was asked and found; nobody waits for the answer any more."""
        self.workers.cancel_group(self, "search")
        self.shelf = dataclasses.replace(self.shelf, search=None)
        self.shelf_changed()

    @work(exclusive=True, group="search")
    async def _search(self, query: str) -> None:
        try:
            found = tuple(await run_in_daemon_thread(lambda: self.services.hub.search(query)))
            search = HubSearch(query, found=found)
        except CpuchatError as error:
            search = HubSearch(query, problem=error.message, hint=error.hint)
        self.shelf = dataclasses.replace(self.shelf, search=search)
        self.shelf_changed()
