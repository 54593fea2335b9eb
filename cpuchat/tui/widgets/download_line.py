"""Lines about the downloads and the quantizing job, at the bottom of screens."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import RenderResult
from textual.signal import Signal
from textual.widget import Widget

from cpuchat.base.text import clean_line
from cpuchat.models.downloads.state import RUNNING, Download
from cpuchat.present import downloads
from cpuchat.telemetry import units
from cpuchat.tui.downloading import Downloading, Quantizing


class ProgressLine(Widget):
    """Hidden (class `-idle`) while there is nothing to show; progress never causes a layout."""

    ALLOW_SELECT = False
    COMPONENT_CLASSES: ClassVar[set[str]] = {"progress--dim", "progress--failed"}
    DEFAULT_CSS = """
    ProgressLine {
        height: 1;
        &.-idle { display: none; }
        & > .progress--dim { color: $hint; }
        & > .progress--failed { color: $limit; text-style: bold; }
        &:ansi > .progress--dim { color: ansi_default; text-style: dim; }
    }
    """

    def __init__(self, changed: Signal[Any]) -> None:
        """`changed` is published when there is something else to show."""
        super().__init__(classes="-idle")
        self._changed = changed

    def on_mount(self) -> None:
        self._changed.subscribe(self, lambda _: self.follow())
        self.follow()

    @abstractmethod
    def follow(self) -> None:
        """Take over what there is to show now."""

    @abstractmethod
    def line(self, width: int) -> Text: ...

    def render(self) -> RenderResult:
        return self.line(self.size.width)

    def style_of(self, part: str) -> Style:
        return self.get_component_rich_style(f"progress--{part}", partial=True)


class DownloadLine(ProgressLine):
    """Follows the downloads; shown while one runs or has failed."""

    def __init__(self, downloading: Downloading) -> None:
        super().__init__(downloading.changed)
        self._downloading = downloading
        self._download: Download | None = None
        self._more = 0

    def follow(self) -> None:
        listed = self._downloading.all()
        running = [download for download in listed if download.state in RUNNING]
        moving = [download for download in running if download.state != "queued"]
        failed = [download for download in listed if download.state == "failed"]
        # A running one, else a failed one, and how many more there are of its kind.
        shown = next(iter(moving or running or failed), None)
        now = (shown, max(len(running or failed) - 1, 0))
        if now != (self._download, self._more):
            self._download, self._more = now
            self.set_class(shown is None, "-idle")
            self.refresh()

    def line(self, width: int) -> Text:
        download = self._download
        if download is None:
            return Text()
        more = f" +{self._more}" if self._more else ""
        mark, name = f" {downloads.download_mark(download)} ", downloads.download_title(download.order.model) + more
        if download.state == "failed":
            failed, end = self.style_of("failed"), "  Ctrl+G more " if hasattr(self.screen, "action_downloads") else " "
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
