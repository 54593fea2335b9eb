"""Tests calls of tools in words."""

from __future__ import annotations

import pytest

from cpuchat.present.tools import arguments
from cpuchat.tool_calls import ToolCall


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
        ("one\n\n\ttwo \nthree\n", "at:\n  one\n  \n  ⇥two‹U+0020›\n  three\n  "),
        ("a\u2028b", "at: a‹U+2028›b"),
        ("", 'at: ""'),
        (["a\u200b", 1], 'at:\n  [\n    "a‹U+200B›",\n    1\n  ]'),
        ("größer 猫 ½", "at: größer 猫 ½"),
    ],
)
def test_arguments_are_shown_exactly(value: object, shown: str) -> None:
    assert arguments(ToolCall(name="look", arguments={"at": value})) == shown


def test_names_of_arguments_are_shown_exactly() -> None:
    assert arguments(ToolCall(name="look", arguments={"a \n\u200bb": 1})) == "a‹U+0020›␊‹U+200B›b: 1"
    assert arguments(ToolCall(name="look")) == "(no arguments)"
