"""Dialogs (confirmation, choice, one line of text), and screens that can be dismissed once, and at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen, Screen, ScreenResultType
from textual.widgets import Button, Input, Label

from cpuchat.base.text import clean, clean_line
from cpuchat.tui import keys


class Dismissable(Screen[ScreenResultType]):
    """A screen that is dismissed at most once. Textual pops whatever is on top, also for a screen that is gone already
    or lies below a dialog: two presses of a key that arrive together would dismiss the screen below too, whose caller
    then waits forever.

    It also takes the widgets from a screen that is still opening, whose handlers then look for them in vain: such a one
    opens first.
    """

    _is_open = False
    _dismissed: tuple[ScreenResultType | None] | None = None

    def on_mount(self) -> None:
        self.call_after_refresh(self._opened)  # behind what the screen itself does then

    def _opened(self) -> None:
        self._is_open = True
        if self._dismissed is not None:
            self.dismiss(*self._dismissed)

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        if self._is_open and self.is_active:
            return super().dismiss(result)
        if not self._is_open and self._dismissed is None:
            self._dismissed = (result,)
        return AwaitComplete.nothing()

    def action_close(self) -> Awaitable[None] | None:
        """Leave without a result."""
        self.dismiss(None)

    def warn(self, text: str) -> None:
        """Show a warning; `text` may hold anything."""
        self.notify(clean_line(text), severity="warning", markup=False)

    @property
    def has_widgets(self) -> bool:
        """Return whether it is mounted and not removed: results of threads can be shown."""
        return self.is_mounted and self.is_attached and self.is_running

    async def dismiss_when_on_top(self, result: ScreenResultType) -> None:
        """Dismiss with a result that was awaited; a dialog opened meanwhile is closed first."""
        while self.is_attached and not self.is_active:
            await asyncio.sleep(0.05)
        self.dismiss(result)


class ConfirmScreen(Dismissable[bool], ModalScreen[bool]):
    """Ask before something irreversible; the safe answer has the focus. Returns True for yes."""

    CSS_PATH = "dialogs.tcss"
    AUTO_FOCUS = "#no"
    BINDINGS: ClassVar[list[BindingType]] = [
        *keys.bindings("dialog"),
        ("y", "answer(True)", "yes"),
        ("n", "answer(False)", "no"),
        ("left,right", "app.focus_next", "other"),
    ]

    def __init__(self, title: str, question: str, yes: str = "Yes", no: str = "No", danger: bool = True) -> None:
        super().__init__()
        self._title = clean_line(title)
        self._question = clean(question)
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


@dataclass(frozen=True)
class Choice:
    """One answer of a `ChoiceScreen`; `danger` marks the irreversible."""

    id: str
    label: str
    danger: bool = False


class ChoiceScreen(Dismissable[str | None], ModalScreen[str | None]):
    """Ask a question with several answers, the safe one first and focused. Returns the id of one, or None."""

    CSS_PATH = "dialogs.tcss"
    AUTO_FOCUS = "Button"
    BINDINGS: ClassVar[list[BindingType]] = [
        *keys.bindings("dialog"),
        ("left,up", "app.focus_previous", "before"),
        ("right,down", "app.focus_next", "next"),
    ]

    def __init__(self, title: str, question: str, choices: Sequence[Choice]) -> None:
        super().__init__()
        self._title = clean_line(title)
        self._question = clean(question)
        self._choices = tuple(choices)

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as dialog:
            dialog.border_title = self._title
            dialog.border_subtitle = "Enter chooses · Esc cancels"
            yield Label(self._question, id="question", markup=False)
            with Horizontal(id="buttons"):
                for choice in self._choices:
                    variant = "error" if choice.danger else "default"
                    yield Button(choice.label, id=f"choice-{choice.id}", variant=variant, compact=True)

    @on(Button.Pressed)
    def _pressed(self, event: Button.Pressed) -> None:
        self.dismiss((event.button.id or "").removeprefix("choice-"))

    def action_cancel(self) -> None:
        self.dismiss(None)


class AskTextScreen(Dismissable[str | None], ModalScreen[str | None]):
    """Ask for a line of text, with `about` above it. Returns it stripped, or None."""

    CSS_PATH = "dialogs.tcss"
    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("dialog")

    def __init__(self, title: str, value: str = "", max_length: int = 200, about: str = "") -> None:
        super().__init__()
        self._title = clean_line(title)
        self._about = clean_line(about)
        self._value = value
        self._max_length = max_length

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as dialog:
            dialog.border_title = self._title
            dialog.border_subtitle = "Enter saves · Esc cancels"
            if self._about:
                yield Label(self._about, id="question", markup=False)
            yield Input(self._value, max_length=self._max_length, compact=True)

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)

    def action_cancel(self) -> None:
        self.dismiss(None)
