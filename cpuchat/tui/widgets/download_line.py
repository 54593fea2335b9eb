"""One line about the downloads, at the bottom of screens."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.app import RenderResult

from cpuchat.models.downloads.state import RUNNING, Download
from cpuchat.present import downloads
from cpuchat.tui.downloading import Downloading
from cpuchat.tui.widgets.charts import rule
from cpuchat.tui.widgets.progress import ProgressLine

_LONG_NAME, _SHORTEST_BAR, _LONGEST_BAR = 32, 6, 40


def chosen(downloads: Sequence[Download]) -> tuple[Download | None, int]:
    """Return the download to show, a running one else a failed one, and how many more there are of its kind."""
    running = [d for d in downloads if d.state in RUNNING]
    moving = [d for d in running if d.state != "queued"] or running
    about = moving or [d for d in downloads if d.state == "failed"]
    if not about:
        return None, 0
    return about[0], len(running) - 1 if running else len(about) - 1


class DownloadLine(ProgressLine):
    """Follows the downloads; shown while one runs or has failed."""

    def __init__(self, downloading: Downloading) -> None:
        super().__init__()
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

    def _line(self, width: int) -> Text:
        download = self._download
        if download is None:
            return Text()
        more = f" +{self._more}" if self._more else ""
        head = Text(f" {downloads.mark(download)} ", self.style_of("failed" if download.state == "failed" else "dim"))
        name = Text(downloads.title(download.model), "", no_wrap=True)
        if download.state == "failed":
            problem = (downloads.problem(download), self.style_of("failed"))
            line = Text.assemble(head, name, ("  ", ""), problem, no_wrap=True)
            line.truncate(max(width - 14 - len(more), 1), overflow="ellipsis", pad=True)
            return line.append(f"{more}  Ctrl+G more ", self.style_of("dim"))
        percent, amount, state = (downloads.percent(download), ""), (downloads.amount(download), "dim"), (
            downloads.state(download), "")  # fmt: skip
        # What matters least is left out first; the bar takes what the name leaves.
        for parts in ((percent, amount, state), (percent, state), (percent,)):
            right = Text("  ").join(Text(text, self.style_of(part)) for text, part in parts).append(" ")
            room = width - head.cell_len - right.cell_len - len(more) - 3 - _SHORTEST_BAR
            if room >= min(name.cell_len, _LONG_NAME):
                break
        name.truncate(max(room, 1), overflow="ellipsis")
        cells = min(_SHORTEST_BAR + max(room, 1) - name.cell_len, _LONGEST_BAR)
        filled = [(text, self.style_of(part)) for text, part in rule(downloads.share(download), cells)]
        line = Text.assemble(head, name, (more, self.style_of("dim")), "  ", *filled, " ", right, no_wrap=True)
        line.truncate(width)
        return line
