"""Facts about the machine and the worker, as rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rich.table import Table
from rich.text import Text
from textual.widgets import Static

from cpuchat.hardware.machine_reader import MachineFacts
from cpuchat.present import machine
from cpuchat.present.machine import Now
from cpuchat.telemetry.units import gigabytes

if TYPE_CHECKING:
    from cpuchat.hardware.bandwidth.memory_modules import Theoretical
    from cpuchat.hardware.bandwidth.survey import Survey

_LABEL, _BEFORE_BAR, _LONGEST_BAR = 16, 68, 48


class FactsTable(Static):
    """Rows of a label and a text; the read bandwidth as bars where there is room (class `-bars`)."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"facts--fill", "facts--track", "facts--dim"}
    DEFAULT_CSS = """
    FactsTable {
        width: 100%;
        height: auto;
        & > .facts--fill { color: $accent; }
        & > .facts--track { color: $foreground 25%; }
        & > .facts--dim { color: $hint; }
    }
    """

    def show(self, facts: MachineFacts, now: Now, measuring: str = "", advice: str = "") -> None:
        """`measuring`: progress of a measurement, in the place of the read bandwidth."""
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(width=_LABEL, no_wrap=True, style=self.get_component_rich_style("facts--dim", partial=True))
        table.add_column(ratio=1, overflow="fold")
        for label, text in machine.rows(facts, now) + ([("advice", advice)] if advice else []):
            if label != machine.READ_BANDWIDTH:
                table.add_row(Text(label), Text(text))
            elif measuring or facts.survey is None or not self.has_class("-bars"):
                table.add_row(Text(label), Text(measuring or text))
            else:
                for number, bar in enumerate(self._bars(facts.survey, facts.theoretical)):
                    table.add_row(Text("" if number else label), bar)
        self.update(table)

    def _bars(self, survey: Survey, theoretical: Theoretical | None) -> list[Text]:
        fill, track, dim = (self.get_component_rich_style(f"facts--{part}") for part in ("fill", "track", "dim"))
        share = machine.share_of_peak(survey, theoretical)
        most = survey.all_cores.bytes_per_s / (share or 1.0)
        how = machine.how_measured(survey)
        of = how if share is None else f"{100 * share:.0f} % of {gigabytes(most)}, {how}"
        width = max(min(self.size.width - _BEFORE_BAR, _LONGEST_BAR), 8)
        sets = machine.measured_sets(survey)
        names = max(len(name) for name, _ in sets) + 1
        bars: list[Text] = []
        for name, one in sets:
            filled = min(max(round(one.bytes_per_s / most * width), 1), width)
            words = f"{name:<{names}}{gigabytes(one.bytes_per_s):>5} GB/s  "
            bars.append(Text.assemble(words, ("━" * filled, fill), ("─" * (width - filled), track)))
        bars[-1].append(f"  {of}", dim)
        return bars + [Text(words, dim) for words in [machine.knee(survey)] if words]
