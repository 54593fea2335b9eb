"""Lines about the downloads and the quantizing job, at the bottom of screens."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from cpuchat.base.text import clean_line
from cpuchat.models.downloads.state import RUNNING, Download
from cpuchat.present import downloads
from cpuchat.telemetry import units
from cpuchat.tui.downloading import Downloading, Quantizing
from cpuchat.tui.widgets.charts import ProgressLine


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
        super().__init__(downloading.changed)
        self._downloading = downloading
        self._download: Download | None = None
        self._more = 0

    def follow(self) -> None:
        now = chosen(self._downloading.all())
        if now != (self._download, self._more):
            self._download, self._more = now
            self.set_class(self._download is None, "-idle")
            self.refresh()

    @property
    def text(self) -> str:
        return self.line(self.size.width).plain

    def line(self, width: int) -> Text:
        download = self._download
        if download is None:
            return Text()
        more = f" +{self._more}" if self._more else ""
        mark, name = f" {downloads.download_mark(download)} ", downloads.download_title(download.order.model) + more
        if download.state == "failed":
            failed, end = self.style_of("failed"), "  Ctrl+G more "
            line = Text.assemble((mark, failed), f"{name}  ", (downloads.problem(download), failed), no_wrap=True)
            line.truncate(max(width - len(end), 1), overflow="ellipsis", pad=True)
            return line.append(end, self.style_of("dim"))
        parts = downloads.percent, downloads.amount, downloads.state
        percent, amount, state = (f"  {part(download)}" for part in parts)
        # What matters least is left out first.
        for right in (percent + amount + state, percent + state, percent):
            room = width - len(mark) - len(right) - 1
            if room >= len(name):
                break
        line = Text.assemble((mark, self.style_of("dim")), name, no_wrap=True)
        line.truncate(len(mark) + max(room, 1), overflow="ellipsis", pad=True)
        return line.append(right)


class QuantizeLine(ProgressLine):
    """Follows the quantizing job."""

    def __init__(self, quantizing: Quantizing) -> None:
        super().__init__(quantizing.changed)
        self._quantizing = quantizing

    def follow(self) -> None:
        self.set_class(self._quantizing.job is None, "-idle")
        self.refresh()

    def line(self, width: int) -> Text:
        now = self._quantizing
        if now.job is None:
            return Text()
        figures = "  Checking disk space and source… "
        if (progress := now.progress) is not None:
            share = min(progress.bytes_out / max(progress.total_out, 1), 1.0)
            left = units.time_left(progress.seconds_left) if progress.seconds_left is not None else ""
            size = f"{units.size(progress.bytes_out):>7} of {units.size(progress.total_out)}"
            figures = f"  {int(100 * share):>3d} %  {size}  {left:>11} "
        line = Text.assemble((" → ", self.style_of("dim")), clean_line(now.job.out.name), no_wrap=True)
        line.truncate(max(width - len(figures), 1), overflow="ellipsis", pad=True)
        return line.append(figures)
