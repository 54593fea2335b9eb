"""Aligned columns of text."""

from __future__ import annotations

from collections.abc import Sequence

from cpuchat.text import clean_line


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Align the cells of `rows` in columns; the columns whose numbers are in `right` are right-aligned.

    Cells are cleaned of control characters and keep their indentation. A column that is empty in all rows but the
    first (the headings) is left out.
    """
    cells = [[cell[: len(cell) - len(cell.lstrip(" "))] + clean_line(cell) for cell in row] for row in rows]
    used = [n for n, column in enumerate(zip(*cells, strict=True)) if any(column[1:])]
    widths = {n: max(len(row[n]) for row in cells) for n in used}
    return [
        "  ".join(row[n].rjust(widths[n]) if n in right else row[n].ljust(widths[n]) for n in used).rstrip()
        for row in cells
    ]
