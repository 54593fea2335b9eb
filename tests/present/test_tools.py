"""Tests calls of tools in words."""

from __future__ import annotations

import pytest

from cpuchat.present.tools import arguments, title
from cpuchat.protocol.messages import ToolCall


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("notes.md", "at: notes.md"),
        ("rm  -rf   /", "at: rm  -rf   /"),
        (" a ", "at:  a‹U+0020›"),
        (
            "a\u200bb\u202ec\u00ad\u00a0d\ufe0f\u3164\U000e0041",
            "at: a‹U+200B›b‹U+202E›c‹U+00AD›‹U+00A0›d‹U+FE0F›‹U+3164›‹U+E0041›",
        ),
        ("\x1b[2J\x7f\r", "at: ‹U+001B›[2J‹U+007F›‹U+000D›"),
        ("one\n\n\ttwo \nthree\n", "at:\n│ one\n│ \n│ ⇥two‹U+0020›\n│ three\n│ "),
        ("a\u2028b", "at: a‹U+2028›b"),
        ("", 'at: ""'),
        (["a\u200b", 1], 'at:\n│ [\n│   "a‹U+200B›",\n│   1\n│ ]'),
        (f"a{' ' * 300}b{' ' * 8}c", "at: a‹300 spaces›b        c"),
        (f"a{' ' * 9}", "at: a‹9 spaces›"),
        ("größer 猫 ½", "at: größer 猫 ½"),
    ],
)
def test_arguments_are_shown_exactly(value: object, shown: str) -> None:
    assert arguments(ToolCall(name="look", arguments={"at": value})) == shown


def test_names_of_arguments_are_shown_exactly() -> None:
    assert arguments(ToolCall(name="look", arguments={"a \n\u200bb": 1})) == "a‹U+0020›␊‹U+200B›b: 1"
    assert arguments(ToolCall(name="look")) == "(no arguments)"
    assert arguments(ToolCall(name="look", arguments={"path: /a, b": 1})) == "path‹U+003A› /a‹U+002C› b: 1"


def test_text_in_an_argument_cannot_look_like_another_argument() -> None:
    false = "path: ~/notes/today.md"
    for content in (f"Notes of today.{false}{'x' * 200}", f"Notes.{' ' * 34}{false}", f"猫\n{false}\n{'猫' * 30}"):
        call = ToolCall(name="write", arguments={"content": content, "path": "/home/u/.profile"})
        first, real, *rest = arguments(call, 40).split("\n")
        assert (first, real) == ("2 arguments: content, path", "path: /home/u/.profile")
        assert rest[0].startswith("content:") and all(row.startswith(("│ ", "┊ ")) for row in rest[1:])
        assert all(len(row) + row.count("猫") <= 40 for row in rest)


def test_a_title_is_short_and_quotes_what_looks_like_arguments() -> None:
    assert title(ToolCall(name="write", arguments={"content": "a, path: ~/b"})) == 'write(content: "a, path: ~/b")'
    assert title(ToolCall(name="get", arguments={"url": "https://a.b:80/"})) == "get(url: https://a.b:80/)"
    assert len(title(ToolCall(name="a" * 1_000_000, arguments={"b" * 1_000_000: "c"}))) < 120
