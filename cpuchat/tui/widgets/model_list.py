"""A list of models and details of the selected line, drawn line by line, and the bases of screens with both."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from rich.cells import cell_len, chop_cells
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.screen import ScreenResultType
from textual.scroll_view import ScrollView
from textual.strip import Strip

from cpuchat.base.text import clean_line
from cpuchat.present.table import WHY, ListRow
from cpuchat.tui.widgets.dialogs import Dismissable
from cpuchat.tui.widgets.key_footer import KeyFooter

_NARROWEST = (0, 7, 6, 12)  # cells of the columns; a speed that comes moves nothing
_LAYOUTS = ((0, 1, 2, 3), (1, 2, 3), (1, 2), (2,))
"""Columns, by what the names leave of the width. Whether a model fits is always told; its quantization, without a
column of its own, stands in its name."""
_WIDEST = 100  # cells of a line: figures stay near their names
_USUAL_NAME = 36  # cells for which columns make room; longer names get a line of their own


class ModelList(ScrollView, can_focus=False):
    """A list that moves under the keys of its screen: the text box keeps the focus."""

    ALLOW_SELECT = False
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "models--marked", "models--dim", "models--strong", "models--heading", "models--rule",
    }  # fmt: skip
    DEFAULT_CSS = """
    ModelList {
        overflow-x: hidden;
        scrollbar-size-vertical: 1;
        scrollbar-gutter: stable;
        & > .models--marked { color: $block-cursor-foreground; background: $block-cursor-background; }
        & > .models--dim { color: $hint; }
        & > .models--strong { text-style: bold; }
        & > .models--heading { color: $heading; }
        & > .models--rule { color: $foreground 20%; }
        &:ansi > .models--dim, &:ansi > .models--heading, &:ansi > .models--rule {
            color: ansi_default;
            text-style: dim;
        }
    }
    """

    class Marked(Message):
        """Another line is selected, or the list changed under the selection."""

    class Chosen(Message):
        """The selected line was clicked."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.rows: tuple[ListRow, ...] = ()
        self._lines: list[tuple[int, int]] = []  # of each line on the screen: its row, and which line of that it is
        self._width = 0  # of these lines: a paint may come between another width and its event
        self._widths, self._columns = _NARROWEST, _LAYOUTS[0]
        self._at: int | None = None
        self.moved = False
        """Whether the user has moved the selection."""

    @property
    def marked(self) -> str:
        return self.rows[self._at].key if self._at is not None else ""

    def show(self, rows: Sequence[ListRow], mark: str = "") -> None:
        """List these; selects the key `mark` if it is among them, else the first line."""
        before, self.rows, was_at = self.rows, tuple(rows), self._at
        places = [number for number, row in enumerate(rows) if row.key]
        self._at = next((number for number in places if rows[number].key == mark), places[0] if places else None)
        self._arrange()
        if (before, was_at) != (self.rows, self._at):
            self.refresh()
        if self._at != was_at or len(before) != len(rows):  # a figure that comes scrolls nothing
            self._follow()
        self.post_message(self.Marked())

    def _arrange(self) -> None:
        """Lay the rows out in lines."""
        width = min(self.scrollable_content_region.width, _WIDEST)
        cells = [row.columns for row in self.rows if row.columns]
        self._width = width
        self._widths = tuple(
            max(least, *(cell_len(clean_line(row[n])) for row in cells)) if cells else least
            for n, least in enumerate(_NARROWEST)
        )
        self._columns = next(filter(self._leaves_names, _LAYOUTS), _LAYOUTS[-1])
        self._lines = [
            (number, part) for number, row in enumerate(self.rows) for part in range(self._height(row, width))
        ]
        self.virtual_size = Size(width, len(self._lines))

    def _leaves_names(self, columns: tuple[int, ...]) -> bool:
        """Return whether these columns leave room for the names of usual length."""
        self._columns = columns
        room = self._width - sum(self._widths[n] + 2 for n in columns if self._widths[n])
        names = [cell_len(row.mark) + 1 + cell_len(self._named(row)) for row in self.rows if row.columns]
        return room >= max((cells for cells in names if cells <= _USUAL_NAME), default=0)

    def _named(self, row: ListRow) -> str:
        """Return the name, with the quantization where that has no column and the name does not tell it."""
        name, kind = clean_line(row.name), clean_line(row.columns[0]) if row.columns else ""
        return name if 0 in self._columns or kind.lower() in name.lower() else f"{name} {kind}"

    def _height(self, row: ListRow, width: int) -> int:
        """Return how many lines a row takes: a name is never cut off, so that what is beside it goes below it."""
        if (not row.key and row.mark == " ") or not width:
            return 1
        name, beside = self._named(row), cell_len(self._beside(row))
        room = width - cell_len(row.mark) - 1
        fits = cell_len(name) + beside + 2 * bool(beside) <= room
        return 1 if fits else len(chop_cells(name, max(room, 8))) + bool(beside)

    def _beside(self, row: ListRow, height: int = 1) -> str:
        """Return what stands right of the name, or with all figures below it."""
        if row.columns is None:
            return clean_line(row.note)
        kind, size, state, speed = map(clean_line, row.columns)
        kinds, sizes, states, speeds = self._widths
        cells = (f"{kind:<{kinds}}", f"{size:>{sizes}}", f"{state:<{states}}", f"{speed:>{speeds}}")
        all_below = height > 1 and sum(self._widths) + 6 <= self._width
        return "  ".join(cells[n] for n in (_LAYOUTS[1] if all_below else self._columns) if cells[n])

    def move(self, lines: int) -> None:
        places = [number for number, row in enumerate(self.rows) if row.key]
        if places and self._at is not None:
            wanted = places.index(self._at) + lines
            self._set_mark(places[max(0, min(len(places) - 1, wanted))])

    def page(self, pages: int) -> None:
        self.move(pages * max(self.scrollable_content_region.height - 1, 1))

    def mark(self, key: str) -> None:
        at = next((number for number, row in enumerate(self.rows) if row.key == key), None)
        if key and at is not None:
            self._set_mark(at)

    def _set_mark(self, at: int) -> None:
        self._at, self.moved = at, True
        self.refresh()
        self._follow()
        self.post_message(self.Marked())

    def _follow(self) -> None:
        places = [y for y, (row, _) in enumerate(self._lines) if row == self._at]
        if self._at is not None and places:
            # The headings over the first line come into view with it, and the model over its first file.
            above = itertools.takewhile(lambda row: not row.key and row.name, reversed(self.rows[: self._at]))
            top = 0 if not any(row.key for row in self.rows[: self._at]) else places[0] - len([*above])
            region = Region(0, top, 1, places[-1] - top + 1)
            self.scroll_to_region(region, animate=False, force=True, x_axis=False)

    def on_resize(self) -> None:
        self._arrange()
        self._follow()

    def on_click(self, event: events.Click) -> None:
        y = round(event.y + self.scroll_offset.y)
        number = self._lines[y][0] if 0 <= y < len(self._lines) else -1
        if number >= 0 and self.rows[number].key:
            if number == self._at:
                self.post_message(self.Chosen())
            else:
                self._set_mark(number)

    def render_line(self, y: int) -> Strip:
        at = round(y + self.scroll_offset.y)
        width = self.scrollable_content_region.width
        if at >= len(self._lines):
            return Strip.blank(width, self.rich_style)
        number, part = self._lines[at]
        text = self._text(self.rows[number], part, self._width)
        style = self.rich_style
        if number == self._at:
            style = self.get_component_rich_style("models--marked")
            text.spans.clear()
        segments = [Segment(s.text, style + s.style if s.style else style) for s in text.render(self.app.console)]
        return Strip([s for s in segments if s.text != "\n"]).adjust_cell_length(width, style)

    def _text(self, row: ListRow, part: int, width: int) -> Text:
        """Render a line of `● name   Q8_0   1.6 GB  fits   31 tok/s`; a long name has lines of its own."""
        dim, strong, heading, rules = (
            self.get_component_rich_style(f"models--{part}") for part in ("dim", "strong", "heading", "rule")
        )
        if not row.key and row.mark == " ":
            title = clean_line(row.name or row.note)
            rule = f" {'─' * width}" if row.name else ""
            line = Text.assemble((title, heading), (rule, rules), no_wrap=True)
            line.truncate(width, overflow="crop" if row.name else "ellipsis")
            return line
        own = strong if row.strong else dim if row.dim else ""
        height = self._height(row, width)
        beside = self._beside(row, height)
        mark, room = f"{row.mark} ", width - cell_len(beside) - 2 if height == 1 and beside else width
        name = self._named(row)
        pieces = [name] if height == 1 else chop_cells(name, max(width - cell_len(mark), 8))
        if part == len(pieces):
            line = Text.assemble("" if row.columns else " " * cell_len(mark), (beside, dim), no_wrap=True)
            line.truncate(width, overflow="ellipsis")
            line.align("right" if row.columns else "left", width)
            return line
        begin = mark if part == 0 else " " * cell_len(mark)
        name = Text.assemble((begin, strong if row.strong else ""), (pieces[part], own), no_wrap=True)
        if part < len(pieces) - 1:
            return name
        tag = f" {clean_line(row.tag)}" if row.tag else ""
        if name.cell_len + cell_len(tag) <= room:  # a part of a word would tell nothing
            name.append(tag, dim)
        if height > 1:
            return name
        if row.columns is None and (row.dim or 2 * cell_len(beside) > width):  # only short ones are aligned
            return name.append(f"  {beside}", dim)
        name.truncate(room, pad=True)
        return name.append(f"  {beside}" if beside else "", dim)


