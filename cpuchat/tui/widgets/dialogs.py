"""Dialogs (confirmation, choice, one line of text), and screens that can be dismissed once, and at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import ModalScreen, ScreenResultType
from textual.widgets import Button, Input, Label
from textual.worker import active_worker

from cpuchat.base.text import clean, clean_line
from cpuchat.tui import keys
from cpuchat.tui.terminal.painter import LeanScreen


class Dismissable(keys.Keyed, LeanScreen[ScreenResultType]):
    """A screen that is dismissed at most once. Textual pops whatever is on top, also for a screen that is gone already
    or lies below a dialog: two presses of a key that arrive together would dismiss the screen below too, whose caller
    then waits forever.

    It also takes the widgets from a screen that is still opening, whose handlers then look for them in vain: such a one
    opens first. And it cancels the workers of a screen only after its widgets are gone: here they end at once, but for
    the one that dismisses."""

    _is_open = False
    _dismissed: tuple[ScreenResultType | None] | None = None

    def on_mount(self) -> None:
        def opened() -> None:
            self._is_open = True
            if self._dismissed is not None:
                self.dismiss(*self._dismissed)

        self.call_after_refresh(opened)  # behind what the screen itself does then

    def dismiss(self, result: ScreenResultType | None = None) -> AwaitComplete:
        if self._is_open and self.is_active:
            for worker in self.workers:
                if worker.node is self and worker is not active_worker.get(None):
                    worker.cancel()
            return super().dismiss(result)
        if not self._is_open and self._dismissed is None:
            self._dismissed = (result,)
        return AwaitComplete.nothing()

    def action_close(self) -> Awaitable[None] | None:
        self.dismiss(None)

    def warn(self, text: str) -> None:
        self.notify(clean_line(text), severity="warning", markup=False)

    async def confirm(self, title: str, question: str, yes: str, no: str = "Cancel", *, danger: bool = True) -> bool:
        """Ask with a `ConfirmScreen`; call it in a worker."""
        return await self.app.push_screen_wait(ConfirmScreen(title, question, yes, no, danger)) == "yes"

    @property
    def has_widgets(self) -> bool:
        """Return whether it is mounted and not removed: results of threads can be shown."""
        return self.is_mounted and self.is_attached and self.is_running

    async def dismiss_when_on_top(self, result: ScreenResultType) -> None:
        """Dismiss with a result that was awaited; a dialog opened meanwhile is closed first."""
        while self.is_attached and not self.is_active:
            await asyncio.sleep(0.05)
        self.dismiss(result)


class Dialog(Dismissable[ScreenResultType], ModalScreen[ScreenResultType]):
    """A frame with a title, keys in its lower edge, a text and `compose_answers`; Esc gives no answer."""

    CSS_PATH = Path(__file__).with_name("dialogs.tcss")

    def __init__(self, title: str, text: str = "", hint: str = "") -> None:
        super().__init__()
        self._title, self._text, self._hint = clean_line(title), clean(text), hint

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as dialog:
            dialog.border_title, dialog.border_subtitle = Content(self._title), self._hint
            if self._text:
                yield Label(self._text, id="question", markup=False)
            yield from self.compose_answers()

    def compose_answers(self) -> ComposeResult:
        yield from ()

    def action_cancel(self) -> Awaitable[None] | None:
        self.dismiss(None)


@dataclass(frozen=True)
class DialogChoice:
    """One answer of a `ChoiceScreen`; `danger` marks the irreversible."""

    id: str
    label: str
    danger: bool = False


class ChoiceScreen(Dialog[str | None], keys="dialog"):
    """Ask a question with several answers, the safe one first and focused. Returns the id of one, or None."""

    AUTO_FOCUS = "Button"
    BINDINGS: ClassVar[list[BindingType]] = [
        ("left,up", "app.focus_previous", "before"),
        ("right,down", "app.focus_next", "next"),
    ]

    def __init__(self, title: str, question: str, choices: Sequence[DialogChoice]) -> None:
        super().__init__(title, question, "Enter chooses · Esc cancels")
        self._choices = tuple(choices)

    def compose_answers(self) -> ComposeResult:
        with Horizontal(id="buttons"):
            for choice in self._choices:
                variant = "error" if choice.danger else "default"
                yield Button(choice.label, id=f"choice-{choice.id}", variant=variant, compact=True)

    @on(Button.Pressed)
    def _pressed(self, event: Button.Pressed) -> None:
        self.dismiss((event.button.id or "").removeprefix("choice-"))


class ConfirmScreen(ChoiceScreen):
    """Ask before something irreversible; the safe answer has the focus. Returns "yes", "no" or None."""

    BINDINGS: ClassVar[list[BindingType]] = [("y", "dismiss('yes')", "yes"), ("n", "dismiss('no')", "no")]

    def __init__(self, title: str, question: str, yes: str = "Yes", no: str = "No", danger: bool = True) -> None:
        super().__init__(title, question, (DialogChoice("no", no), DialogChoice("yes", yes, danger)))


class AskTextScreen(Dialog[str | None], keys="dialog"):
    """Ask for a line of text, with `about` above it. Returns it stripped, or None."""

    AUTO_FOCUS = "Input"

    def __init__(self, title: str, value: str = "", max_length: int = 200, about: str = "") -> None:
        super().__init__(title, clean_line(about), "Enter saves · Esc cancels")
        self._value, self._max_length = value, max_length

    def compose_answers(self) -> ComposeResult:
        yield Input(self._value, max_length=self._max_length, compact=True)

    @on(Input.Submitted)
    def _submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip() or None)
