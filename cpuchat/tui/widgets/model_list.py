"""A list of models and details of the selected line, drawn line by line, and the bases of screens with both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from rich.cells import cell_len
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
from cpuchat.present.table import ListRow
from cpuchat.tui.widgets.dialogs import Dismissable
from cpuchat.tui.widgets.key_footer import KeyFooter

_MIN_NAME = 16


class ModelList(ScrollView, can_focus=False):
    """A list that moves under the keys of its screen: the text box keeps the focus."""

    ALLOW_SELECT = False
    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "models--marked", "models--dim", "models--strong", "models--heading", "models--rule",
    }  # fmt: skip
    DEFAULT_CSS = """
    ModelList {
        overflow-x: hidden;
        overflow-y: auto;
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
        if len(before) != len(rows):
            self.virtual_size = Size(self.virtual_size.width, len(rows))
            self.refresh()
        else:
            for number, (old, new) in enumerate(zip(before, rows, strict=True)):
                if old != new or (self._at != was_at and number in (self._at, was_at)):
                    self.refresh_line(number)
        if self._at != was_at or len(before) != len(rows):  # a figure that comes scrolls nothing
            self._follow()
        self.post_message(self.Marked())

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
        before, self._at, self.moved = self._at, at, True
        if before is not None:
            self.refresh_line(before)
        self.refresh_line(at)
        self._follow()
        self.post_message(self.Marked())

    def _follow(self) -> None:
        if self._at is not None:
            # The heading over the first line comes into view with it.
            top = 0 if not any(row.key for row in self.rows[: self._at]) else self._at
            region = Region(0, top, 1, self._at - top + 1)
            self.scroll_to_region(region, animate=False, force=True, x_axis=False)

    def on_resize(self) -> None:
        self.virtual_size = Size(self.scrollable_content_region.width, len(self.rows))
        self._follow()

    def on_click(self, event: events.Click) -> None:
        number = round(event.y + self.scroll_offset.y)
        if 0 <= number < len(self.rows) and self.rows[number].key:
            if number == self._at:
                self.post_message(self.Chosen())
            else:
                self._set_mark(number)

    def render_line(self, y: int) -> Strip:
        number = round(y + self.scroll_offset.y)
        width = self.scrollable_content_region.width
        if number >= len(self.rows):
            return Strip.blank(width, self.rich_style)
        text = self._text(self.rows[number], width)
        style = self.rich_style
        if number == self._at:
            style = self.get_component_rich_style("models--marked")
            text.spans.clear()
        segments = [Segment(s.text, style + s.style if s.style else style) for s in text.render(self.app.console)]
        return Strip([s for s in segments if s.text != "\n"]).adjust_cell_length(width, style)

    def _text(self, row: ListRow, width: int) -> Text:
        """Render `● name   Q8_0   1.6 GB  fits   31 tok/s`, the name in the room that the columns leave."""
        dim, strong, heading, rules = (
            self.get_component_rich_style(f"models--{part}") for part in ("dim", "strong", "heading", "rule")
        )
        if not row.key:
            title = clean_line(row.name or row.note)
            rule = f" {'─' * width}" if row.name else ""
            line = Text.assemble((title, heading), (rule, rules), no_wrap=True)
            line.truncate(width, overflow="crop" if row.name else "ellipsis")
            return line
        text = Text.assemble((f"{row.mark} ", strong if row.strong else ""), no_wrap=True)
        name = Text(clean_line(row.name), strong if row.strong else dim if row.dim else "", no_wrap=True)
        if row.columns is None:
            note = Text(clean_line(row.note), dim, no_wrap=True)
            if 2 * note.cell_len <= width:  # short ones are aligned, like columns
                name.truncate(width - text.cell_len - note.cell_len - 2, overflow="ellipsis", pad=True)
            text.append_text(name).append("  ").append_text(note)
            text.truncate(width, overflow="ellipsis")
            return text
        quantization, size, state, speed = (clean_line(column) for column in row.columns)
        beside = 22 - max(len(speed), 11)  # `≈2,049 tok/s` is wider than others
        # On narrow terminals the speed stands in the place of the state; where there is none, the state says why.
        kind, short = f"{quantization[:10]:<10}", f"{speed or state:>11}"
        layouts = (
            [kind, f"{size:>7}", f"{state:<{beside}}", f"{speed:>11}"],
            [kind, f"{size:>7}", short],
            [kind, short],
        )
        fitting = (one for one in layouts if width - len(text) - sum(len(cell) + 2 for cell in one) >= _MIN_NAME)
        columns = next(fitting, [kind])
        room = max(width - len(text) - sum(len(column) + 2 for column in columns), _MIN_NAME)
        tag = f" {clean_line(row.tag)}" if row.tag else ""
        if name.cell_len + cell_len(tag) <= room:  # a part of a word would tell nothing
            name.append(tag, dim)
        name.truncate(room, overflow="ellipsis", pad=True)
        return text.append_text(name).append("  " + "  ".join(columns), dim)


def label_table(rows: Iterable[tuple[str, str]], style: Style | str, width: int | None = None) -> Table:
    """Return labels, in a column of this width, with their texts, which wrap."""
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(no_wrap=True, style=style, width=width)
    table.add_column(ratio=1, overflow="fold")
    for label, text in rows:
        table.add_row(Text(label), Text(text))
    return table


class Labelled(ScrollView, can_focus=False):
    """Shows labels and texts; scrolls by wheel or keys of its screen. New lines never cause a layout."""

    ALLOW_SELECT = False
    COMPONENT_CLASSES: ClassVar[set[str]] = {"labelled--label"}
    DEFAULT_CSS = """
    Labelled {
        width: 100%;
        height: 1fr;
        background: transparent;
        overflow-x: hidden;
        overflow-y: auto;
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
        table = label_table(self.rows, self.get_component_rich_style("labelled--label", partial=True))
        console = self.app.console
        options = console.options.update(width=width)
        lines = console.render_lines(table, options, style=self.rich_style) if self.rows else []
        self._lines = [Strip(line).adjust_cell_length(width, self.rich_style) for line in lines]
        self.virtual_size = Size(width, len(self._lines))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        number = y + self.scroll_offset.y
        width = self.scrollable_content_region.width
        return self._lines[number] if number < len(self._lines) else Strip.blank(width, self.rich_style)


_WIDE = 100  # cells


class ListScreen(Dismissable[ScreenResultType], keys="list"):
    """A screen with keys that move in its `ModelList`, and the class `-narrow` or `-wide` from its first paint on."""

    AUTO_FOCUS = ""
    list_title = ""
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [(0, "-narrow"), (_WIDE, "-wide")]

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
    """A list, and a `Labelled` about the selected line beside it, or below it on narrow terminals.

    Keys scroll that, as it never has the focus.

    `MARKED_ACTIONS`: actions whose `check_action` depends on the selected line.
    """

    MARKED_ACTIONS: ClassVar[tuple[str, ...]] = ()
    _enabled: Sequence[bool | None] = ()

    def action_scroll_details(self, lines: int) -> None:
        self.query_one(Labelled).scroll_relative(y=lines, animate=False)

    def show_details(self, rows: Iterable[tuple[str, str]], title: str) -> None:
        """Show labels and texts, cleaned, in the frame of this title.

        Enables what can be done with the selected line.
        """
        pane = self.query_one("#about")
        pane.border_title = Content(clean_line(title))
        self.query_one(Labelled).show([(label, clean_line(text)) for label, text in rows])
        enabled = [self.check_action(action, ()) for action in self.MARKED_ACTIONS]
        if enabled != self._enabled:  # this lays the footer out again
            self._enabled = enabled
            self.refresh_bindings()

    def compose_panes(self) -> ComposeResult:
        with Horizontal(id="panes"):
            yield from super().compose_panes()
            with Vertical(id="about"):
                yield Labelled(id="details")
