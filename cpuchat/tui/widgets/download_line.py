"""One line about the downloads, at the bottom of screens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import RenderResult
from textual.widget import Widget

from cpuchat.models.downloads.state import RUNNING, Download
from cpuchat.present import downloads
from cpuchat.tui.downloading import Downloading
from cpuchat.tui.widgets.charts import rule

_LONG_NAME, _SHORTEST_BAR, _LONGEST_BAR = 32, 6, 40


def chosen(downloads: Sequence[Download]) -> tuple[Download | None, int]:
    """Return the download to show, a running one else a failed one, and how many more there are of its kind."""
    running = [d for d in downloads if d.state in RUNNING]
    moving = [d for d in running if d.state != "queued"] or running
    about = moving or [d for d in downloads if d.state == "failed"]
    if not about:
        return None, 0
    return about[0], len(running) - 1 if running else len(about) - 1


class DownloadLine(Widget):
    """Follows the downloads. Hidden (class `-idle`) unless one runs or has failed; progress never causes a layout."""

    ALLOW_SELECT = False
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "download--name", "download--fill", "download--track", "download--figure", "download--dim", "download--failed",
    }  # fmt: skip
    DEFAULT_CSS = """
    DownloadLine {
        width: 100%;
        height: 1;
        &.-idle { display: none; }
        & > .download--name { color: $foreground; }
        & > .download--fill { color: $accent; }
        & > .download--track { color: $foreground 25%; }
        & > .download--figure { color: $foreground; }
        & > .download--dim { color: $hint; }
        & > .download--failed { color: $limit; text-style: bold; }
        &:ansi > .download--track { color: ansi_default; text-style: dim; }
        &:ansi > .download--dim { color: ansi_default; text-style: dim; }
    }
    """

    def __init__(self, downloading: Downloading) -> None:
        super().__init__(classes="-idle")
        self._downloading = downloading
        self._download: Download | None = None
        self._more = 0

    def on_mount(self) -> None:
        self._downloading.changed.subscribe(self, lambda _: self._follow())
        self._follow()

    def _follow(self) -> None:
        now = chosen(self._downloading.all())
        if now != (self._download, self._more):
            self._download, self._more = now
            self.set_class(self._download is None, "-idle")
            self.refresh()

    @property
    def text(self) -> str:
        """Plain text of the line, for tests."""
        return self._line(self.size.width).plain

    def render(self) -> RenderResult:
        return self._line(self.size.width)

    def _style(self, part: str) -> Style:
        return self.get_component_rich_style(f"download--{part}", partial=True)

    def _line(self, width: int) -> Text:
        download = self._download
        if download is None:
            return Text()
        more = f" +{self._more}" if self._more else ""
        head = Text(f" {downloads.mark(download)} ", self._style("failed" if download.state == "failed" else "dim"))
        name = Text(downloads.title(download.model), self._style("name"), no_wrap=True)
        if download.state == "failed":
            problem = (downloads.problem(download), self._style("failed"))
            line = Text.assemble(head, name, ("  ", ""), problem, no_wrap=True)
            line.truncate(max(width - 14 - len(more), 1), overflow="ellipsis", pad=True)
            return line.append(f"{more}  Ctrl+G more ", self._style("dim"))
        percent, amount, state = (downloads.percent(download), "figure"), (downloads.amount(download), "dim"), (
            downloads.state(download), "figure")  # fmt: skip
        # What matters least is left out first; the bar takes what the name leaves.
        for parts in ((percent, amount, state), (percent, state), (percent,)):
            right = Text("  ").join(Text(text, self._style(part)) for text, part in parts).append(" ")
            room = width - head.cell_len - right.cell_len - len(more) - 3 - _SHORTEST_BAR
            if room >= min(name.cell_len, _LONG_NAME):
                break
        name.truncate(max(room, 1), overflow="ellipsis")
        cells = min(_SHORTEST_BAR + max(room, 1) - name.cell_len, _LONGEST_BAR)
        filled = [(text, self._style(part)) for text, part in rule(downloads.share(download), cells)]
        line = Text.assemble(head, name, (more, self._style("dim")), "  ", *filled, " ", right, no_wrap=True)
        line.truncate(width)
        return line
