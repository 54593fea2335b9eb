"""Lines about the downloads and the quantizing job, at the bottom of screens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from cpuchat.base.text import clean_line
from cpuchat.models.downloads.state import RUNNING, Download
from cpuchat.present import downloads
from cpuchat.telemetry import units
from cpuchat.telemetry.units import size
from cpuchat.tui.downloading import Downloading, Quantizing
from cpuchat.tui.widgets.charts import ProgressLine, rule

if TYPE_CHECKING:
    from cpuchat.models.quantize.make import QuantizeProgress


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
        """Plain text of the line, for tests."""
        return self.line(self.size.width).plain

    def line(self, width: int) -> Text:
        download = self._download
        if download is None:
            return Text()
        more = f" +{self._more}" if self._more else ""
        head = Text(
            f" {downloads.download_mark(download)} ", self.style_of("failed" if download.state == "failed" else "dim")
        )
        name = Text(downloads.download_title(download.order.model), "", no_wrap=True)
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


_TENSOR, _QUANTIZE_LINE_SHORTEST_BAR, _QUANTIZE_LINE_LONGEST_BAR = 20, 6, 40  # cells
_FIGURES, _SHORT_NAME = 56, 12  # cells


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
        name = Text(clean_line(now.job.out.name), no_wrap=True)
        name.truncate(max(width - _FIGURES, _SHORT_NAME), overflow="ellipsis")
        line = Text.assemble((" → ", self.style_of("dim")), name, "  ", no_wrap=True, overflow="ellipsis")
        for text, part in working(now.progress, width - line.cell_len):
            line.append(text, self.style_of(part))
        return line


def working(progress: QuantizeProgress | None, width: int) -> list[tuple[str, str]]:
    """Format the progress as (text, part of the bar or ""); every figure keeps its width."""
    if progress is None:
        return [("Checking disk space and source…", "dim")]
    share = min(progress.bytes_out / max(progress.total_out, 1), 1.0)
    left = units.time_left(progress.seconds_left) if progress.seconds_left is not None else ""
    figures = f" {int(100 * share):>3d} %  {size(progress.bytes_out):>7} of {size(progress.total_out)}  {left:>11}"
    room = width - len(figures) - _QUANTIZE_LINE_SHORTEST_BAR
    tensor = f"  {progress.done_tensors + 1:>4d}/{progress.tensors} {clean_line(progress.tensor)}"
    cells = min(
        _QUANTIZE_LINE_SHORTEST_BAR + max(room - (_TENSOR if room > _TENSOR else 0), 0), _QUANTIZE_LINE_LONGEST_BAR
    )
    return [*rule(share, cells), (figures, ""), *([(tensor, "dim")] if room > _TENSOR else [])]
