"""Draft models for the loaded model and their predicted speed-up; Enter uses one, and downloads it first if needed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content

from cpuchat.daemon_thread import run_in_daemon_thread
from cpuchat.errors import CpuchatError
from cpuchat.models.drafts.candidates import Candidate, recommended
from cpuchat.present import drafts
from cpuchat.present.rows import ListRow
from cpuchat.text import clean_line
from cpuchat.tui import keys
from cpuchat.tui.models.drafts import choice as draft_choice
from cpuchat.tui.models.drafts.measure import MeasurePairScreen
from cpuchat.tui.models.drafts.reader import DraftReader
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.download_line import DownloadLine
from cpuchat.tui.widgets.key_footer import KeyFooter
from cpuchat.tui.widgets.labelled import Labelled
from cpuchat.tui.widgets.list_screen import ListScreen
from cpuchat.tui.widgets.model_list import ModelList


class DraftModelsScreen(ListScreen[Path | None]):
    """Returns the loaded model's file if it has to be loaded again, else None. Verdicts fill in one by one."""

    CSS_PATH = "draft_models.tcss"
    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("draft_models")
    KEYS: ClassVar = "draft_models"

    def __init__(self, services: Services, reader: DraftReader | None = None) -> None:
        super().__init__()
        self._services = services
        self._reader = reader or DraftReader.of(services)
        self._found: dict[str, Candidate] | None = None
        self._problem = ""

    def compose(self) -> ComposeResult:
        with Horizontal(id="panes"):
            with Vertical(id="list") as pane:
                pane.border_title = Content(clean_line(f"Draft models for {self._reader.loaded.name}"))
                yield ModelList(id="candidates")
            with Vertical(id="about"):
                yield Labelled(id="details")
        yield DownloadLine(self._services.downloading)
        yield KeyFooter()

    def on_mount(self) -> None:
        self._show()
        self._find(self._reader)

    # Looking

    @work(exclusive=True, group="find")
    async def _find(self, reader: DraftReader) -> None:
        try:
            target, found = await run_in_daemon_thread(reader.candidates)
        except (CpuchatError, OSError) as error:
            self._found, self._problem = {}, str(error)
            self._show()
            return
        self._found = {one.spec: one for one in found}
        self._show()
        for one in sorted(found, key=lambda one: one.where == "hub"):  # the hub may let all others wait
            self._found[one.spec] = await run_in_daemon_thread(partial(reader.check, one, target))
            self._show()
        for one in await run_in_daemon_thread(lambda: reader.heads_on_hub(target, found)):
            self._found[one.spec] = one
            self._show()
            self._found[one.spec] = await run_in_daemon_thread(partial(reader.check, one, target))
            self._show()

    # Showing

    def _show(self) -> None:
        listed = self.query_one(ModelList)
        if self._found is None:
            listed.show([ListRow(note="Reading…")])
            return
        found = self._found
        loaded = next((key for key, one in found.items() if self._reader.is_loaded(one.name, one.quantization)), "")
        wanted = self._services.settings.speculation.wanted_draft or self._reader.chosen() or drafts.AUTO
        mark = listed.marked if listed.moved else loaded or next(iter(found), "")
        listed.show(drafts.rows(found, loaded, wanted), mark)
        if not found and not self._problem:
            self.query_one("#list").border_subtitle = "no smaller model here, none in the catalog"

    @on(ModelList.Marked)
    def _show_details(self) -> None:
        key = self.query_one(ModelList).marked
        if not key:
            return
        one = (self._found or {}).get(key)
        is_loaded = one is not None and self._reader.is_loaded(one.name, one.quantization)
        is_best = one is not None and one is recommended((self._found or {}).values())
        rows = drafts.details(key, one, is_loaded=is_loaded, is_best=is_best)
        pane = self.query_one("#about")
        pane.border_title = Content(clean_line(one.name) if one is not None else "About")
        pane.border_subtitle = drafts.keys(one, is_loaded=is_loaded)
        problem = [("problem", clean_line(self._problem))] if self._problem else []
        self.query_one(Labelled).show([*problem, *rows])

    # Keys

    @on(ModelList.Chosen)
    def action_use(self) -> None:
        key = self.query_one(ModelList).marked
        one = (self._found or {}).get(key)
        if not key:
            return
        if one is None:
            self._use(key)
        elif one.verdict is not None and not one.verdict.ok:
            self.warn(f"{one.name} cannot be the draft model: {one.verdict.reason}.")
        elif one.path is not None and one.verdict is None:
            self.warn(f"{one.name} is still being checked.")
        elif one.path is not None:
            self._use(one.spec)
        else:
            self._fetch(one)

    @work(exclusive=True, group="measure")
    async def action_measure(self) -> None:
        one = (self._found or {}).get(self.query_one(ModelList).marked)
        if one is None or one.path is None:
            self.warn("Only a downloaded draft model can be measured.")
        elif one.head is not None:
            self.warn("A draft head cannot be measured beforehand: load it, and the panel shows its acceptance.")
        elif one.verdict is None or not one.verdict.ok:
            self.warn(f"{one.name} is incompatible." if one.verdict else f"{one.name} is still being checked.")
        elif self._services.chat.busy:
            self.warn("You can measure it when the answer is done (Esc in the chat stops it).")
        else:
            screen = MeasurePairScreen(self._services, Path(self._reader.loaded.path), one.path)
            depth = await self.app.push_screen_wait(screen)
            if depth is not None:
                self._use(str(one.path), depth)

    def _use(self, wanted: str, depth: int | None = None) -> None:
        target = Path(self._reader.loaded.path)
        draft_choice.use(self._services, target, wanted, depth)
        self.dismiss(target)

    @work(exclusive=True, group="fetch")
    async def _fetch(self, candidate: Candidate) -> None:
        """Start the download. The app does the rest: this screen may be closed."""
        try:
            repository, model = await run_in_daemon_thread(lambda: self._reader.to_download(candidate))
            download = self._services.downloading.start(repository.id, repository.revision, model, repository.newest_at)
        except CpuchatError as error:
            self.warn(str(error))
            return
        target = Path(self._reader.loaded.path)
        work = draft_choice.use_when_here(self.app, self._services, download, target)
        self.app.run_worker(work, group="drafts", name="drafts")
        self.notify(f"{clean_line(model.name)} will be used once downloaded.", markup=False)
