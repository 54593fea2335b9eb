"""All downloads: progress, pause, resume, retry, cancel, load."""

from __future__ import annotations

from pathlib import Path

from textual import on, work

from cpuchat.models.downloads.state import RUNNING, Download
from cpuchat.present import downloads
from cpuchat.present.table import ListRow
from cpuchat.telemetry import units
from cpuchat.tui.models.screen import choose
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import ChoiceScreen, DialogChoice
from cpuchat.tui.widgets.model_list import ModelList, PanesScreen

_EMPTY = "No downloads. Ctrl+O in the chat finds models."
_KEEP, _DISCARD = "keep", "discard"


class DownloadsScreen(PanesScreen[Path | None], keys="downloads"):
    """Returns a file to load, or None."""

    CSS_PATH = "downloads.tcss"
    MARKED_ACTIONS = ("load", "hold", "cancel")
    list_title = "Downloads"

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services, self._downloading = services, services.downloading
        self._ids: list[str] = []

    def on_mount(self) -> None:
        self._downloading.changed.subscribe(self, lambda _: self._show())
        self._show()

    @property
    def marked(self) -> Download | None:
        return next((one for one in self._downloading.all() if one.id == self.marked_key), None)

    def _show(self) -> None:
        """List all; the selection stays, or goes to the neighbor of one that is gone."""
        found = self._downloading.all()
        before, self._ids = self._ids, [one.id for one in found]
        mark = self.marked_key
        if mark in before and mark not in self._ids:
            mark = next(iter(self._ids[before.index(mark) :] or self._ids[-1:]), "")
        self.listed.show([downloads.row(one) for one in found] or [ListRow(note=_EMPTY)], mark)

    @on(ModelList.Marked)
    def _show_details(self) -> None:
        download = self.marked
        self.show_details(downloads.download_details(download) if download is not None else [], "About")

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action not in self.MARKED_ACTIONS or not self.is_mounted:
            return True
        download = self.marked
        if download is None:
            return None
        if action == "load":
            return True if download.state not in RUNNING else None
        return True if action == "cancel" or download.state != "done" else None

    @on(ModelList.Chosen)
    @work(exclusive=True, group="take")
    async def action_load(self) -> None:
        download = self.marked
        if download is None:
            return
        if download.state == "done":
            await choose(self, self._services, Path(download.path))
        elif download.state not in RUNNING:
            self._downloading.resume(download.id)

    def action_hold(self) -> None:
        if self.marked is not None:
            self._downloading.hold(self.marked.id)

    @work(exclusive=True, group="cancel")
    async def action_cancel(self) -> None:
        download = self.marked
        if download is None:
            return
        if download.state == "done" or not download.done:
            self._downloading.cancel(download.id, discard=download.state != "done")
            return
        question = (
            f"{downloads.download_title(download.order.model)}: {units.size(download.done)} of "
            f"{units.size(download.total)} downloaded. Keep the partial files to resume later?"
        )
        choices = [DialogChoice(_KEEP, "Keep"), DialogChoice(_DISCARD, "Delete", danger=True)]
        answer = await self.app.push_screen_wait(ChoiceScreen("Cancel download", question, choices))
        if answer is not None:
            self._downloading.cancel(download.id, discard=answer == _DISCARD)
