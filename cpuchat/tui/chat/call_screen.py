"""The dialog that asks before a call of a tool runs."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget
from textual.widgets import Button, Label

from cpuchat.present import tools as words
from cpuchat.protocol.messages import Tool, ToolCall
from cpuchat.telemetry.units import plural
from cpuchat.tools.loop import Choice
from cpuchat.tui.widgets.dialogs import Dialog

_OTHER_ROWS = 12  # of the terminal, that are not for arguments


class Arguments(Widget):
    """All arguments of a call exactly, folded at its width."""

    def __init__(self, call: ToolCall) -> None:
        super().__init__()
        self.shown = lru_cache(1)(lambda width: words.arguments(call, max(width, 10)))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self.shown(width).count("\n") + 1

    def render(self) -> Content:
        return Content(self.shown(self.size.width))


class CallScreen(Dialog[Choice], keys="dialog"):
    """Show a call with all its arguments and return what the user chooses. Refusing has the focus: the dialog opens
    while the user may be typing. The other buttons are enabled once the last row was shown."""

    AUTO_FOCUS = "#refuse"
    BINDINGS: ClassVar[list[BindingType]] = [
        ("left", "app.focus_previous", "before"),
        ("right", "app.focus_next", "next"),
        ("up,k", "scroll(-1)", "up"),
        ("down,j", "scroll(1)", "down"),
        ("pageup", "scroll(-8)", "up"),
        ("pagedown", "scroll(8)", "down"),
        ("end", "scroll(1_000_000_000)", "last row"),
        ("ctrl+c", "app.help_quit", "stop"),
    ]

    def __init__(self, tool: Tool, call: ToolCall) -> None:
        title = f"The model calls {words.shown_name(tool.name)}"
        super().__init__(title, words.owner(tool), "Esc refuses · Ctrl+C stops")
        self._call = call

    def compose_answers(self) -> ComposeResult:
        with VerticalScroll(id="arguments", can_focus=False):
            yield Arguments(self._call)
        yield Label(id="more", markup=False)
        with Horizontal(id="buttons"):
            for choice, label in words.CHOICES.items():
                yield Button(label, id=choice, compact=True, disabled=choice != "refuse")

    def on_mount(self) -> None:
        def count() -> None:
            self.call_after_refresh(self._count_rows)

        for shown in self.query("#arguments"):  # none if it is dismissed while it opens
            for changed in ("scroll_y", "virtual_size", "container_size"):
                self.watch(shown, changed, count)

    def on_resize(self) -> None:
        for shown in self.query("#arguments"):
            shown.styles.max_height = max(self.size.height - _OTHER_ROWS, 3)

    def _count_rows(self) -> None:
        """Say how many rows are below those shown; at the last one, let the call run."""
        if not self.has_widgets:  # dismissed meanwhile
            return
        shown, rows = self.query_one("#arguments"), self.query_one(Arguments)
        if not shown.size.height or not rows.size.width:  # no layout yet
            return
        n_below = rows.shown(rows.size.width).count("\n") + 1 - int(shown.scroll_y) - shown.size.height
        self.query_one("#more", Label).update(f"{plural(n_below, 'more row')}: ↓, End" if n_below > 0 else "")
        if n_below <= 0:
            for button in self.query(Button):
                button.disabled = False

    @on(Button.Pressed)
    def _pressed(self, event: Button.Pressed) -> None:
        self.dismiss(next(choice for choice in words.CHOICES if choice == event.button.id))

    def action_scroll(self, lines: int) -> None:
        self.query_one("#arguments").scroll_relative(y=lines, animate=False)

    def action_cancel(self) -> None:
        self.dismiss("refuse")
