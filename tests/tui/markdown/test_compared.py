"""Tests that words that differ from another answer are marked, in Markdown too."""

from __future__ import annotations

import pytest

from cpuchat.tui.markdown.message_view import TranscriptMessage, View
from cpuchat.tui.markdown.rows import TextStyles
from tests.tui.markdown.rendered import message_lines

VIEW = View(60, TextStyles())


def marked(content: str, other: str | None) -> str:
    found = message_lines(TranscriptMessage("assistant", "A", content, other=other), VIEW)
    return "".join(s.text for line in found[1:] for s in line.segments if s.style and s.style.underline)


@pytest.mark.parametrize(
    ("content", "other", "words"),
    [
        ("The answer is **forty two**, not more.", "The answer is **forty one**, not less.", "two,more."),
        ("One new two three.", "One two three.", "new"),  # what only moved is not marked
        ("One two three.", "One new two three.", "two"),
        ("- one\n- two\n\n```python\nx = 1\n```\n", "- one\n- deux\n\n```python\nx = 2\n```\n", "two1"),
        ("Just *the* same.", None, ""),
        ("Just *the* same.", "Just *the* same.", ""),
        ("Just *the* same.", "Just *the* same. And more.", ""),
    ],
)
def test_the_first_difference_and_later_ones_are_marked(content: str, other: str | None, words: str) -> None:
    assert marked(content, other) == words
