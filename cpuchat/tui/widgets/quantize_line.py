"""One line about the quantizing job, at the bottom of screens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text
from textual.app import RenderResult

from cpuchat.telemetry import units
from cpuchat.telemetry.units import size
from cpuchat.text import clean_line
from cpuchat.tui.quantizing import Quantizing
from cpuchat.tui.widgets.charts import rule
from cpuchat.tui.widgets.progress import ProgressLine

if TYPE_CHECKING:
    from cpuchat.models.quantize.make import QuantizeProgress

_TENSOR, _SHORTEST_BAR, _LONGEST_BAR = 20, 6, 40  # cells
_FIGURES, _SHORT_NAME = 56, 12  # cells


class QuantizeLine(ProgressLine):
    """Follows the quantizing job."""

    def __init__(self, quantizing: Quantizing) -> None:
        super().__init__()
        self._quantizing = quantizing

    def on_mount(self) -> None:
        self._quantizing.changed.subscribe(self, lambda _: self._follow())
        self._follow()

    def _follow(self) -> None:
        self.set_class(self._quantizing.job is None, "-idle")
        self.refresh()

    def render(self) -> RenderResult:
        now = self._quantizing
        if now.job is None:
            return Text()
        width = self.size.width
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
    room = width - len(figures) - _SHORTEST_BAR
    tensor = f"  {progress.done_tensors + 1:>4d}/{progress.tensors} {clean_line(progress.tensor)}"
    cells = min(_SHORTEST_BAR + max(room - (_TENSOR if room > _TENSOR else 0), 0), _LONGEST_BAR)
    return [*rule(share, cells), (figures, ""), *([(tensor, "dim")] if room > _TENSOR else [])]
