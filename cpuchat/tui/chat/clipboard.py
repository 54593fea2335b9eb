"""Copies the answer, or its code blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textual.app import App

from cpuchat.base.text import clean_line
from cpuchat.telemetry.units import plural
from cpuchat.tui.markdown.rows import CodeBlock
from cpuchat.tui.markdown.transcript import Transcript


class Clipboard:
    """Copies text to the terminal's clipboard (OSC 52) and reports it with `tell`."""

    def __init__(self, app: App[Any], transcript: Transcript, tell: Callable[[str], None]) -> None:
        self._app = app
        self._transcript = transcript
        self._tell = tell
        self._next_block = 0

    def start_over(self) -> None:
        """Begin with the last code block again."""
        self._next_block = 0

    def copy_answer(self) -> None:
        """Copy the selected message, or the last answer, as Markdown."""
        self._copy_message(self._transcript.current_message_text())

    def copy_plain(self) -> None:
        """Copy the same as it is shown."""
        self._copy_message(self._transcript.current_message_text(plain=True))

    def _copy_message(self, text: str) -> None:
        if text:
            self._copy(text, plural(len(text), "character"))
        else:
            self._tell("No answer to copy yet.")

    def copy_code(self) -> None:
        """Copy the last code block of the selected message or the last answer; called again, the one before."""
        blocks = self._transcript.code_blocks()
        if not blocks:
            self._tell("No code block to copy.")
            return
        index = len(blocks) - 1 - self._next_block % len(blocks)
        self._next_block += 1
        which = f" (block {index + 1} of {len(blocks)})" if len(blocks) > 1 else ""
        self.copy_block(blocks[index], which)

    def copy_block(self, block: CodeBlock, which: str = "") -> None:
        n_lines = plural(block.text.count("\n") + 1, "line")
        self._copy(block.text, f"{n_lines} of {clean_line(block.language) or 'code'}{which}")

    def _copy(self, text: str, what: str) -> None:
        self._app.copy_to_clipboard(text)
        self._tell(getattr(self._app, "clipboard_problem", "") or f"Copied {what}.")
