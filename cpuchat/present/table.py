"""Columns of text for the command line."""

from __future__ import annotations

from collections.abc import Sequence

from cpuchat.text import clean_line


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Lines with the cells of `rows` below each other; the columns of the numbers in `right` end at the same place.

    Cells are cleaned of what a terminal would obey. A column that is empty in all rows but the first, the headings,
    is left out.
    """
    cells = [[clean_line(cell) for cell in row] for row in rows]
    used = [n for n, column in enumerate(zip(*cells, strict=True)) if any(column[1:])]
    widths = {n: max(len(row[n]) for row in cells) for n in used}
    return [
        "  ".join(row[n].rjust(widths[n]) if n in right else row[n].ljust(widths[n]) for n in used).rstrip()
        for row in cells
    ]
