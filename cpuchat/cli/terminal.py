"""Prints answers to stdout and everything about them to stderr."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence

import click

from cpuchat.base.text import clean, clean_line
from cpuchat.cli.output import OutputClosed, cleaned, is_terminal
from cpuchat.present.answers import SERVER_PHASES, load_progress, prefill_progress
from cpuchat.present.table import table
from cpuchat.protocol.messages import LoadProgress, PrefillProgress

_SAY_SECONDS = 5.0


class TerminalOutput:
    """Writes the answer to stdout as it comes; notes, progress and reasoning to stderr.

    All of it is cleaned of what a terminal would act on, into pipes and files too. `quiet` leaves only answers and
    errors. `moves`: whether `status` can show a line. `plain`: nothing is styled or replaced; what takes long is said
    every few seconds."""

    def __init__(self, *, quiet: bool = False, show_reasoning: bool = False, plain: bool = False) -> None:
        self._out = cleaned(sys.stdout)
        self._err = cleaned(sys.stderr)
        self._out_tty = is_terminal(sys.stdout)
        self._err_tty = is_terminal(sys.stderr)
        self._quiet = quiet
        self._reasoning = show_reasoning or (self._err_tty and not quiet and not plain)
        dumb = os.environ.get("TERM", "dumb") == "dumb"
        self._plain = plain
        self._said_at = 0.0
        self.moves = self._err_tty and not dumb and not plain
        self._styled = self.moves and not os.environ.get("NO_COLOR")
        self._shows_status = False  # a line that the next output replaces
        self._out_open_line = False
        self._err_open_line = False
        self._reasoning_last = False

    def answer(self, text: str) -> None:
        """Print a piece of the answer now. Raises OutputClosed: the reader of stdout is gone; OutputFailed: stdout
        cannot be written (disk full)."""
        if not text:
            return
        self.clear_progress()
        if self._reasoning_last:
            self._write_err("\n\n" if self._err_open_line else "\n")
            self._err_open_line = self._reasoning_last = False
        self._write_out(text)
        self._out_open_line = not text.endswith("\n")

    def reasoning(self, text: str) -> None:
        """Print a piece of the reasoning, dimmed, if requested."""
        if not text or not self._reasoning:
            return
        self.clear_progress()
        self.end_answer()
        if self._styled:
            self._write_err("\x1b[2m", raw=True)
        self._write_err(text)
        if self._styled:
            self._write_err("\x1b[22m", raw=True)
        self._err_open_line = not text.endswith("\n")
        self._reasoning_last = True

    def end_answer(self) -> None:
        """Finish the last line of the answer."""
        if self._out_open_line:
            self._write_out("\n")
            self._out_open_line = False

    def line(self, text: str = "") -> None:
        """Print one line of our own on stdout."""
        self.clear_progress()
        self._write_out(text + "\n")

    def note(self, text: str) -> None:
        """Print one line on stderr, unless quiet."""
        if not self._quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Print one line on stderr, quiet or not."""
        self.clear_progress()
        if self._out_tty:
            self.end_answer()
        if self._err_open_line:
            self._write_err("\n")
            self._err_open_line = False
        self._reasoning_last = False
        self._write_err(text + "\n")

    def progress(self, event: LoadProgress | PrefillProgress, left_s: float | None = None) -> None:
        """Show the progress of a load or prompt, `left_s` left, on a line that is replaced; terminals only."""
        if isinstance(event, PrefillProgress):
            return self.status(prefill_progress(event, left_s))
        name = "the server" if event.phase in SERVER_PHASES else "the model"
        return self.status(load_progress(name, event))

    def status(self, text: str) -> None:
        """Show a line on stderr that the next output replaces; terminals only."""
        if self._plain and time.monotonic() - self._said_at >= _SAY_SECONDS:
            self.begin_waiting()
            self.warn(text)
        if self._quiet or not self.moves:
            return
        width = shutil.get_terminal_size().columns - 1
        self._write_err("\r\x1b[2K", raw=True)
        self._write_err(clean(text).replace("\n", " ")[:width])
        self._shows_status = True

    def begin_waiting(self) -> None:
        """Count from now until a plain terminal says how far something is."""
        self._said_at = time.monotonic()

    def clear_progress(self) -> None:
        if self._shows_status:
            self._write_err("\r\x1b[2K", raw=True)
            self._shows_status = False

    def _write_out(self, text: str) -> None:
        if self._out is None:
            raise OutputClosed
        try:
            self._out.write(text)
            self._out.flush()
        except BrokenPipeError:
            raise OutputClosed from None

    def _write_err(self, text: str, *, raw: bool = False) -> None:
        if self._err is None:
            return
        try:
            (self._err.write_raw if raw else self._err.write)(text)
            self._err.flush()
        except OSError:
            self._err = None  # stderr is closed; the answer still counts


