"""The models screen: models on this machine and on servers, the catalog, Hugging Face, any GGUF file."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

from textual import on, work
from textual.app import ComposeResult
from textual.timer import Timer
from textual.widgets import Input

from cpuchat.base.errors import CpuchatError
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.base.text import clean_line
from cpuchat.config.servers import ServerModel, Source, source
from cpuchat.models.catalog import Catalog, CatalogModel, ranked
from cpuchat.models.downloads.state import Download
from cpuchat.models.file_names import engine_knows
from cpuchat.models.hub.repository import FoundRepository
from cpuchat.models.library.deleting import delete
from cpuchat.models.library.places import LocalModel, is_demo, unavailable
from cpuchat.models.machine import Machine
from cpuchat.models.prediction import Prediction
from cpuchat.present import downloads
from cpuchat.present.models import doubt, verdict
from cpuchat.telemetry import units
from cpuchat.tui.models import entries
from cpuchat.tui.models.entries import (
    SEARCH,
    HubSearch,
    ModelDetails,
    ModelListEntry,
    ModelListState,
    ServerEntry,
    TypedFile,
    TypedFolder,
    catalog_key,
    typed_path,
)
from cpuchat.tui.models.reader import ModelsReader
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import ChoiceScreen, DialogChoice, Dismissable
from cpuchat.tui.widgets.model_list import ModelList, PanesScreen


async def choose(screen: Dismissable[Any], services: Services, path: Path) -> None:
    """Return `path` from `screen`, or show there why it cannot be loaded in place of the loaded model."""

    def check() -> None:
        from cpuchat.models.machine import require_loadable

        require_loadable(path, services.settings, services.conversation.model)

    try:
        await run_in_daemon_thread(check)
    except (CpuchatError, OSError) as error:
        screen.notify(clean_line(str(error)), title="Not loaded", severity="error", timeout=10, markup=False)
    else:
        await screen.dismiss_when_on_top(path)


_KEEP, _DISCARD = "keep", "discard"
_READ_AFTER = 0.12  # s on which the mark, or a typed path, must rest before headers are read


class FilterBox(Input):
    """Passes Del on where there is nothing to delete behind the cursor."""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "delete_right":
            return self.cursor_position < len(self.value) or not self.selection.is_empty
        return True


_LOADED_SECONDS = 0.5  # between two looks at which model is loaded


class ModelsScreen(PanesScreen[Source | tuple[Any, Any] | None], keys="models"):
    """Returns the model to load, or two to compare. Reads files, the catalog, servers and Hugging Face in threads.

    `state`, `predictions` (for the list, by key of the entry) and `details` (of entries that were selected) fill in."""

    AUTO_FOCUS = "#filter"
    list_title = "Models"

    def __init__(
        self, services: Services, reader: ModelsReader | None = None,
        *, best: Path | None = None, at_downloads: bool = False,
    ) -> None:  # fmt: skip
        """`best`: the model to select while the demo is loaded; `at_downloads`: the download that came last is."""
        super().__init__()
        self.services = services
        self.reader = reader or ModelsReader(services.library, services.settings, services.conversation.model)
        self.state = ModelListState()
        self.catalog: Catalog | None = None
        self.machine: Machine | None = None
        self.predictions: dict[str, Prediction] = {}
        self.details: dict[str, ModelDetails] = {}
        self._current: set[str] = set()  # keys of details that need not be read again
        self._entries: dict[str, ModelListEntry] = {}
        self._details_timer: Timer | None = None
        self._at_downloads = at_downloads
        self._loading = services.session.loading
        chosen = self._loading or services.loaded
        is_demo_chosen = chosen is None or (isinstance(chosen, Path) and is_demo(chosen))
        self._wanted = f"local {best}" if best is not None and is_demo_chosen else ""
        """Key of what is selected until the user moves the selection."""

    def compose_above_list(self) -> ComposeResult:
        about = "search, or paste a path or the address of a server"
        yield FilterBox(placeholder=about, id="filter", compact=True)

    def on_mount(self) -> None:
        self.services.downloading.changed.subscribe(self, self._download_changed)
        changed = self.services.quantizing.changed
        changed.subscribe(self, lambda made: self._read_files() if made else self.state_changed())
        self.set_interval(_LOADED_SECONDS, self._follow_load)
        if self._at_downloads:
            self._wanted = self._newest_download()
        self._update(downloads=tuple(self.services.downloading.all()))
        self.refresh_models()

    def _update(self, **changes: object) -> None:
        problem = self.services.downloading.hub_problem
        self.state = dataclasses.replace(self.state, **{"hub_problem": problem, **changes})
        self.state_changed()

    # Files, catalog and machine

    def refresh_models(self) -> None:
        """Read everything again; what is shown stays until then."""
        self._current.clear()
        self._read_catalog()
        self._read_files()
        self._read_servers()

    @work(exclusive=True, group="servers")
    async def _read_servers(self) -> None:
        urls = await asyncio.to_thread(self.reader.server_urls)
        wanted = dict.fromkeys((*urls, *self.services.servers_seen))
        self._update(on_servers=tuple(entry for entry in self.state.on_servers if entry.source.server in wanted))
        for url in wanted:
            self._ask(url)

    def connect(self, server: str) -> None:
        """Ask a server for its models; what was known of it stays until then."""
        self.services.servers_seen[server] = None
        self._ask(server)

    def _ask(self, server: str) -> None:
        self.run_worker(self._connect(server), group=f"server {server}", exclusive=True)

    async def _connect(self, server: str) -> None:
        if not any(entry.source.server == server for entry in self.state.on_servers):
            self._update(on_servers=(*self.state.on_servers, ServerEntry(ServerModel(server))))
        fresh = await self.reader.server_entries(server, self.services.keys)
        before = self.state.on_servers
        at = next((n for n, entry in enumerate(before) if entry.source.server == server), None)
        if at is not None:  # else it has ended meanwhile
            others = [entry for entry in before if entry.source.server != server]
            self._update(on_servers=(*others[:at], *fresh, *others[at:]))

    @work(exclusive=True, group="files")
    async def _read_files(self) -> None:
        try:
            found: dict[str, object] = {"local": (local := tuple(await asyncio.to_thread(self.reader.local_models)))}
            if self.catalog is not None:
                found["here"] = await asyncio.to_thread(self.reader.known_here, self.catalog, local)
        except (CpuchatError, OSError) as error:
            found = {"local": (), "local_problem": str(error)}
        closed = await asyncio.to_thread(unavailable, self.services.settings.model.folders)
        self._update(**{"local_problem": "", **found}, unavailable=tuple(closed))
        self._predict_listed()

    @work(exclusive=True, group="catalog")
    async def _read_catalog(self) -> None:
        reader, first = self.reader, self.catalog is None
        catalog = await asyncio.to_thread(reader.catalog)
        machine = await asyncio.to_thread(reader.machine)
        catalog = await asyncio.to_thread(catalog.on, machine)
        models = {model.id: model for model in catalog.models}
        found = await asyncio.to_thread(reader.predictions, models, machine)
        if catalog.problems and first:
            problems = "\n".join(catalog.problems)
            self.notify(problems, title="Catalog entries skipped", severity="warning", timeout=10, markup=False)
        self.catalog, self.machine = catalog, machine
        self.predictions.update((catalog_key(models[id]), prediction) for id, prediction in found.items())
        here = await asyncio.to_thread(reader.known_here, catalog, self.state.local or ())
        self._update(catalog=ranked(catalog.models, found), here=here)
        self._predict_listed()

    def _follow_load(self) -> None:
        """Show which model is being loaded, and update when it is."""
        model, loading = self.services.conversation.model, self.services.session.loading
        if loading != self._loading:
            self._loading = loading
            self.state_changed()
        if model != self.reader.loaded:
            self.reader = dataclasses.replace(self.reader, loaded=model)
            self.refresh_models()  # it frees memory, and may lie in a folder that was not searched
            self.state_changed()

    # Fit and speed

    @work(exclusive=True, group="predictions")
    async def _predict_listed(self) -> None:
        if self.machine is None or self.catalog is None:
            return
        shown = (*self.state.sections(""), *self.state.sections(self._text))
        listed = [entry for section in shown for entry in section.entries]
        subjects = {entry.key: entry.subject for entry in listed if not isinstance(entry.subject, CatalogModel)}
        found = await asyncio.to_thread(self.reader.predictions, subjects, self.machine)
        here = await asyncio.to_thread(self.reader.known_here, self.catalog, self.state.local or ())
        self.predictions.update((key, one) for key, one in found.items() if key not in self._current)
        self._update(here=here)

    @work(exclusive=True, group="details")
    async def read_details(self) -> None:
        """Read the details of the selected model if it is on this machine or in the catalog, unless that was done."""
        machine, entry = self.machine, self.entry
        model = entry.subject if entry is not None else None
        if entry is None or entry.key in self._current or machine is None:
            return
        if not isinstance(model, LocalModel | CatalogModel):
            return
        details = await asyncio.to_thread(self.reader.details, model, machine)
        self.details[entry.key] = details
        self._current.add(entry.key)
        if details.prediction is not None:
            self.predictions[entry.key] = details.prediction
        self.state_changed()

    # Downloads

    def _download_changed(self, download: Download) -> None:
        if download.state == "done":
            if self.marked_key == f"download {download.id}":
                self._wanted, self.listed.moved = f"local {download.path}", False
            self._read_files()
        self._update(downloads=tuple(self.services.downloading.all()))

    def _newest_download(self) -> str:
        newest = self.services.downloading.newest()
        if newest is None:
            return ""
        return f"local {newest.path}" if newest.state == "done" else f"download {newest.id}"

    @work(exclusive=True, group="cancel")
    async def _cancel(self, download: Download) -> None:
        if not download.done:
            self.services.downloading.cancel(download.id, discard=True)
            return
        question = (
            f"{downloads.download_title(download.order.model)}: {units.size(download.done)} of "
            f"{units.size(download.total)} downloaded. Keep the partial files to resume later?"
        )
        choices = [DialogChoice(_KEEP, "Keep"), DialogChoice(_DISCARD, "Delete", danger=True)]
        answer = await self.app.push_screen_wait(ChoiceScreen("Cancel download", question, choices))
        if answer is not None:
            self.services.downloading.cancel(download.id, discard=answer == _DISCARD)

    # The hub

    @work(exclusive=True, group="search")
    async def search_hub(self, query: str) -> None:
        """Search; the result of an earlier search is dropped."""

        def find() -> tuple[FoundRepository, ...]:
            found = tuple(self.services.hub.search(query))
            for one in found:
                engine_knows(one.architecture)  # reads the engine's library: here, not where rows are shown
            return found

        self._update(search=HubSearch(query, running=True))
        try:
            search = HubSearch(query, found=await self.services.ask_hub(find))
        except CpuchatError as error:
            search = HubSearch(query, problem=error.message, hint=error.hint)
        self._update(search=search)

    # List

    @property
    def entry(self) -> ModelListEntry | None:
        return self._entries.get(self.marked_key)

    @on(Input.Changed, "#filter")
    def _typed(self) -> None:
        self.listed.moved = False  # other words, another first line
        self.state_changed()
        if (path := typed_path(self._text)) is not None:
            self._read_typed(self._text.strip(), path)

    @work(exclusive=True, group="typed")
    async def _read_typed(self, text: str, path: Path) -> None:
        typed = await run_in_daemon_thread(lambda: self.reader.typed(text, path))
        self._update(typed=typed)
        if typed.problem in (entries.FOLDER, ""):
            await asyncio.sleep(_READ_AFTER)
            models = await run_in_daemon_thread(lambda: self.reader.models_at(path))
            self._update(typed=dataclasses.replace(typed, models=models))
            self._predict_listed()

    def state_changed(self) -> None:
        if not self.has_widgets:
            return
        sections = self.state.sections(self._text)
        self._entries = {entry.key: entry for section in sections for entry in section.entries}
        chosen, listed = self._loading or self._loaded, self.listed
        making = self.services.quantizing
        rows = entries.list_rows(sections, self.predictions, chosen, is_loading=self._loading is not None,
                                 writing=downloads.quantizing(making.job, making.progress),
                                 order=self.services.models_order)  # fmt: skip
        found = self.state.search.found if self.state.search is not None else None
        if listed.moved and listed.marked in self._entries:
            mark = listed.marked
        elif listed.moved and listed.marked == SEARCH and found:
            mark = f"hub {found[0].id}"
        elif "folder" in self._entries:  # who pastes its path wants to add it
            mark = "folder"
        elif self._wanted in self._entries:
            mark = self._wanted
        elif isinstance(chosen, Path) and is_demo(chosen):  # who has another model wants that
            subjects = {key: entry.subject for key, entry in self._entries.items()}
            here = [key for key, one in subjects.items() if isinstance(one, LocalModel) and one.source != "demo"]
            fits = [key for key in here if verdict(self.predictions.get(key)) not in ("not free", "too large")]
            mark = next((key for key in (*fits, *map(catalog_key, self.state.catalog.suits)) if key in subjects), "")
        else:
            mark = f"{'server' if isinstance(chosen, ServerModel) else 'local'} {chosen}"
        listed.show(rows, mark)
        self.query_one("#list").border_subtitle = doubt(self.machine, in_app=True)

    @property
    def _text(self) -> str:
        return self.query_one("#filter", Input).value

    @property
    def _loaded(self) -> Source | None:
        return source(self.reader.loaded.path) if self.reader.loaded is not None else None

    @on(ModelList.Marked)
    def _marked(self) -> None:
        if (entry := self.entry) is None:
            self.show_details([], "About")
        else:
            details = self.details.get(entry.key) or ModelDetails(self.predictions.get(entry.key))  # until it is read
            rows = entries.detail_rows(entry.subject, details, self.catalog, self._loaded)
            self.show_details(rows, entries.title(entry.subject))
        self.refresh_bindings()
        if self._details_timer is not None:
            self._details_timer.stop()
        self._details_timer = self.set_timer(_READ_AFTER, self.read_details)

    # Keys

    @on(ModelList.Chosen)
    def action_choose(self) -> None:
        """Load a model, or open what the entry offers."""
        # The app finds Enter before it hands other keys on: what was typed just before may still wait in the box.
        self.query_one(FilterBox).call_later(self._choose)

    def _choose(self) -> None:
        self.state_changed()
        match self.entry.subject if self.entry is not None else None:
            case LocalModel(damaged=str() as problem):
                self.warn(problem)
            case LocalModel() as model:
                self._take(model.path)
            case TypedFile(problem="") as file:
                self._take(file.path)
            case TypedFile() as file:
                self.warn(f"{file.path}: {file.problem}.")
            case TypedFolder(text="", is_known=False) as folder:
                self._add_folder(folder.path.absolute())
            case TypedFolder():
                self.action_complete()
            case Download() as download:
                self.services.downloading.hold(download.id)
            case CatalogModel() as model:
                self._open_repository(model.repos[0], model.quantization)
            case FoundRepository() as found:
                self._open_repository(found.id, "")
            case ServerEntry(is_invalid=True) as served:
                self.warn(served.problem)
            case ServerEntry(model=None) as served:
                self.connect(served.source.server)
            case ServerEntry() as served:
                self._take(served.source)
            case HubSearch(running=False) as search:
                self._ask_hub(search)

    def action_complete(self) -> None:
        """Complete a typed path by the selected line, else by the first one that continues it."""
        box, typed = self.query_one("#filter", Input), self.state.typed
        if typed.text == box.value.strip() and typed.completions:
            chosen = self.marked_key.removeprefix("path ")
            box.value = chosen if chosen in typed.completions else typed.completions[0]
            box.cursor_position = len(box.value)

    def _add_folder(self, folder: Path) -> None:
        folders = [*self.services.settings.model.folders, str(folder)]
        self.services.save_settings({"model": {"folders": folders}})
        self.services.set_folders(folders)
        self.reader = dataclasses.replace(self.reader, library=self.services.library)
        if self.state.typed.models:
            self._wanted = f"local {self.state.typed.models[0].path}"
        self.query_one("#filter", Input).value = ""
        self.refresh_models()

    @work(exclusive=True, group="take")
    async def _take(self, wanted: Source) -> None:
        if wanted == self._loading:  # which goes on
            await self.dismiss_when_on_top(None)
        elif isinstance(wanted, ServerModel):
            await self.dismiss_when_on_top(wanted)
        else:
            await choose(self, self.services, wanted)

    def action_search(self) -> None:
        if text := self._text.strip():
            self._ask_hub(HubSearch(text))
        else:
            self.notify("Type a search first.")

    @work(exclusive=True, group="link")
    async def _ask_hub(self, search: HubSearch) -> None:
        if not search.is_link:
            self.search_hub(search.query)
            self.listed.mark(SEARCH)  # comes into view, as what is found will do
            return
        from cpuchat.models.hub.client import parse_address

        try:
            address = await run_in_daemon_thread(lambda: parse_address(search.query))
        except CpuchatError as error:
            self.warn(str(error))
        else:
            self._open_repository(address.repo, address.quantization)

    action_rescan = refresh_models

    def action_sort(self) -> None:
        at = entries.ORDERS.index(self.services.models_order)
        self.services.models_order = entries.ORDERS[(at + 1) % len(entries.ORDERS)]
        self.state_changed()

    def action_close(self) -> None:
        box, search = self.query_one("#filter", Input), self.state.search
        if search is not None and (search.running or not box.value):
            self.workers.cancel_group(self, "search")
            self._update(search=None)
        elif box.value:
            box.value = ""
        else:
            self.dismiss(None)

    # What can be done with a model that is here

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer for the selected line only what can be done with it."""
        if action not in ("quantize", "compare", "drafts", "delete") or not self.has_widgets:
            return True
        match self.entry.subject if self.entry is not None else None:
            case LocalModel() | TypedFile(problem=""):
                return True
            case Download():
                return action == "delete"
            case _:
                return False

    def _marked_model(self, *, whole: bool = False) -> LocalModel | None:
        """Return the selected model; else, or where it is not `whole` but has to be, say why not."""
        model = self.entry.subject if self.entry is not None else None
        if isinstance(model, TypedFile):
            model = self.reader.library.at(model.path)
        if not isinstance(model, LocalModel):
            self.warn("Not a language model.")
        elif model.damaged and whole:
            self.warn(model.damaged)
        else:
            return model
        return None

    @work(exclusive=True, group="take")
    async def action_compare(self) -> None:
        """Compare the loaded model with the selected one; itself with what is chosen then."""
        from cpuchat.compare.runner import Side

        model, loaded = self._marked_model(whole=True), self._loaded
        if model is None:
            return
        if self._loading is not None or not isinstance(loaded, Path):
            self.warn("Load a model on this machine first: it is compared with the selected one.")
            return
        other = await run_in_daemon_thread(lambda: Side.of(model.path))
        if model.path == loaded and (other := await self.services.navigation.compare_with(loaded)) is None:
            return
        await self.dismiss_when_on_top((await run_in_daemon_thread(lambda: Side.of(loaded)), other))

    @work
    async def action_quantize(self) -> None:
        if model := self._marked_model(whole=True):
            made = await self.services.navigation.quantize(model)
            if made is not None:
                self._wanted = f"local {made}"
                self.query_one("#filter", Input).value = ""
                self.listed.moved = False
            self.refresh_models()

    @work
    async def action_delete(self) -> None:
        if self.entry is not None and isinstance(self.entry.subject, Download):
            self._cancel(self.entry.subject)
            return
        model = self._marked_model()
        if model is None:
            return
        try:
            with self.services.keys_held():
                deletion = await asyncio.to_thread(self.reader.deletion, model, self._loading)
            if deletion.refused:
                self.warn(deletion.refused)
            elif await self.confirm("Delete model", entries.deletion_question(deletion), "Delete"):
                freed = await asyncio.to_thread(delete, deletion)
                self.notify(clean_line(f"Deleted {model.path.name}, freed {units.size(freed)}."), markup=False)
                self.refresh_models()
        except (CpuchatError, OSError) as error:
            self.warn(str(error))
            self.refresh_models()

    # Other screens

    @work
    async def _open_repository(self, repo: str, quantization: str) -> None:
        if (path := await self.services.navigation.repository(repo, quantization)) is not None:
            self.dismiss(path)
        else:
            self.refresh_models()

    def action_downloads(self) -> None:
        """Select the download that began or ended last, else one that is left."""
        self.query_one("#filter", Input).value = ""
        self._wanted, self.listed.moved = self._newest_download(), False
        self.state_changed()
        if not self._wanted:
            self.notify("No downloads. Enter on a model of the catalog shows its files.")

    @work
    async def action_drafts(self) -> None:
        model = self._marked_model(whole=True)
        if model is not None and (path := await self.services.navigation.draft_models(model)) is not None:
            self._take(path)
