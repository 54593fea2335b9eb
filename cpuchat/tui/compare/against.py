"""The table under both sides: B against A, with the sentence that says why."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from cpuchat.compare.comparison import Comparison
from cpuchat.compare.figures import figures_of
from cpuchat.present import compare
from cpuchat.text import clean_line

_GAP = 2


class AgainstPane(VerticalScroll):
    """Shows the figures of the last prompt; `quality` is one line about the measured quality loss."""

    def __init__(self) -> None:
        super().__init__(id="against")
        self.border_title = "B against A"
        self.quality = ""
        self._comparison: Comparison | None = None
        self._table = Static(id="table")

    def compose(self) -> ComposeResult:
        yield self._table

    def show(self, comparison: Comparison) -> None:
        """Draw the table of the last turn."""
        self._comparison = comparison
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def _draw(self) -> None:
        comparison, width = self._comparison, self.scrollable_content_region.width
        if comparison is None or not width or not comparison.turns or not comparison.turns[-1].rounds:
            return
        turn = comparison.turns[-1]
        figures = figures_of(turn.comparable() or turn.rounds[-1:])
        text = Text(no_wrap=False)
        main = compare.verdict(figures.verdict, comparison.names)
        if main:
            text.append(clean_line(main) + "\n", "bold")
        for block in _blocks(compare.columns(figures, comparison.names), width):
            _append(text, block)
        for sentence in (*compare.sentences(comparison, turn), self.quality):
            if sentence and sentence != main:
                text.append(clean_line(sentence) + "\n")
        text.rstrip()
        self._table.update(text)
        rounds = len(turn.comparable())
        mode = "race" if figures.race else "sequential"
        what = f"medians of {rounds} rounds" if figures.medians else f"round {max(rounds, 1)}"
        self.border_subtitle = f"{mode} · {what} · ^R repeats swapped"


def _blocks(columns: Sequence[Sequence[str]], width: int) -> list[list[Sequence[str]]]:
    """Put as many columns beside each other as fit; the rest goes below, with the names repeated."""
    head, rest = columns[0], list(columns[1:])
    blocks: list[list[Sequence[str]]] = []
    while rest:
        block, used = [head], _wide(head)
        while rest and (len(block) == 1 or used + _GAP + _wide(rest[0]) <= width):
            used += _GAP + _wide(rest[0])
            block.append(rest.pop(0))
        blocks.append(block)
    return blocks


def _wide(column: Sequence[str]) -> int:
    return max(map(len, column))


def _append(text: Text, block: list[Sequence[str]]) -> None:
    for line in range(4):
        cells = [
            column[line].ljust(_wide(column)) if number == 0 else column[line].rjust(_wide(column))
            for number, column in enumerate(block)
        ]
        text.append((" " * _GAP).join(cells).rstrip() + "\n", {0: "dim", 3: "bold"}.get(line, ""))
