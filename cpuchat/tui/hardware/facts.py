"""What is known about the machine and the worker on it, row by row."""

from __future__ import annotations

from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.widgets import Static

from cpuchat.hardware.machine_reader import MachineFacts
from cpuchat.present import machine as machine_words
from cpuchat.present.machine import Now

_LABEL, _BEFORE_BAR, _LONGEST_BAR = 8, 60, 48


class FactsTable(Static):
    """Rows of a label and a text; the read bandwidth as bars where there is room for them (class `-bars`)."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"facts--fill", "facts--track", "facts--dim"}
    DEFAULT_CSS = """
    FactsTable {
        width: 100%;
        height: auto;
        & > .facts--fill { color: $accent; }
        & > .facts--track { color: $foreground 25%; }
        & > .facts--dim { color: $foreground 60%; }
    }
    """

    def show(self, facts: MachineFacts, now: Now, measuring: str = "", advice: str = "") -> None:
        """`measuring` says what is measured just now instead of the read bandwidth."""
        rows: list[tuple[str, str | Text]] = [
            machine_words.cores(facts, now),
            *([("reading", measuring)] if measuring else self._reading(facts)),
            machine_words.theoretical(facts),
            *machine_words.nodes(facts),
            machine_words.weights(now),
            machine_words.policy(facts, now),
            machine_words.traffic(now),
            machine_words.power(now),
        ]
        rows += [("" if number else "note", note) for number, note in enumerate(facts.topology.notes)]
        if advice:
            rows.append(("advice", advice))
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(width=_LABEL, no_wrap=True, style="dim")
        table.add_column(ratio=1, overflow="fold")
        for label, text in rows:
            table.add_row(Text(label), Text(text) if isinstance(text, str) else text)
        self.update(table)

    def _reading(self, facts: MachineFacts) -> list[tuple[str, str | Text]]:
        found = machine_words.measured(facts)
        if not found or not self.has_class("-bars"):
            return [("reading", machine_words.reading(facts))]
        fill, track, dim = (self.get_component_rich_style(f"facts--{part}") for part in ("fill", "track", "dim"))
        share = machine_words.of_theoretical(facts)
        most = found[-1][1] if share is None else found[-1][1] / share
        of = "measured" if share is None else f"{100 * share:.0f} % of {machine_words.gigabytes(most)}, measured"
        width = max(min(self.size.width - _BEFORE_BAR, _LONGEST_BAR), 8)
        names = max(len(name) for name, _ in found) + 1
        rows: list[tuple[str, str | Text]] = []
        for number, (name, value) in enumerate(found):
            filled = min(max(round(value / most * width), 1), width)
            words = f"{name:<{names}}{machine_words.gigabytes(value):>5} GB/s  "
            behind = f"  {of}" if number == len(found) - 1 else ""
            text = Text.assemble(words, ("━" * filled, fill), ("─" * (width - filled), track), (behind, dim))
            rows.append(("" if number else "reading", text))
        return rows + [("", Text(words, dim)) for words in [machine_words.knee(facts)] if words]
