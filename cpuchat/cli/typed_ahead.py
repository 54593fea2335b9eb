"""Reads what is typed on the terminal while an answer is written."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator

from cpuchat.cli.terminal import is_terminal


class TypedAhead:
    """`lines` are those with a text; `ended` that Ctrl+D was pressed. `on_empty` is called with each empty line."""

    def __init__(self, on_empty: Callable[[], None]) -> None:
        self.lines: deque[str] = deque()
        self.ended = False
        self._on_empty = on_empty
        self._asked: asyncio.Future[str] | None = None

    async def line(self) -> str:
        """Return the next line, "" at the end of the input: the answer to a question. Use while `reading`."""
        self._asked = asyncio.get_running_loop().create_future()
        try:
            return "" if self.ended else await self._asked
        finally:
            self._asked = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Read meanwhile, if standard input is a terminal: a pipe has the next messages. Use from the event loop."""
        if not is_terminal(sys.stdin):
            yield
            return
        loop, terminal = asyncio.get_running_loop(), sys.stdin.fileno()
        loop.add_reader(terminal, self._read, terminal)
        try:
            yield
        finally:
            loop.remove_reader(terminal)

    def _read(self, terminal: int) -> None:
        try:
            found = os.read(terminal, 1 << 16)
        except OSError:  # hung up
            found = b""
        if not found:
            self.ended = True
            asyncio.get_running_loop().remove_reader(terminal)
        for line in found.decode("utf-8", "surrogateescape").splitlines() or [""] * self.ended:
            if self._asked is not None and not self._asked.done():
                self._asked.set_result(line)
            elif line.strip():
                self.lines.append(line)
            elif not self.ended:
                self._on_empty()
