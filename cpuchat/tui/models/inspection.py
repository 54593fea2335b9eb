"""Shows everything in the header of one model."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from cpuchat.daemon_thread import run_in_daemon_thread
from cpuchat.errors import CpuchatError
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.inspect import Inspection, inspect
from cpuchat.present.inspection import sections
from cpuchat.text import clean, clean_line
from cpuchat.tui import keys
from cpuchat.tui.widgets.dismissable import Dismissable
from cpuchat.tui.widgets.key_footer import KeyFooter

_LABEL = 22
_MOST_TEMPLATE = 20_000  # characters of a template that are shown


class InspectionScreen(Dismissable[None]):
    """Reads the header in a thread: a large vocabulary takes a while, a remote one longer."""

    CSS_PATH = "inspection.tcss"
    AUTO_FOCUS = "#inspection"
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("inspection")

    def __init__(self, title: str, read: Callable[[], GGUFHeader]) -> None:
        """`read` gets the header and may raise CpuchatError; it runs in a thread."""
        super().__init__()
        self._about = clean_line(title)
        self._read_header = read

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="inspection") as pane:
            pane.border_title = Content(self._about)
            yield Static("Reading the header…", id="waiting", markup=False)
        yield KeyFooter()

    def on_mount(self) -> None:
        self._read()

    @work
    async def _read(self) -> None:
        try:
            self._show(await run_in_daemon_thread(lambda: inspect(self._read_header())))
        except (CpuchatError, OSError) as error:
            self.query_one("#waiting", Static).update(clean(str(error)))

    def _show(self, inspection: Inspection) -> None:
        parts: list[Static] = []
        for heading, rows in sections(inspection):
            parts += [Static(heading, classes="heading", markup=False), Static(_table(rows), classes="rows")]
        for template in inspection.templates:
            name = f" “{template.name}”" if template.name else ""
            cut = f"\n… {len(template.text) - _MOST_TEMPLATE:,} more characters" * (len(template.text) > _MOST_TEMPLATE)
            parts += [
                Static(clean_line(f"Text of the chat template{name}"), classes="heading", markup=False),
                Static(Text(clean(template.text[:_MOST_TEMPLATE]) + cut), classes="rows"),
            ]
        pane = self.query_one("#inspection")
        self.query_one("#waiting").remove()
        pane.mount_all(parts)
        pane.border_subtitle = Content(clean_line(inspection.file))


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    if any(label for label, _ in rows):
        table.add_column(width=_LABEL, style="dim", overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    for label, value in rows:
        table.add_row(*(Text(part) for part in ((label, value) if len(table.columns) > 1 else (value,))))
    return table
