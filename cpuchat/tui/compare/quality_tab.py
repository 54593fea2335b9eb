"""Shows the quality loss of side B, measured during a comparison."""

from __future__ import annotations

import asyncio
from importlib import metadata
from pathlib import Path
from time import monotonic

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.containers import ScrollableContainer
from textual.message import Message
from textual.widgets import Static
from textual.worker import Worker

from cpuchat import paths
from cpuchat.compare.side import Side
from cpuchat.errors import CpuchatError
from cpuchat.hardware.placement.placement import PlacementSpec, place
from cpuchat.hardware.topology import read_topology
from cpuchat.present import quality
from cpuchat.present.table import table
from cpuchat.quality.measure import Progress, QualityMeasurement
from cpuchat.quality.texts import builtin_texts
from cpuchat.settings import Settings
from cpuchat.text import clean_line

_REDRAW_SECONDS = 0.5


class QualityTab(ScrollableContainer, can_focus=True):
    """Measures A against B on the built-in texts; what was measured before is shown at once and resumed."""

    class Changed(Message):
        """There is more to show, or it has ended."""

    def __init__(self, sides: tuple[Side, Side], names: tuple[str, str], settings: Settings) -> None:
        super().__init__(id="quality")
        self.border_title = f"Quality of {names[1]} against {names[0]}"
        self._sides = sides
        self._settings = settings
        self._text = Static()
        self._measurement: QualityMeasurement | None = None
        self._worker: Worker[None] | None = None
        self._drawn = 0.0

    def compose(self) -> ComposeResult:
        yield self._text

    @property
    def running(self) -> bool:
        return self._worker is not None and self._worker.is_running

    @property
    def summary(self) -> str:
        """`Same next token 94.1 % (93.6–94.6) · KLD 0.0213 ± 0.0004`; "" before there is a figure."""
        found = self._measurement.comparisons[0].summary() if self._measurement is not None else None
        if found is None:
            return ""
        return f"Same next token {quality.share(found.same_top)} · KLD {quality.kld(found.kld)}"

    def start(self) -> None:
        """Measure what is not measured yet."""
        if not self.running:
            self._worker = self._measure()

    def stop(self) -> None:
        """Stop; the estimate so far stays."""
        if self._worker is not None:
            self._worker.cancel()

    @work(exclusive=True, group="quality")
    async def _measure(self) -> None:
        self.border_subtitle = "Esc stops and keeps the estimate"
        problem = ""
        try:
            measurement = self._measurement = await asyncio.to_thread(self._prepare)
            placement = await asyncio.to_thread(lambda: place(read_topology(), PlacementSpec.of(self._settings)))
            self._draw()
            await measurement.run(placement, self._told)
        except CpuchatError as error:
            problem = str(error)
        except asyncio.CancelledError:
            problem = "Stopped. q resumes."
            raise
        finally:
            self._worker = None
            if self.is_attached:
                self.border_subtitle = "q shows the answers"
                self._draw(problem)

    def _prepare(self) -> QualityMeasurement:
        base, other = (Path(side.path) for side in self._sides)
        measurement = QualityMeasurement(
            base, [other], builtin_texts(), engine=metadata.version("llama-cpp-python"), folder=paths.quality_dir()
        )
        measurement.restore()
        return measurement

    def _told(self, progress: Progress) -> None:
        if monotonic() - self._drawn >= _REDRAW_SECONDS:
            self._draw()

    def _draw(self, problem: str = "") -> None:
        self._drawn = monotonic()
        text, measurement = Text(no_wrap=True), self._measurement
        if problem:
            text.append(clean_line(problem) + "\n\n", "bold")
        if measurement is not None:
            if self.running and not problem:
                text.append(clean_line(quality.status(measurement)) + "\n\n", "bold")
            rows = quality.rows(measurement)
            lines = table([quality.HEADINGS, *rows]) if rows else []
            for number, line in enumerate(lines):
                text.append(line + "\n", "" if number else "dim")
            if rows:
                text.append("\n" + "\n".join(quality.verdicts(measurement)) + "\n")
            if worst := measurement.comparisons[0].worst:
                text.append("\nLargest disagreements (text ▸ next token)\n", "dim")
                text.append("\n".join(quality.disagreement(one) for one in worst))
        self._text.update(text)
        self.post_message(self.Changed())
