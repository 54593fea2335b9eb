"""Aligned columns of text, tables in Markdown, and the rows of lists of models and the like."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from cpuchat.base.text import clean_line


def table(
    rows: Sequence[Sequence[str]], right: Sequence[int] = (), width: int = 0, drop: Sequence[int] = ()
) -> list[str]:
    """Align the cells of `rows` in columns; the columns whose numbers are in `right` are right-aligned. Where lines are
    longer than `width` (0: any length), those of `drop` are left out, one by one. Cells are cleaned of control
    characters and keep their indentation. A column that is empty in all rows but the first (the headings) is left
    out."""
    cells = [[cell[: len(cell) - len(cell.lstrip(" "))] + clean_line(cell) for cell in row] for row in rows]
    used = [n for n, column in enumerate(zip(*cells, strict=True)) if any(column[1:])]
    widths = {n: max(len(row[n]) for row in cells) for n in used}
    for column in drop:
        if width and sum(widths[n] + 2 for n in used) - 2 > width:
            used = [n for n in used if n != column]
    return [
        "  ".join(row[n].rjust(widths[n]) if n in right else row[n].ljust(widths[n]) for n in used).rstrip()
        for row in cells
    ]


def markdown_table(cells: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return an aligned Markdown table; columns that are empty in all rows are left out."""
    used = [n for n in range(len(cells[0])) if any(row[n] for row in cells[1:])]
    clean = [[clean_line(row[n]).replace("|", "\\|") for n in used] for row in cells]
    widths = [max(3, *(len(row[n]) for row in clean)) for n in range(len(used))]

    def line(row: Sequence[str]) -> str:
        parts = [
            text.rjust(width) if n in right else text.ljust(width)
            for n, text, width in zip(used, row, widths, strict=True)
        ]
        return "| " + " | ".join(parts) + " |"

    rule = ["-" * (width - 1) + (":" if n in right else "-") for n, width in zip(used, widths, strict=True)]
    return [line(clean[0]), line(rule), *map(line, clean[1:])]


WHY = "why"
"""Label, of details, of the row that explains the one above it."""


@dataclass(frozen=True)
class ListRow:
    """One line. `key` identifies its subject and stays the same while it is listed; "" is a heading (`name`), a model
    (`mark` and `name`) over its files, or a mere text (`note`), which cannot be selected.

    `columns` are quantization, size, state and speed, each aligned; `note` stands behind the name in their place. `tag`
    stands dimmed right after the name where there is room. `strong`: the loaded one. `dim`: not to be used as it
    is."""

    key: str = ""
    mark: str = " "
    name: str = ""
    columns: tuple[str, str, str, str] | None = None
    note: str = ""
    tag: str = ""
    strong: bool = False
    dim: bool = False