def label_table(rows: Iterable[tuple[str, str]], style: Style | str, width: int | None = None) -> Table:
    """Return labels, in a column of this width, with their texts, which wrap."""
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(no_wrap=True, style=style, width=width)
    table.add_column(ratio=1, overflow="fold")
    for label, text in rows:
        table.add_row(Text(label), Text(text, style if label == WHY else ""))
    return table


_FIGURE = re.compile(r"(?<=\d) (?=(?:[kMGT]?B|[kMG]?B/s|tok/s|tokens)\b|%)")
_JOINT = "\u2800"  # looks like a space, at which no line ends


class Labelled(ScrollView, can_focus=False):
    """Shows labels and texts; scrolls by wheel or keys of its screen. New lines never cause a layout."""

    ALLOW_SELECT = False
    COMPONENT_CLASSES: ClassVar[set[str]] = {"labelled--label"}
    DEFAULT_CSS = """
    Labelled {
        overflow-x: hidden;
        scrollbar-size-vertical: 1;
        scrollbar-gutter: stable;
        & > .labelled--label { color: $hint; }
        &:ansi > .labelled--label { text-style: dim; }
    }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.rows: tuple[tuple[str, str], ...] = ()
        self._lines: list[Strip] = []

    def show(self, rows: Iterable[tuple[str, str]]) -> None:
        """Show labels and texts, both cleaned; long texts wrap."""
        now = tuple(rows)
        if [label for label, _ in now] != [label for label, _ in self.rows]:  # about something else
            self.scroll_home(animate=False)
        self.rows = now
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._draw()

    def _draw(self) -> None:
        width = self.scrollable_content_region.width
        if not width:
            return
        rows = [(label, _FIGURE.sub(_JOINT, text)) for label, text in self.rows]
        table = label_table(rows, self.get_component_rich_style("labelled--label", partial=True))
        console = self.app.console
        options = console.options.update(width=width)
        lines = console.render_lines(table, options, style=self.rich_style) if self.rows else []
        parts = ([Segment(one.text.replace(_JOINT, " "), one.style) for one in line] for line in lines)
        self._lines = [Strip(line).adjust_cell_length(width, self.rich_style) for line in parts]
        self.virtual_size = Size(width, len(self._lines))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        number = y + self.scroll_offset.y
        width = self.scrollable_content_region.width
        return self._lines[number] if number < len(self._lines) else Strip.blank(width, self.rich_style)


class ListScreen(Dismissable[ScreenResultType], keys="list"):
    """A screen with keys that move in its `ModelList`, and the class `-narrow` or `-wide` from its first paint on."""

    CSS_PATH = Path(__file__).with_name("model_list.tcss")
    AUTO_FOCUS = ""
    list_title = ""
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [(0, "-narrow"), (140, "-wide")]

    def compose(self) -> ComposeResult:
        yield from self.compose_panes()
        yield from self.compose_below()
        yield KeyFooter()

    def compose_panes(self) -> ComposeResult:
        with Vertical(id="list") as pane:
            pane.border_title = Content(clean_line(self.list_title))
            yield from self.compose_above_list()
            yield ModelList(id="rows")

    def compose_above_list(self) -> ComposeResult:
        yield from ()

    def compose_below(self) -> ComposeResult:
        yield from ()

    @property
    def listed(self) -> ModelList:
        return self.query_one(ModelList)

    @property
    def marked_key(self) -> str:
        return self.listed.marked

    def action_move(self, rows: int) -> None:
        self.listed.move(rows)

    def action_page(self, pages: int) -> None:
        self.listed.page(pages)


class PanesScreen(ListScreen[ScreenResultType], keys="details"):
    """A list, and a `Labelled` about the selected line beside it, or below it on narrow terminals. Keys scroll that, as
    it never has the focus."""

    def action_scroll_details(self, lines: int) -> None:
        self.query_one(Labelled).scroll_relative(y=lines, animate=False)

    def show_details(self, rows: Iterable[tuple[str, str]], title: str) -> None:
        """Show labels and texts, cleaned, in the frame of this title."""
        self.query_one("#about").border_title = Content(clean_line(title))
        self.query_one(Labelled).show([(label, clean_line(text)) for label, text in rows])

    def compose_panes(self) -> ComposeResult:
        with Horizontal(id="panes"):
            yield from super().compose_panes()
            with Vertical(id="about"):
                yield Labelled(id="details")
