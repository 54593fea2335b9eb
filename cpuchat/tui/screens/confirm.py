"""Small dialogs: a question, and a line of text."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label

from cpuchat.tui import keys


class ConfirmScreen(ModalScreen[bool]):
    """Ask before something that cannot be undone; the safe answer has the focus. Returns True for yes."""

    CSS_PATH = "confirm.tcss"
    AUTO_FOCUS = "#no"
    BINDINGS: ClassVar[list[BindingType]] = [
        *keys.bindings("dialog"),
        ("y", "answer(True)", "yes"),
        ("n", "answer(False)", "no"),
        ("left,right", "app.focus_next", "other"),
    ]

    def __init__(self, title: str, question: str, yes: str = "Yes", no: str = "No", danger: bool = True) -> None:
        super().__init__()
        self._title = title
        self._question = question
        self._yes = yes
        self._no = no
        self._danger = danger

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as dialog:
            dialog.border_title = self._title
            yield Label(self._question, id="question", markup=False)
            with Horizontal(id="buttons"):
                yield Button(self._no, id="no", compact=True)
                yield Button(self._yes, id="yes", variant="error" if self._danger else "primary", compact=True)

    @on(Button.Pressed)
    def _pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)

    def action_cancel(self) -> None:
        self.dismiss(False)


class AskTextScreen(ModalScreen[str | None]):
    """Ask for a line of text. Returns it stripped, or None."""

    CSS_PATH = "confirm.tcss"
    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("dialog")

    def __init__(self, title: str, value: str = "", max_length: int = 200) -> None:
        super().__init__()
        self._title = title
        self._value = value
        self._max_length = max_length

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as dialog:
            dialog.border_title = self._title
            dialog.border_subtitle = "Enter keeps it · Esc leaves it"
            yield Input(self._value, max_length=self._max_length, compact=True)

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)

    def action_cancel(self) -> None:
        self.dismiss(None)
