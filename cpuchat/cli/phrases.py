"""Prints an answer phrase by phrase, for screen readers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cpuchat.text import clean_line

if TYPE_CHECKING:
    from cpuchat.cli.terminal import Terminal

_LONGEST_PHRASE = 240
_PHRASE = re.compile(r"\n|[.!?:;…][\"')\]”’*_]*\s|[。！？]")


class Phrases:
    """Prints an answer and its reasoning in sentences and lines: from single words, a screen reader makes
    stammering.
    """

    def __init__(self, terminal: Terminal, name: str, show_reasoning: bool, hint: str = "") -> None:
        """`hint` is printed when the model begins to reason."""
        self._terminal, self._name, self._shows = terminal, clean_line(name) or "Answer", show_reasoning
        self._hint = hint
        self._waiting = self._thought = ""
        self._begun = self._reasoned = False

    @property
    def is_reasoning(self) -> bool:
        """Return whether the model reasons now."""
        return self._reasoned and not (self._begun or self._waiting)

    def answer(self, text: str) -> None:
        self._end_reasoning()
        self._waiting += text
        self._print(_end_of_phrase(self._waiting))

    def reasoning(self, text: str) -> None:
        if not self._reasoned:
            self._terminal.note(f"The model is reasoning. {self._hint}".rstrip())
        self._reasoned = True
        if self._shows:
            self._thought += text
            end = _end_of_phrase(self._thought)
            self._terminal.reasoning(self._thought[:end])
            self._thought = self._thought[end:]

    def finish(self) -> None:
        """Print the rest."""
        self._end_reasoning()
        self._print(len(self._waiting))

    def _end_reasoning(self) -> None:
        self._terminal.reasoning(self._thought)
        self._thought = ""

    def _print(self, end: int) -> None:
        phrase, self._waiting = self._waiting[:end], self._waiting[end:]
        if phrase:
            self._terminal.answer(phrase if self._begun else f"{self._name}: {phrase.lstrip()}")
            self._begun = True


def _end_of_phrase(text: str) -> int:
    """Return where the last whole phrase ends, 0 without one; a very long one ends at a space."""
    end = max((found.end() for found in _PHRASE.finditer(text)), default=0)
    if not end and len(text) > _LONGEST_PHRASE:
        end = text.rfind(" ") + 1 or len(text)
    return end
