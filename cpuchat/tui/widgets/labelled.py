"""Details as lines of a label and a text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip


class Labelled(ScrollView, can_focus=False):
    """Shows labels and texts; scrolls with the wheel or by keys of its screen.

    New lines never cause a layout.
    """

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
        self._rows: tuple[tuple[str, str], ...] = ()
        self._lines: list[Strip] = []

    def show(self, rows: Iterable[tuple[str, str]]) -> None:
        """Show labels and texts, both cleaned; long texts wrap."""
        now = tuple(rows)
        if [label for label, _ in now] != [label for label, _ in self._rows]:  # about something else
            self.scroll_home(animate=False)
        self._rows = now
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
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(no_wrap=True, style=self.get_component_rich_style("labelled--label", partial=True))
        table.add_column(ratio=1, overflow="fold")
        for label, text in self._rows:
            table.add_row(Text(label), Text(text))
        console = self.app.console
        options = console.options.update(width=width)
        lines = console.render_lines(table, options, style=self.rich_style) if self._rows else []
        self._lines = [Strip(line).adjust_cell_length(width, self.rich_style) for line in lines]
        self.virtual_size = Size(width, len(self._lines))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        number = y + self.scroll_offset.y
        width = self.scrollable_content_region.width
        return self._lines[number] if number < len(self._lines) else Strip.blank(width, self.rich_style)
