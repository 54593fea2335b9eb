"""All downloads, in two lines each, the second one a bar: progress, pause, resume, retry, cancel, load."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from cpuchat.models.downloads.state import RUNNING, Download
from cpuchat.present import downloads
from cpuchat.telemetry import units
from cpuchat.tui.models.screen import choose
from cpuchat.tui.services import Services
from cpuchat.tui.widgets import charts
from cpuchat.tui.widgets.charts import rule
from cpuchat.tui.widgets.dialogs import ChoiceScreen, DialogChoice
from cpuchat.tui.widgets.key_footer import KeyFooter
from cpuchat.tui.widgets.model_list import DetailsScreen, Labelled

_MIN_BAR, _MAX_BAR = 8, 60
_EMPTY = "No downloads. Ctrl+O in the chat finds models."


class DownloadList(OptionList):
    """Up and down select; the keys act on the selection in the screen."""

    COMPONENT_CLASSES: ClassVar[set[str]] = charts.CLASSES
    DEFAULT_CSS = f"""
    DownloadList {{
        scrollbar-gutter: stable;
        & > .option-list--option-disabled {{ color: $hint; }}
        {charts.CSS}
    }}
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, compact=True)
        self._downloads: tuple[Download, ...] = ()

    @property
    def marked(self) -> Download | None:
        index = self.highlighted
        return self._downloads[index] if index is not None and index < len(self._downloads) else None

    def show(self, downloads: Sequence[Download]) -> None:
        """List these; the selection stays, or goes to the neighbor of one that is gone."""
        before, self._downloads = self._downloads, tuple(downloads)
        if before and [d.id for d in before] == [d.id for d in self._downloads]:
            for index, (old, new) in enumerate(zip(before, self._downloads, strict=True)):
                if old != new:
                    self.replace_option_prompt_at_index(index, self._lines_of(new))
            return
        marked = before[self.highlighted].id if before and self.highlighted is not None else ""
        place = self.highlighted or 0
        self.clear_options()
        if not self._downloads:
            self.add_option(Option(Text(_EMPTY, style="italic"), disabled=True))
            return
        self.add_options([Option(self._lines_of(download)) for download in self._downloads])
        ids = [download.id for download in self._downloads]
        self.highlighted = ids.index(marked) if marked in ids else min(place, len(ids) - 1)

    def on_resize(self) -> None:
        for index, download in enumerate(self._downloads):
            self.replace_option_prompt_at_index(index, self._lines_of(download))

    def _lines_of(self, download: Download) -> Text:
        """`↓ name Q4_K_M      38.1 MB/s  47 s left` over `████────  61 %  2.9/4.7 GB`."""
        width = self.scrollable_content_region.width or self.size.width
        fill, track, dim, failed = (charts.style_of(self, part) for part in ("fill", "track", "dim", "failed"))
        name = Text(downloads.download_title(download.order.model), no_wrap=True)
        name.truncate(max(width - 2 - 2 - downloads.STATE, 8), overflow="ellipsis", pad=True)
        state = Text(downloads.state(download), failed if download.state == "failed" else "")
        first = Text.assemble(f"{downloads.download_mark(download)} ", name, "  ", state)
        figures = f"  {downloads.percent(download)}  {downloads.amount(download)}"
        cells = max(min(width - 2 - len(figures), _MAX_BAR), _MIN_BAR)
        parts = [(text, fill if part == "fill" else track) for text, part in rule(downloads.share(download), cells)]
        return Text.assemble(first, "\n  ", *parts, (figures, dim), no_wrap=True, overflow="crop")


_KEEP, _DISCARD = "keep", "discard"


class DownloadsScreen(DetailsScreen[Path | None], keys="downloads"):
    """Returns a file to load, or None."""

    CSS_PATH = "downloads.tcss"
    AUTO_FOCUS = "#downloads"
    MARKED_ACTIONS = ("load", "hold", "cancel")

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services, self._downloading = services, services.downloading

    def compose(self) -> ComposeResult:
        with Vertical(id="list") as pane:
            pane.border_title = "Downloads"
            yield DownloadList(id="downloads")
        with Vertical(id="about"):
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
        self.show_details(downloads.download_details(download) if download is not None else [], "About")

    # Keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action not in self.MARKED_ACTIONS or not self.is_mounted:
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
            f"{downloads.download_title(download.order.model)}: {units.size(download.done)} of "
            f"{units.size(download.total)} downloaded. Keep the partial files to resume later?"
        )
        choices = [DialogChoice(_KEEP, "Keep"), DialogChoice(_DISCARD, "Delete", danger=True)]
        answer = await self.app.push_screen_wait(ChoiceScreen("Cancel download", question, choices))
        if answer is not None:
            self._downloading.cancel(download.id, discard=answer == _DISCARD)
