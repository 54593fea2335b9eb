"""The models screen: models on this machine, the catalog, the hub, any GGUF file.

Chooses another model; if it cannot be loaded, the reason is shown where it was chosen.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.timer import Timer
from textual.widgets import Input

from cpuchat.base.errors import CpuchatError
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.base.text import clean_line
from cpuchat.config.servers import ServerModel, Source, host, source
from cpuchat.models.catalog import CatalogModel
from cpuchat.models.downloads.state import RUNNING, Download
from cpuchat.models.hub.repository import FoundRepository
from cpuchat.models.library.deleting import Deletion, delete
from cpuchat.models.library.places import LocalModel
from cpuchat.present.models import doubt
from cpuchat.telemetry import units
from cpuchat.tui import keys
from cpuchat.tui.models import entries
from cpuchat.tui.models.entries import SEARCH, Entry, HubSearch, ModelDetails, ServerEntry, TypedFile
from cpuchat.tui.models.reader import ModelsReader, ReadingScreen
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import ConfirmScreen, Dismissable
from cpuchat.tui.widgets.download_line import DownloadLine, QuantizeLine
from cpuchat.tui.widgets.key_footer import KeyFooter
from cpuchat.tui.widgets.model_list import Labelled, ModelList


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


_READ_AFTER = 0.12  # s on which the mark must rest before a header is read


class FilterBox(Input):
    """Passes Del on where there is nothing to delete behind the cursor."""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "delete_right":
            return self.cursor_position < len(self.value) or not self.selection.is_empty
        return True


class ModelsScreen(ReadingScreen):
    """Returns the model to load, or None."""

    CSS_PATH = "models.tcss"
    AUTO_FOCUS = "#filter"
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("models")
    KEYS: ClassVar = "models"

    def __init__(self, services: Services, reader: ModelsReader | None = None) -> None:
        super().__init__(services, reader)
        self._entries: dict[str, Entry] = {}
        self._details_timer: Timer | None = None
        self._new: Path | None = None

    def compose(self) -> ComposeResult:
        with Horizontal(id="panes"):
            with Vertical(id="list") as pane:
                pane.border_title = "Models"
                wanted = "search, or paste the path of a GGUF file or the address of a server"
                yield FilterBox(placeholder=wanted, id="filter", compact=True)
                yield ModelList(id="rows")
            with Vertical(id="about"):
                yield Labelled(id="details")
        yield DownloadLine(self.services.downloading)
        yield QuantizeLine(self.services.quantizing)
        yield KeyFooter()

    # List

    @property
    def entry(self) -> Entry | None:
        """Return the selected entry."""
        return self._entries.get(self.query_one(ModelList).marked)

    @on(Input.Changed, "#filter")
    def _typed(self) -> None:
        self.query_one(ModelList).moved = False  # other words, another first line
        self.state_changed()

    def state_changed(self) -> None:
        if not self.has_widgets:
            return
        sections, listed = self.state.sections(self._text), self.query_one(ModelList)
        self._entries = {entry.key: entry for section in sections for entry in section.entries}
        rows = entries.list_rows(sections, self.state.local or (), self.predictions, self._loaded)
        listed.show(rows, self._mark(listed))
        self.query_one("#list").border_subtitle = doubt(self.machine, "m on F12")

    def _mark(self, listed: ModelList) -> str:
        """Return the key to select: what the user selected, or the first result of a search."""
        if listed.moved and listed.marked in self._entries:
            return listed.marked
        found = self.state.search.found if self.state.search is not None else None
        if listed.moved and listed.marked == SEARCH and found:
            return next((key for key, entry in self._entries.items() if entry.subject is found[0]), "")
        new = f"local {self._new}"  # was made here, from another one
        loaded = self._loaded
        kind = "server" if isinstance(loaded, ServerModel) else "local"
        return new if new in self._entries else f"{kind} {loaded}"

    @property
    def _text(self) -> str:
        return self.query_one("#filter", Input).value

    @property
    def _loaded(self) -> Source | None:
        return source(self.reader.loaded.path) if self.reader.loaded is not None else None

    @on(ModelList.Marked)
    def _marked(self) -> None:
        self._show_details()
        if self._details_timer is not None:
            self._details_timer.stop()
        self._details_timer = self.set_timer(_READ_AFTER, self._read_selected)

    def _read_selected(self) -> None:
        if (entry := self.entry) is not None:
            self.read_details(entry)

    def _show_details(self) -> None:
        entry, pane = self.entry, self.query_one("#about")
        rows: list[entries.Row] = []
        if entry is not None:
            rows = entries.detail_rows(entry.subject, self._details_of(entry), self.catalog, self._loaded)
        pane.border_title = Content(_title(entry))
        pane.border_subtitle = entries.keys(entry.subject) if entry is not None else ""
        self.query_one(Labelled).show(rows)

    def _details_of(self, entry: Entry) -> ModelDetails:
        """Return its details; a prediction until its header is read."""
        known = self.details.get(entry.key)
        return known or ModelDetails(self.predictions.get(entry.key), reading=isinstance(entry.subject, LocalModel))

    # Keys

    @on(ModelList.Chosen)
    def action_choose(self) -> None:
        """Load a model, or open what the entry offers."""
        # The app finds Enter before it hands other keys on: what was typed just before may still wait in the box.
        self.query_one(FilterBox).call_later(self._choose)

    def _choose(self) -> None:
        self.state_changed()
        match self.entry.subject if self.entry is not None else None:
            case LocalModel() as model if entries.resumable(model):
                self._open_repository(model.repo, model.quantization)
            case LocalModel(damaged=str() as problem):
                self.warn(problem)
            case LocalModel() as model:
                self._take(model.path)
            case TypedFile(problem="") as file:
                self._take(file.path)
            case TypedFile() as file:
                self.warn(f"{file.path}: {file.problem}.")
            case Download() as download if download.state in RUNNING:
                self.action_downloads()
            case Download() as download:
                self.services.downloading.resume(download.id)
            case CatalogModel() as model:
                self._open_repository(model.repos[0], model.quantization)
            case FoundRepository() as found:
                self._open_repository(found.id, "")
            case ServerEntry(is_invalid=True) as served:
                self.warn(served.problem)
            case ServerEntry(model=None) as served:
                self.connect(served.source.server)
            case ServerEntry() as served:
                self._use(served.source)
            case HubSearch(running=False) as search:
                self._ask_hub(search)
            case _:
                pass

    @work(exclusive=True, group="take")
    async def _take(self, path: Path) -> None:
        await choose(self, self.services, path)

    @work(exclusive=True, group="take")
    async def _use(self, source: ServerModel) -> None:
        await self.dismiss_when_on_top(source)

    def action_search(self) -> None:
        if text := self._text.strip():
            self._ask_hub(HubSearch(text))
        else:
            self.notify("Type a search first.")

    def _ask_hub(self, search: HubSearch) -> None:
        if search.is_link:
            self._open_link(search.query)
        else:
            self.search_hub(search.query)
            self.query_one(ModelList).mark(SEARCH)  # comes into view, as what is found will do

    @work(exclusive=True, group="link")
    async def _open_link(self, link: str) -> None:
        from cpuchat.models.hub.client import parse_address

        try:
            address = await run_in_daemon_thread(lambda: parse_address(link))
        except CpuchatError as error:
            self.warn(str(error))
        else:
            self._open_repository(address.repo, address.quantization)

    def action_rescan(self) -> None:
        self.refresh_models()

    def action_close(self) -> None:
        box, search = self.query_one("#filter", Input), self.state.search
        if search is not None and search.running:
            self.leave_search()
        elif box.value:
            box.value = ""
        elif search is not None:
            self.leave_search()
        else:
            self.dismiss(None)

    # What can be done with a model that is here

    def _marked_model(self, what: str) -> LocalModel | None:
        """Return the selected model if it is on this machine; else say that `what` needs one."""
        match self.entry.subject if self.entry is not None else None:
            case LocalModel() as model:
                return model
            case TypedFile(problem="") as file if model := self.reader.library.at(file.path):
                return model
        self.notify(f"Only a downloaded model can be {what}. Enter shows its files.")
        return None

    def action_inspect(self) -> None:
        if model := self._marked_model("inspected"):
            self.services.navigation.inspection(model.name, lambda: self.reader.header(model.path))

    @work
    async def action_quantize(self) -> None:
        model = self._marked_model("quantized")
        if model is not None and model.damaged:
            self.warn(model.damaged)
        elif model is not None:
            self._new = await self.services.navigation.quantize(model)
            if self._new is not None:
                self.query_one("#filter", Input).value = ""
                self.query_one(ModelList).moved = False
            self.refresh_models()

    @work
    async def action_tune(self) -> None:
        model = self._marked_model("tuned")
        if model is not None and model.damaged:
            self.warn(model.damaged)
        elif model is not None:
            self._returned(await self.services.navigation.tune(model.path))

    @work
    async def action_delete(self) -> None:
        model = self._marked_model("deleted")
        if model is None:
            return
        try:
            deletion = await asyncio.to_thread(self.reader.deletion, model)
            if deletion.refused:
                self.warn(deletion.refused)
            elif await self._agreed(deletion):
                freed = await asyncio.to_thread(delete, deletion)
                self.notify(clean_line(f"Deleted {model.name}, freed {units.size(freed)}."), markup=False)
                self.refresh_models()
        except (CpuchatError, OSError) as error:
            self.warn(str(error))
            self.refresh_models()

    async def _agreed(self, deletion: Deletion) -> bool:
        question = entries.deletion_question(deletion)
        answer = await self.app.push_screen_wait(ConfirmScreen("Delete model", question, "Delete", "Cancel"))
        return bool(answer)

    # Other screens

    @work
    async def _open_repository(self, repo: str, quantization: str) -> None:
        self._returned(await self.services.navigation.repository(repo, quantization))

    @work
    async def action_downloads(self) -> None:
        self._returned(await self.services.navigation.downloads())

    @work
    async def action_drafts(self) -> None:
        if self.services.conversation.model is None:
            self.warn("Load a model first.")
        elif isinstance(self.services.loaded, ServerModel):
            self.warn("The server chooses its draft model: see its options.")
        else:
            self._returned(await self.services.navigation.draft_models())

    def _returned(self, path: Path | None) -> None:
        if path is not None:
            self.dismiss(path)
        else:
            self.refresh_models()


def _title(entry: Entry | None) -> str:
    match entry.subject if entry is not None else None:
        case LocalModel(name=name) | CatalogModel(name=name):
            return clean_line(name)
        case Download(order=order):
            return clean_line(order.model.name)
        case FoundRepository(id=name):
            return clean_line(name)
        case ServerEntry(source=source):
            return clean_line(source.stem if source.name else host(source.server))
        case _:
            return "About"
