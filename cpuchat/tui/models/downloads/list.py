"""The list of downloads: two lines each, the second one a bar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from cpuchat.models.downloads.state import Download
from cpuchat.present import downloads
from cpuchat.tui.widgets import progress
from cpuchat.tui.widgets.charts import rule

_LEAST_BAR, _MOST_BAR = 8, 60
_EMPTY = "No downloads. Ctrl+O in the chat finds models."


class DownloadList(OptionList):
    """Up and down select; the keys act on the selection in the screen."""

    COMPONENT_CLASSES: ClassVar[set[str]] = progress.CLASSES
    DEFAULT_CSS = f"""
    DownloadList {{
        scrollbar-gutter: stable;
        & > .option-list--option-disabled {{ color: $hint; }}
        {progress.CSS}
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
        fill, track, dim, failed = (progress.style_of(self, part) for part in ("fill", "track", "dim", "failed"))
        name = Text(downloads.title(download.model), no_wrap=True)
        name.truncate(max(width - 2 - 2 - downloads.STATE, 8), overflow="ellipsis", pad=True)
        state = Text(downloads.state(download), failed if download.state == "failed" else "")
        first = Text.assemble(f"{downloads.mark(download)} ", name, "  ", state)
        figures = f"  {downloads.percent(download)}  {downloads.amount(download)}"
        cells = max(min(width - 2 - len(figures), _MOST_BAR), _LEAST_BAR)
        parts = [(text, fill if part == "fill" else track) for text, part in rule(downloads.share(download), cells)]
        return Text.assemble(first, "\n  ", *parts, (figures, dim), no_wrap=True, overflow="crop")
