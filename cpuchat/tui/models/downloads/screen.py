"""All downloads: progress, pause, resume, retry, cancel, load."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.widgets import OptionList

from cpuchat.models.downloads.state import RUNNING, Download
from cpuchat.present import downloads
from cpuchat.telemetry import units
from cpuchat.tui import keys
from cpuchat.tui.models.choice import choose
from cpuchat.tui.models.downloads.list import DownloadList
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import Choice, ChoiceScreen
from cpuchat.tui.widgets.key_footer import KeyFooter
from cpuchat.tui.widgets.labelled import Labelled
from cpuchat.tui.widgets.list_screen import DetailsScreen

_KEEP, _DISCARD = "keep", "discard"
# What is done with the marked download.
_MARKED_ACTIONS = ("load", "hold", "cancel")


class DownloadsScreen(DetailsScreen[Path | None]):
    """Returns a file to load, or None."""

    CSS_PATH = "downloads.tcss"
    AUTO_FOCUS = "#downloads"
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("downloads")
    KEYS: ClassVar = "downloads"

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services
        self._downloading = services.downloading
        self._enabled: list[bool | None] = []

    def compose(self) -> ComposeResult:
        with Vertical(id="list") as pane:
            pane.border_title = "Downloads"
            yield DownloadList(id="downloads")
        with Vertical(id="about") as about:
            about.border_title = "About"
            yield Labelled(id="details")
        yield KeyFooter()

    def on_mount(self) -> None:
        self._downloading.changed.subscribe(self, lambda _: self._show())
        self.call_after_refresh(self._show)  # the list knows its width then

    @property
    def _marked(self) -> Download | None:
        return self.query_one(DownloadList).marked

    def _show(self) -> None:
        self.query_one(DownloadList).show(self._downloading.all())
        self._show_details()

    @on(OptionList.OptionHighlighted)
    def _show_details(self) -> None:
        download = self._marked
        self.query_one(Labelled).show(downloads.details(download) if download is not None else [])
        enabled = [self.check_action(action, ()) for action in _MARKED_ACTIONS]
        if enabled != self._enabled:  # this lays the footer out again
            self._enabled = enabled
            self.refresh_bindings()

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action not in _MARKED_ACTIONS or not self.is_mounted:
            return True
        download = self._marked
        if download is None:
            return None
        if action == "load":
            return True if download.state not in RUNNING else None
        return True if action == "cancel" or download.state != "done" else None

    def action_load(self) -> None:
        download = self._marked
        if download is None:
            return
        if download.state == "done":
            self._take(Path(download.path))
        elif download.state not in RUNNING:
            self._downloading.resume(download.id)

    @work(exclusive=True, group="take")
    async def _take(self, path: Path) -> None:
        await choose(self, self._services, path)

    @on(OptionList.OptionSelected)
    def _clicked(self) -> None:
        self.action_load()

    def action_hold(self) -> None:
        if self._marked is not None:
            self._downloading.hold(self._marked.id)

    @work(exclusive=True, group="cancel")
    async def action_cancel(self) -> None:
        download = self._marked
        if download is None:
            return
        if download.state == "done" or not download.done:
            self._downloading.cancel(download.id, discard=download.state != "done")
            return
        question = (
            f"{downloads.title(download.model)}: {units.size(download.done)} of {units.size(download.total)} "
            "downloaded. Keep the partial files to resume later?"
        )
        answer = await self.app.push_screen_wait(
            ChoiceScreen("Cancel download", question,
                         [Choice(_KEEP, "Keep"), Choice(_DISCARD, "Delete", danger=True)])
        )  # fmt: skip
        if answer is not None:
            self._downloading.cancel(download.id, discard=answer == _DISCARD)
