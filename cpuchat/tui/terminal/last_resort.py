"""A screen after an internal error: what happened, what is saved, and a restart."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Label

from cpuchat.tui.terminal.crash import Crash
from cpuchat.tui.terminal.guarded import GuardedApp


class LastResort(GuardedApp[bool]):
    """Returns True to restart. A separate app, independent of what broke."""

    TITLE = "cpuchat"
    ENABLE_COMMAND_PALETTE = False
    AUTO_FOCUS = "#restart"
    # Its own, in the colors of the terminal: a theme or a style sheet may be what broke.
    CSS = """
    Screen { align: center middle; }
    #dialog { width: 76; max-width: 100%; height: auto; max-height: 100%; border: round $error; padding: 1 2; }
    Label { width: 100%; }
    #buttons { height: auto; margin-top: 1; }
    Button { margin-right: 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("r", "leave(True)", "restart"),
        ("q,escape", "leave(False)", "quit"),
        ("ctrl+q,ctrl+c", "leave(False)", "quit"),
        ("left,right", "app.focus_next", "other"),
    ]

    def __init__(self, crash: Crash, saved: bool) -> None:
        super().__init__()
        self._what = crash
        self._saved = saved

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as dialog:
            dialog.border_title = "cpuchat stopped on an internal error"
            yield Label(self._what.what, markup=False)
            yield Label(words(self._saved), markup=False)
            yield Label(self._what.log_words, markup=False)
            with Horizontal(id="buttons"):
                yield Button("Restart", id="restart", variant="primary", compact=True)
                yield Button("Quit", id="quit", compact=True)

    @on(Button.Pressed)
    def _pressed(self, event: Button.Pressed) -> None:
        self.exit(event.button.id == "restart")

    def action_leave(self, restart: bool) -> None:
        self.exit(restart)


def words(saved: bool) -> str:
    """Return what happened to the chat."""
    if saved:
        return "Your chat is saved. Restart starts the worker again and reopens the chat."
    return "The last answer may be incomplete on disk. Restart reopens the chat as it was saved."
