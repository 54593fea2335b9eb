"""The help screen: keys and figures, those of the screen that it was opened on first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from rich.console import Group
from rich.table import Table
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import Input, Static

from cpuchat.base import toml
from cpuchat.protocol.drafters import DRAFTERS
from cpuchat.tui import keys
from cpuchat.tui.widgets.dialogs import Dismissable
from cpuchat.tui.widgets.key_footer import KeyFooter
from cpuchat.tui.widgets.model_list import label_table

Row = tuple[str, str, str]
"""A key or figure, its text, and other words that find it."""
Section = tuple[str, list[Row]]


def figures() -> list[Section]:
    """Return the blocks about figures, and the tips as the last."""
    blocks = toml.loads(Path(__file__).with_name("help.toml").read_text(encoding="utf-8"))
    drafters = "; ".join(f"{row.name} {row.help}" for row in DRAFTERS)
    return [
        (title, [(name, text.format(drafters=drafters), "") for name, text in rows.items()])
        for title, rows in blocks.items()
    ]


def key_sections(offered: Sequence[keys.Key]) -> Iterator[Section]:
    """Yield keys under their headings; a line that several screens share appears once."""
    for group in dict.fromkeys(map(keys.heading, offered)):
        listed = [key for key in offered if keys.heading(key) == group]
        rows = {(keys.display_all(key.keys) or "palette", key.help): key.found_by for key in listed}
        yield group, [(*row, words) for row, words in rows.items()]


class HelpScreen(Dismissable[None], keys="help"):
    """The keys of the screen below, whose ids are `here`, then figures, then all other keys; with a filter."""

    CSS_PATH = "help.tcss"
    AUTO_FOCUS = "Input"
    COMPONENT_CLASSES: ClassVar[set[str]] = {"help--heading"}
    BINDINGS: ClassVar[list[BindingType]] = [
        ("up", "scroll('up')", "up"),
        ("down", "scroll('down')", "down"),
        ("pageup", "scroll('page_up')", "page up"),
        ("pagedown", "scroll('page_down')", "page down"),
    ]

    def __init__(self, offered: Sequence[keys.Key] = keys.KEYS, here: Collection[str] = ()) -> None:
        super().__init__()
        near = [key for key in offered if key.id in here and key.keys]
        near.sort(key=lambda key: key.place == "app")
        rest = [key for key in offered if key not in near]
        *blocks, tips = figures()
        self.sections: list[Section] = [*key_sections(near), *blocks, *key_sections(rest), tips]

    def compose(self) -> ComposeResult:
        yield Input(placeholder="Filter all keys and figures", compact=True)
        with VerticalScroll(id="help", can_focus=False) as pane:
            pane.border_title = "Help"
            yield Static()
        yield KeyFooter()

    def on_mount(self) -> None:
        self._show(self.sections)

    @on(Input.Changed)
    def _filter(self, event: Input.Changed) -> None:
        words = event.value.casefold().split()
        found = (
            (title, [row for row in rows if all(word in f"{' '.join(row)} {title}".casefold() for word in words)])
            for title, rows in self.sections
        )
        self._show([(title, rows) for title, rows in found if rows])

    def _show(self, sections: Sequence[Section]) -> None:
        heading = self.get_component_rich_style("help--heading", partial=True)
        parts: list[Text | Table] = []
        for title, rows in sections:
            table = label_table([(left, right) for left, right, _ in rows], "bold", 20)
            parts += [Text("\n" if parts else "").append(title, heading), table]
        pane = self.query_one("#help")
        pane.query_one(Static).update(Group(*parts) if parts else "No keys or figures match.")
        pane.scroll_home(animate=False)

    def action_scroll(self, where: str) -> None:
        getattr(self.query_one("#help"), f"scroll_{where}")(animate=False)
