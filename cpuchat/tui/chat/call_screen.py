"""The dialog that asks before a call of a tool runs."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Label, Static

from cpuchat.present import tools as words
from cpuchat.text import clean_line
from cpuchat.tool_calls import Tool, ToolCall
from cpuchat.tools.approval import Approvals, Choice
from cpuchat.tui import keys
from cpuchat.tui.widgets.dismissable import Dismissable


class CallScreen(Dismissable[Choice], ModalScreen[Choice]):
    """Show a call with all its arguments and return what the user chooses. Refusing has the focus: the dialog opens
    while the user may be typing.
    """

    CSS_PATH = "call_screen.tcss"
    AUTO_FOCUS = "#refuse"
    BINDINGS: ClassVar[list[BindingType]] = [
        *keys.bindings("dialog"),
        ("left", "app.focus_previous", "before"),
        ("right", "app.focus_next", "next"),
        ("up,k", "scroll(-1)", "up"),
        ("down,j", "scroll(1)", "down"),
        ("ctrl+c", "app.help_quit", "stop"),
    ]

    def __init__(self, tool: Tool, call: ToolCall) -> None:
        super().__init__()
        self._tool = tool
        self._call = call

    def compose(self) -> ComposeResult:
        choices = Approvals.choices(self._tool)
        with Vertical(id="dialog") as dialog:
            dialog.border_title = Content(f"The model calls {clean_line(self._tool.name)}")
            dialog.border_subtitle = "Esc refuses · Ctrl+C stops"
            yield Label(words.owner(self._tool), id="owner", markup=False)
            with VerticalScroll(id="arguments", can_focus=False):
                yield Static(words.arguments(self._call), markup=False)
            with Horizontal(id="buttons"):
                for choice, label in words.CHOICES.items():
                    if choice in choices:
                        yield Button(label, id=choice, compact=True)

    @on(Button.Pressed)
    def _pressed(self, event: Button.Pressed) -> None:
        self.dismiss(next(choice for choice in words.CHOICES if choice == event.button.id))

    def action_scroll(self, lines: int) -> None:
        self.query_one("#arguments").scroll_relative(y=lines, animate=False)

    def action_cancel(self) -> None:
        self.dismiss("refuse")
