"""What the hardware screen shows beside the picture: facts about the machine and its worker, and the placements."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from cpuchat.hardware.placement.placement import PlacementCandidate, PlacementSpec
from cpuchat.present.machine import Bar, Chart, Row
from cpuchat.telemetry.units import plural
from cpuchat.tui.widgets.charts import PEAK, TRACK, bar, braille
from cpuchat.tui.widgets.model_list import label_table

_SHORTEST = 8
"""Cells below which a bar tells less than its figure, which then stands alone."""


class FactsTable(Static):
    """Rows of a label and a text: of the model, and of the machine."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"facts--dim"}
    _shown: Sequence[Row] = ()

    def show(self, rows: Sequence[Row]) -> None:
        self.display = bool(rows)
        if rows != self._shown:
            self._shown = rows
            self.update(label_table(rows, self.get_component_rich_style("facts--dim", partial=True), 14))


class Bars(Static):
    """A chart of horizontal bars between names with figures and notes; in several `rows` for each, of their past."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"bars--{part}" for part in ("fill", "now", "track", "peak", "dim")}
    _shown: tuple[Chart, int, int] | None = None

    def show(self, chart: Chart | None, rows: int = 1) -> None:
        self.display = chart is not None
        if chart is None or (chart, rows, self.size.width) == self._shown:
            return
        self._shown = chart, rows, self.size.width
        names, notes = (max((len(getattr(one, part)) for one in chart.bars), default=0) for part in ("name", "note"))
        lines = [Text(chart.heading, self._style("dim"))] if chart.heading else []
        for one in chart.bars:
            head = f"  {one.name:<{names}} {chart.figure(one)} "
            width = self.size.width - len(head) - notes - 3  # and where the scroll bar comes
            drawn = [Text()]
            if width >= _SHORTEST:
                past = braille(one.past[-2 * width :], width, rows, 1.0) if rows > 1 else ()
                drawn = [Text(line, self._style("now")) for line in past] or [self._bar(one, chart, width)]
            for number, line in enumerate(drawn):
                note = Text(f" {one.note}" if not number else "", self._style("dim"))
                lines.append(Text.assemble(" " * len(head) if number else head, line, note))
        for foot in chart.foot:
            style = self._style("dim" if foot[0] == PEAK else "")
            lines += [Text(f"  {line}", style) for line in textwrap.wrap(foot, max(self.size.width - 4, 20))]
        self.update(Text("\n").join(lines))

    def _bar(self, one: Bar, chart: Chart, width: int) -> Text:
        if chart.unit == "%":
            own, busy = round(one.own * width), round(one.rate * width)
            mine, others = ("█" * own, self._style("now")), ("▒" * (busy - own), self._style("peak"))
            return Text.assemble(mine, others, (TRACK * (width - busy), self._style("track")))
        drawn, peak = Text(), (chart.peak / chart.scale,) if chart.peak else ()
        for text, part in bar(one.rate / chart.scale, width, *peak):
            filled = "░" * len(text) if one.estimated and part == "fill" else text
            drawn.append(filled, self._style("now" if one.now and part == "fill" else part))
        return drawn

    def on_resize(self) -> None:
        if self._shown is not None:
            self.show(*self._shown[:2])

    def _style(self, part: str) -> Style | str:
        return self.get_component_rich_style(f"bars--{part}", partial=True) if part else ""


class PlacementList(OptionList):
    """The placements of a machine, and what else is or was in use. ↑ and ↓ select; Enter belongs to the screen."""

    def __init__(self) -> None:
        super().__init__(id="placements", compact=True)
        self._offers: tuple[PlacementCandidate, ...] = ()
        self._others: tuple[PlacementSpec, ...] = ()
        self._in_use = PlacementSpec()

    @property
    def marked(self) -> PlacementSpec:
        at = self.highlighted
        return self._specs[at] if at is not None and at < len(self._specs) else self._in_use

    @property
    def _specs(self) -> list[PlacementSpec]:
        return [*(offer.spec for offer in self._offers), *self._others]

    def offer(self, offers: Sequence[PlacementCandidate], used: Iterable[PlacementSpec], in_use: PlacementSpec) -> None:
        """List these, the recommended one first, then what else was `used`. Keep a selection of the user's."""
        wanted = in_use if self.marked == self._in_use else self.marked
        self._offers, self._others, self._in_use = tuple(offers), (), in_use
        self._others = tuple(spec for spec in used if spec not in self._specs)
        self._list(wanted)

    def mark(self, spec: PlacementSpec) -> None:
        """Select a placement as the arrow keys would."""
        self.highlighted = self._specs.index(spec) if spec in self._specs else self.option_count - 1

    def action_cursor_down(self) -> None:
        """Select the next one; of a single one, scroll what is above."""
        (super().action_cursor_down if self.option_count > 1 else self.screen.query_one("#machine").scroll_down)()

    def action_cursor_up(self) -> None:
        (super().action_cursor_up if self.option_count > 1 else self.screen.query_one("#machine").scroll_up)()

    def _list(self, wanted: PlacementSpec) -> None:
        is_choice = len(self._specs) > 1
        lead = "" if is_choice else "Placement  "
        width = (self.size.width or self.app.size.width - 4) - 2 - len(lead)  # where the scroll bar comes, if it comes
        rows: list[Text] = []
        for number, offer in enumerate(self._offers):
            threads = plural(len(offer.placement.cpus), "thread")
            rows.append(self._row(offer.name, offer.spec, threads, is_choice and not number, width))
        for spec in self._others:
            parts = [f"cores {spec.cores}", plural(spec.threads, "thread") if spec.threads else ""]
            parts.append(f"memory {spec.memory_policy}")
            rows.append(self._row(", ".join(filter(None, parts)), spec, "", False, width))
        with self.prevent(OptionList.OptionHighlighted):
            self.set_options([Option(Text.assemble(lead, row)) for row in rows])
            self.mark(wanted)

    def _row(self, name: str, spec: PlacementSpec, note: str, is_recommended: bool, width: int) -> Text:
        in_use = spec == self._in_use
        marks = " · ".join(filter(None, ("in use" if in_use else "", "recommended" if is_recommended else "")))
        right = f"  {note}" if note else ""
        text = Text.assemble((name, "bold" if in_use else ""), (f"  {marks}" if marks else "", "dim"))
        text.truncate(max(width - len(right) - 2, 12), overflow="ellipsis", pad=True)
        return Text.assemble("● " if in_use else "○ ", text, right, no_wrap=True)

    def on_resize(self) -> None:
        if self._offers:
            self.call_after_refresh(lambda: self._list(self.marked))
