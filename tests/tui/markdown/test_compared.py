"""Tests that words that differ from another answer are marked, in Markdown too."""

from __future__ import annotations

import pytest

from cpuchat.tui.markdown.message_view import TranscriptMessage, View, message_lines
from cpuchat.tui.markdown.rows import Line, TextStyles

VIEW = View(60, TextStyles())


def lines(content: str, other: str | None) -> list[Line]:
    return message_lines(TranscriptMessage("assistant", "A", content, other=other), VIEW)


def underlined(found: list[Line]) -> str:
    return "".join(s.text for line in found[1:] for s in line.segments if s.style and s.style.underline)


def text(found: list[Line]) -> str:
    return " ".join(" ".join(line.text for line in found).split())


def test_the_first_difference_has_a_mark_and_later_ones_are_underlined() -> None:
    found = lines("The answer is **forty two**, not more.", "The answer is **forty one**, not less.")
    assert text(found) == "A The answer is forty ▸two, not more."
    assert underlined(found) == "▸two,more."


def test_what_only_moved_is_not_marked() -> None:
    assert underlined(lines("One new two three.", "One two three.")) == "▸new"
    assert underlined(lines("One two three.", "One new two three.")) == "▸two"


@pytest.mark.parametrize("other", [None, "Just *the* same.", "Just *the* same. And more."])
def test_a_text_that_is_no_different_is_not_marked(other: str | None) -> None:
    assert underlined(lines("Just *the* same.", other)) == ""


def test_bullets_and_code_are_compared_as_they_are_seen() -> None:
    found = lines("- one\n- two\n\n```python\nx = 1\n```\n", "- one\n- deux\n\n```python\nx = 2\n```\n")
    assert underlined(found) == "▸two1"


def test_a_mark_does_not_widen_a_full_line() -> None:
    words = "abcdefghi " * 40
    for line in lines(words + "end", words + "other end"):
        assert len(line.text) <= VIEW.width