def paragraph(text: str, first: str = "", rest: str = "") -> list[str]:
    """Wrap `text` to the terminal, at most 100 characters; `first` and `rest` are prefixes."""
    return textwrap.wrap(text, columns(), initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def echo_paragraph(text: str, first: str = "", rest: str = "", *, err: bool = False) -> None:
    """Print `text` as `paragraph` wraps it; `err`: on stderr, as what explains a table."""
    for line in paragraph(text, first, rest):
        click.echo(line, err=err)


def echo_table(rows: Sequence[Sequence[str]], right: Sequence[int] = (), drop: Sequence[int] = ()) -> None:
    """Print `rows` as `present.table` aligns them; on a terminal without the first of `drop` that it is too narrow
    for."""
    width = shutil.get_terminal_size((0, 24)).columns if sys.stdout.isatty() else 0
    for line in table(rows, right, width, drop):
        click.echo(line)


def columns() -> int:
    """Return the width for text: that of the terminal, from 40 to 100 characters; 100 without one."""
    return max(40, min(shutil.get_terminal_size((100, 24)).columns, 100))


_LONGEST_PHRASE = 240
_PHRASE = re.compile(r"\n|[.!?:;…][\"')\]”’*_]*\s|[。！？]")


class Phrases:
    """Prints an answer and its reasoning in sentences: from single words, a screen reader makes stammering."""

    def __init__(self, terminal: TerminalOutput, name: str) -> None:
        self._terminal = terminal
        self._begin = f"{clean_line(name) or 'Answer'}: "
        self._waiting = self._thought = ""
        self._has_reasoned = False

    def answer(self, text: str) -> None:
        self._print_thought(len(self._thought))
        self._waiting += text
        self._print(_end_of_phrase(self._waiting))

    def reasoning(self, text: str) -> None:
        if not self._has_reasoned:
            self._terminal.note("The model is reasoning.")
        self._has_reasoned = True
        self._thought += text
        self._print_thought(_end_of_phrase(self._thought))

    def finish(self) -> None:
        """Print the rest, and end its line."""
        self._print_thought(len(self._thought))
        self._print(len(self._waiting))
        self._terminal.end_answer()

    def _print_thought(self, end: int) -> None:
        phrase, self._thought = self._thought[:end], self._thought[end:]
        self._terminal.reasoning(phrase)

    def _print(self, end: int) -> None:
        phrase, self._waiting = self._waiting[:end], self._waiting[end:]
        if phrase:
            self._terminal.answer(f"{self._begin}{phrase.lstrip()}" if self._begin else phrase)
            self._begin = ""


def _end_of_phrase(text: str) -> int:
    """Return where the last whole phrase ends, 0 without one; a very long one ends at a space."""
    end = max((found.end() for found in _PHRASE.finditer(text)), default=0)
    if not end and len(text) > _LONGEST_PHRASE:
        end = text.rfind(" ") + 1 or len(text)
    return end
