"""Lays out a table: natural widths if they fit, wrapped cells if not, else one line per cell."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.style import Style

from cpuchat.tui.markdown.palette import Palette
from cpuchat.tui.markdown.rows import Row, Run, prefix, wrap

Cell = list[list[Run]]  # lines, of which there are several where it holds `<br>`
_MIN_COLUMN = 6
_BETWEEN = 3  # " │ "


@dataclass
class Table:
    """Cells as styled runs. `aligns`: "left", "right", "center" or "". `extra`: what follows a row's last column."""

    header: list[Cell]
    rows: list[list[Cell]]
    aligns: list[str]
    extra: dict[int, list[str]] = field(default_factory=dict)


def _size(line: list[Run]) -> int:
    return sum(cell_len(text) for text, _ in line)


def _width(cell: Cell) -> int:
    return max(map(_size, cell), default=0)


def _joined(cell: Cell) -> list[Run]:
    """Join a cell's lines."""
    return [run for number, line in enumerate(cell) for run in ([(" ", Style()), *line] if number else line)]


def column_widths(table: Table, width: int) -> list[int] | None:
    """Return the width of each column in cells, None when they would be too narrow to read."""
    natural = [
        max(1, _width(head), *(_width(row[column]) for row in table.rows)) for column, head in enumerate(table.header)
    ]
    room = width - _BETWEEN * (len(natural) - 1) - 2
    if sum(natural) <= room:
        return natural
    if room < sum(min(size, _MIN_COLUMN) for size in natural):
        return None
    widths = [0] * len(natural)
    open_columns = sorted(range(len(natural)), key=natural.__getitem__)
    while open_columns:
        # The narrowest takes what it needs, or its fair share of what is left.
        column = open_columns.pop(0)
        widths[column] = min(natural[column], room // (len(open_columns) + 1))
        room -= widths[column]
    return widths


def layout(table: Table, width: int, palette: Palette, widths: list[int] | None = None) -> list[Row]:
    """Return rows of the table. `widths` keeps the columns of an earlier part of the same table and leaves out the
    header.
    """
    continued = widths is not None
    widths = widths or column_widths(table, width)
    if widths is None:
        return _stacked(table, width, palette)
    rows: list[Row] = []
    if not continued:
        rows += _row(table.header, widths, table.aligns, palette)
        bars = "─┼─".join("─" * size for size in widths)
        rows.append(Row([(f"─{bars}─", palette.rule)]))
    for index, cells in enumerate(table.rows):
        rows += _row(cells, widths, table.aligns, palette)
        if index in table.extra:
            extra = Row([("│ " + " │ ".join(table.extra[index]), palette.dim)])
            rows += prefix(wrap(extra, width - 2), ("  ", palette.dim), ("  ", palette.dim))
    return rows


def _row(cells: list[Cell], widths: list[int], aligns: list[str], palette: Palette) -> list[Row]:
    columns = [
        [row for line in cell for row in wrap(Row(list(line)), size)] for cell, size in zip(cells, widths, strict=False)
    ]
    rows: list[Row] = []
    for line in range(max((len(column) for column in columns), default=0)):
        runs: list[Run] = [(" ", palette.rule)]
        for index, (column, size) in enumerate(zip(columns, widths, strict=False)):
            if index:
                runs.append((" │ ", palette.rule))
            content = column[line].runs if line < len(column) else []
            free = size - _size(content)
            before = {"right": free, "center": free // 2}.get(aligns[index], 0)
            if before > 0:
                runs.append((" " * before, palette.rule))
            runs += content
            if free - before > 0:
                runs.append((" " * (free - before), palette.rule))
        rows.append(Row(runs))
    return rows


def _stacked(table: Table, width: int, palette: Palette) -> list[Row]:
    """Render one "heading: value" line per cell, for any width."""
    rows: list[Row] = []
    if not table.rows:
        return [row for head in table.header for row in wrap(Row(_joined(head)), width)]
    for index, cells in enumerate(table.rows):
        if index:
            rows.append(Row([("─" * min(width, 12), palette.rule)]))
        for head, cell in zip(table.header, cells, strict=False):
            rows += wrap(Row([*_joined(head), (": ", palette.dim), *_joined(cell)]), width)
        if index in table.extra:
            rows += wrap(Row([(" │ ".join(table.extra[index]), palette.dim)]), width)
    return rows
