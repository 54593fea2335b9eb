"""The prompt."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

from textual import events
from textual.actions import SkipAction
from textual.binding import BindingType
from textual.message import Message
from textual.widgets import TextArea

from cpuchat.tui import keys
from cpuchat.tui.widgets.graphemes import WORD_EDGES


class PromptInput(TextArea):
    """Text area in which Enter sends, Ctrl+J inserts a line break, and ↑/↓ at its edges go through sent messages."""

    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("prompt")

    class Scrolled(Message):
        """Scroll the chat by `pages`, to its start or end when infinite; negative is up."""

        def __init__(self, pages: float) -> None:
            super().__init__()
            self.pages = pages

    def __init__(self, submit: Callable[[str], None], *, id: str | None = None) -> None:
        """`submit` is called with what Enter sends, never blank; the prompt keeps the text until `accept`.

        It is a call and no message: what was typed right after Enter would get here before a message does."""
        super().__init__(id=id, soft_wrap=True, tab_behavior="focus", show_line_numbers=False, compact=True)
        self.highlight_cursor_line = False
        self._word_pattern = WORD_EDGES
        self._submit = submit
        self._history: list[str] = []
        self._position = 0  # into the history; its length means: what is being written
        self._draft = ""
        self.suggestions: tuple[str, ...] = ()
        """Put here by their numbers in an empty prompt; another key after one says that the digit was meant."""
        self.placed = ""
        """What `put` put here last: it was not typed."""
        self._steady = False
        self._suggested = ("", "")  # the digit, and what it put here

    def complete(self, sends: bool = False) -> bool:
        """Complete what is typed; False if there is nothing to complete, or if it is whole and to be sent (`sends`)."""
        return False

    def move_completion(self, step: int) -> bool:
        """Go to the next completion, or to the one before; False if there are none."""
        return False

    def fold(self, text: str) -> str:
        return text

    def recall(self) -> bool:
        """Put a text that is not sent yet here, for ↑ in an empty prompt; False if there is none."""
        return False

    async def _on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        self._paste(event.text)

    def action_paste(self) -> None:
        self._paste(self.app.clipboard)

    def _paste(self, text: str) -> None:
        if result := self._replace_via_keyboard(self.fold(text), *self.selection):
            self.move_cursor(result.end_location)
            self.focus()

    async def _on_key(self, event: events.Key) -> None:
        digit, text = self._suggested
        self._suggested = ("", "")
        if event.character and event.is_printable:
            number = int(event.character) if event.character in "123456789" else 0
            if digit and self.text == text:  # the digit was meant
                self.put(digit)
            elif not self.text and 0 < number <= len(self.suggestions):
                event.stop()
                event.prevent_default()
                self.suggest(number)
                return
        await super()._on_key(event)

    def suggest(self, number: int) -> None:
        self._suggested = str(number), self.suggestions[number - 1]
        self.put(self.suggestions[number - 1])

    def hold_cursor(self, still: bool) -> None:
        """Let the cursor blink, or not: each time costs a paint."""
        if still != self._steady:
            self._steady = still
            self._restart_blink()

    def _restart_blink(self) -> None:
        if self._steady:
            self._pause_blink(visible=self.has_focus)
        elif self.has_focus:
            super()._restart_blink()

    @property
    def draft(self) -> str:
        """Return the unsent text, also while ↑ shows a sent message instead; with that one if it was changed."""
        shown = self._history[self._position] if self._position < len(self._history) else ""
        return "\n".join(filter(None, (self._draft, self.text if self.text != shown else "")))

    def begin_chat(self, texts: list[str], draft: str) -> None:
        """Switch to another chat: `texts` are its sent messages, oldest first, `draft` its unsent text."""
        self._history = list(texts)
        self._position = len(self._history)
        self._draft = ""
        self.put(draft)

    def accept(self) -> None:
        text = self.text.strip()
        if text and self._history[-1:] != [text]:
            self._history.append(text)
        self._position = len(self._history)
        self._draft = ""
        self.clear()

    def put(self, text: str) -> None:
        self.placed = text
        self.load_text(text)
        self.move_cursor(self.document.end)

    def action_submit(self) -> None:
        if self.complete(sends=True):
            return
        if text := self.text.strip():
            self._submit(text)

    def action_complete(self) -> None:
        if not self.complete():
            raise SkipAction

    def action_newline(self) -> None:
        start, end = self.selection
        if self.text:  # no message begins with an empty line
            self._replace_via_keyboard("\n", start, end)

    # Keys that scroll: first in a message longer than its box, then the chat.

    def action_page(self, direction: int) -> None:
        before = self.cursor_location
        if self.virtual_size.height > self.content_size.height:
            (self.action_cursor_page_up if direction < 0 else self.action_cursor_page_down)()
        if self.cursor_location == before:
            self.post_message(self.Scrolled(direction))

    def action_edge(self, direction: int) -> None:
        edge = (0, 0) if direction < 0 else self.document.end
        if self.cursor_location == edge:
            self.post_message(self.Scrolled(direction * math.inf))
        else:
            self.move_cursor(edge)

    def action_older(self) -> None:
        if self.move_completion(-1) or (not self.text and self.recall()):
            return
        if self.selection.is_empty and self.navigator.is_first_wrapped_line(self.cursor_location):
            self._go(self._position - 1)
        else:
            self.action_cursor_up()

    def action_newer(self) -> None:
        if self.move_completion(1):
            return
        if self.selection.is_empty and self.navigator.is_last_wrapped_line(self.cursor_location):
            self._go(self._position + 1)
        else:
            self.action_cursor_down()

    def _go(self, position: int) -> None:
        if not 0 <= position <= len(self._history) or position == self._position:
            # Nothing further that way: behave as any text field at its edge.
            (self.action_cursor_line_start if position < 0 else self.action_cursor_line_end)()
            return
        draft = self.draft
        self._position = position
        is_draft = position == len(self._history)
        self._draft = "" if is_draft else draft
        self.put(draft if is_draft else self._history[position])
