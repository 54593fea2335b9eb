"""The tab that measures the quality loss of B against A."""

from __future__ import annotations

import asyncio
from importlib import metadata
from pathlib import Path
from textwrap import fill
from time import monotonic
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import ScrollableContainer
from textual.content import Content
from textual.message import Message
from textual.widgets import Static
from textual.worker import Worker

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError
from cpuchat.base.text import clean_line
from cpuchat.compare.comparison import Comparison
from cpuchat.config.settings import Settings
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.present import quality
from cpuchat.quality.measure import QualityMeasurement
from cpuchat.quality.texts import builtin_texts
from cpuchat.tui import keys

_REDRAW_SECONDS = 0.5
_NARROWEST = 40


class QualityTab(ScrollableContainer, can_focus=True):
    """Measures B against A on the built-in texts; what was measured before is shown at once and resumed."""

    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("quality_tab")

    class Changed(Message):
        """There is more to show, or it has ended."""

    def __init__(self, comparison: Comparison, settings: Settings) -> None:
        super().__init__(id="quality")
        self.border_title = Content(clean_line(f"Quality of {comparison.names[1]} against {comparison.names[0]}"))
        self._comparison = comparison
        self._settings = settings
        self._text = Static()
        self._measurement: QualityMeasurement | None = None
        self._worker: Worker[None] | None = None
        self._drawn = 0.0
        self._problem = ""
        self._shows_figures = False

    def compose(self) -> ComposeResult:
        yield self._text

    @property
    def running(self) -> bool:
        return self._worker is not None and self._worker.is_running

    @property
    def summary(self) -> str:
        """`Same next token 94.1 % (93.6–94.6): about 1 token in 17 would differ …`; "" before there is a figure."""
        found = self._measurement.comparisons[0].summary() if self._measurement is not None else None
        if found is None:
            return ""
        return f"Same next token {quality.share(found.same_top)}: {quality.in_words(found)}."

    def action_figures(self) -> None:
        """Show or hide the table with KLD and perplexity."""
        self._shows_figures = not self._shows_figures
        self._draw()

    def start(self) -> None:
        """Measure what is not measured yet."""
        if not self.running:
            self._worker = self._measure()

    async def stop(self) -> None:
        """Stop; the estimate so far stays."""
        if self._worker is not None:
            self._worker.cancel()

    @work(exclusive=True, group="quality")
    async def _measure(self) -> None:
        self.border_subtitle, self._problem = "Esc stops and keeps the estimate", ""
        try:
            measurement = self._measurement = await asyncio.to_thread(self._prepare)
            placement = await asyncio.to_thread(lambda: place(read_topology(), PlacementSpec.of(self._settings)))
            self._draw()
            await measurement.run(placement, lambda _: self._told())
        except CpuchatError as error:
            self._problem = str(error)
        except asyncio.CancelledError:
            self._problem = "Stopped. q resumes."
            raise
        finally:
            self._worker = None
            self._end()

    def _end(self) -> None:
        if self.is_attached:
            self.border_subtitle = "q shows the answers"
            self._draw()

    def _prepare(self) -> QualityMeasurement:
        base, other = (Path(side.path) for side in self._comparison.sides)
        measurement = QualityMeasurement(
            base, [other], builtin_texts(), engine=metadata.version("llama-cpp-python"), folder=paths.quality_dir()
        )
        measurement.restore()
        return measurement

    def on_resize(self) -> None:
        if self._measurement is not None or self._problem:
            self._draw()

    def _told(self) -> None:
        if monotonic() - self._drawn >= _REDRAW_SECONDS:
            self._draw()

    def _draw(self) -> None:
        self._drawn = monotonic()
        text, measurement = Text(no_wrap=True), self._measurement
        width = max(self.scrollable_content_region.width, _NARROWEST)
        status = self._problem
        if not status and self.running and measurement is not None:
            status = quality.status(measurement, figures=self._shows_figures)
        if status:
            text.append(fill(clean_line(status), width) + "\n\n", "bold")
        if measurement is not None and (rows := quality.rows(measurement)):
            text.append("\n".join(fill(line, width) for line in quality.headlines(measurement)) + "\n\n", "bold")
            line, ends, *legend = quality.strip(measurement.comparisons[0], width)
            text.append(f"{line}\n").append(f"{ends}\n", "dim")
            text.append("\n".join(fill(one, width) for one in legend) + "\n\n")
            if self._shows_figures:
                heading, *lines = quality.narrow(rows, width)
                text.append(heading + "\n", "dim").append("\n".join(lines) + "\n\n")
            text.append(
                "\n".join(fill(line, width) for line in quality.verdicts(measurement, figures=self._shows_figures))
                + "\n"
            )
        if measurement is not None and (worst := measurement.comparisons[0].worst):
            text.append("\nLargest disagreements (text ▸ next token)\n", "dim")
            text.append("\n".join(fill(quality.disagreement(one), width, subsequent_indent="  ") for one in worst))
        self._text.update(text)
        self.post_message(self.Changed())
