"""Drawing context of the figures panel: figures, width, styles, and rows with fixed columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.segment import Segment
from rich.style import Style

from cpuchat.base.text import clean_line
from cpuchat.telemetry import units
from cpuchat.tui.widgets.charts import bar

if TYPE_CHECKING:
    from cpuchat.telemetry.machine import ProcessMemory
    from cpuchat.telemetry.meter import Figures

Line = list[Segment]


@dataclass(frozen=True)
class Frame:
    """The input of a section: figures, `width` in cells; `tall` when there is room for large digits."""

    figures: Figures
    memory: ProcessMemory | None
    width: int
    tall: bool
    styles: dict[str, Style]

    @property
    def settled(self) -> bool:
        """Return whether no answer is running: then rows without a figure are left out. During an answer they keep
        their place.
        """
        return self.figures.phase not in ("prefill", "decoding")

    def text(self, part: str, text: str) -> Segment:
        return Segment(text, self.styles[part])

    @property
    def approximately(self) -> str:
        """Return the mark behind the unit of figures that are counted by the parts that a server sends."""
        return " ≈" if self.figures.approximate else ""

    def narrow(self, width: int) -> Frame:
        return replace(self, width=width)

    def row(self, label: str, field: str, number: str | None, unit: str) -> Line:
        """Draw `label`, number and unit in fixed columns; without a number "n/a" and why (once if all share the
        reason).

        Empty without a number once the figures are settled.
        """
        head = self.text("label", f"{label:<{LABEL}}")
        if number is not None:
            return [head, self.text("value", f"{number:>{NUMBER}}"), self.text("label", f" {unit}")]
        if self.settled:
            return []
        room = self.width - LABEL
        why = self.why(field)
        if not why or why == self.why("live_tok_s"):
            return [head, self.text("missing", f"{'n/a':>{NUMBER}}")]
        full = f"n/a · {why}"
        return [head, self.text("missing", full if len(full) <= room else fit(why, room))]

    def why(self, field: str) -> str:
        return clean_line(self.figures.why_missing(field))

    def gauge(
        self, fraction: float, label: str, head: str = "", peak: float | None = None, warns: bool = False
    ) -> Line:
        """Draw a bar between `head` and `label`, in the cells that they leave; `warns`: in the color of limits."""
        room = self.width - len(label) - 1 - (len(head) + 1 if head else 0)
        limits = ("peak", "fill") if warns else ("peak",)
        parts = [self.text("limit" if part in limits else part, text) for text, part in bar(fraction, room, peak)]
        return [*([self.text("label", head + " ")] if head else []), *parts, self.text("value", f" {label}")]


Section = Callable[[Frame], Sequence[Line]]
LABEL = 12
NUMBER = 8


def fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def rate(value: float | None) -> str | None:
    """Format tok/s without its unit; None stays None."""
    return None if value is None else units.rate(value)
