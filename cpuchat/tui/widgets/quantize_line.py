"""One line about the quantizing job, at the bottom of screens."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import RenderResult
from textual.widget import Widget

from cpuchat.telemetry import units
from cpuchat.telemetry.units import size
from cpuchat.text import clean_line
from cpuchat.tui.quantizing import Quantizing
from cpuchat.tui.widgets.charts import rule

if TYPE_CHECKING:
    from cpuchat.models.quantize.make import QuantizeProgress

_TENSOR, _SHORTEST_BAR, _LONGEST_BAR = 20, 6, 40  # cells
_FIGURES, _SHORT_NAME = 56, 12  # cells


class QuantizeLine(Widget):
    """Follows the job. Hidden (class `-idle`) without one; progress never causes a layout."""

    ALLOW_SELECT = False
    COMPONENT_CLASSES: ClassVar[set[str]] = {"quantize--fill", "quantize--track", "quantize--dim"}
    DEFAULT_CSS = """
    QuantizeLine {
        width: 100%;
        height: 1;
        &.-idle { display: none; }
        & > .quantize--fill { color: $accent; }
        & > .quantize--track { color: $foreground 25%; }
        & > .quantize--dim { color: $hint; }
        &:ansi > .quantize--track { color: ansi_default; text-style: dim; }
        &:ansi > .quantize--dim { color: ansi_default; text-style: dim; }
    }
    """

    def __init__(self, quantizing: Quantizing) -> None:
        super().__init__(classes="-idle")
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
        line = Text.assemble((" → ", self._style("dim")), name, "  ", no_wrap=True, overflow="ellipsis")
        for text, part in working(now.progress, width - line.cell_len):
            line.append(text, self._style(part) if part else "")
        return line

    def _style(self, part: str) -> Style:
        return self.get_component_rich_style(f"quantize--{part}", partial=True)


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
