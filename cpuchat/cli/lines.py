"""Reads the lines of a chat: those that are typed now, and those that were typed during an answer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import Iterator

from cpuchat.base.errors import UsageError
from cpuchat.base.text import clean_line
from cpuchat.cli.terminal import TerminalOutput, is_terminal

MANY_LINES = '"""'
"""On a line before and after a message of many lines."""


class Lines:
    """`typed` are lines with a text from before; `ended`: Ctrl+D was pressed."""

    def __init__(self, terminal: TerminalOutput) -> None:
        self.typed: deque[str] = deque()
        self.ended = False
        self._terminal = terminal
        self._asked: asyncio.Future[str] | None = None

    def next_message(self) -> str | None:
        """Return the next message or command; None to quit: at the end of the input, or by Ctrl+C twice."""
        for is_pressed in (False, True):
            try:
                text, lines = self._line("You: "), list[str]()
                if text.strip() != MANY_LINES:
                    return text
                with contextlib.suppress(EOFError):
                    while (line := self._line("")).strip() != MANY_LINES:
                        lines.append(line)
                return "\n".join(lines)
            except EOFError:
                return None
            except KeyboardInterrupt:
                if not is_pressed:
                    self._terminal.line()
                    self._terminal.note("Ctrl+C again, or Ctrl+D, quits.")
        return None

    def _line(self, prompt: str) -> str:
        """Return the next line. Raises EOFError, KeyboardInterrupt, UsageError."""
        if self.typed:
            text = self.typed.popleft()
            self._terminal.note(f"{prompt}{clean_line(text)}")
            return text
        if self.ended:
            raise EOFError
        try:
            if is_terminal(sys.stdin):
                with contextlib.suppress(ImportError):
                    import readline  # noqa: F401 - history, and longer lines than a terminal passes on
            text = input(prompt if is_terminal(sys.stdin) else "")
            text.encode()
        except UnicodeError:
            raise UsageError("Standard input is not valid UTF-8 text.", "Convert it, for example with iconv.") from None
        return text

    async def reply(self) -> str:
        """Return the next line, "" at the end of the input: the answer to a question. Use while `reading`."""
        self._asked = asyncio.get_running_loop().create_future()
        return "" if self.ended else await self._asked

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read meanwhile, if standard input is a terminal: a pipe has the next messages. Use from the event loop."""
        if not is_terminal(sys.stdin):
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin, self._read)
        try:
            yield
        finally:
            loop.remove_reader(sys.stdin)

    def _read(self) -> None:
        try:
            found = os.read(sys.stdin.fileno(), 1 << 16)
        except OSError:  # hung up
            found = b""
        if not found:
            self.ended = True
            asyncio.get_running_loop().remove_reader(sys.stdin)
        for line in found.decode("utf-8", "surrogateescape").splitlines() or [""] * self.ended:
            if self._asked is not None and not self._asked.done():
                self._asked.set_result(line)
            elif line.strip():
                self.typed.append(line)
