"""Tests keeping calls of tools out of streamed text."""

from __future__ import annotations

import pytest

from cpuchat.engine.text.reasoning import ReasoningSplitter
from cpuchat.engine.text.text_stream import CallSplitter
from cpuchat.protocol.messages import Tool
from cpuchat.tools.call_format import GENERIC, CallFormat

LOOK = Tool(name="look")
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
BARE = CallFormat(shape="object", arguments_key="parameters")
UNMARKED = '{\n  "name": "look",\n  "arguments": {\n    "at": "it"\n  }\n}'
OTHER = '{"name": "add", "arguments": {"a": 2}}'
ANNA = '{"name": "Anna", "arguments": {"for": 1}, "age": 30}'
BARE_CALL = '{"name": "look", "parameters": {"at": "it"}}'


def split(text: str, form: CallFormat = GENERIC, size: int = 3) -> tuple[str, str, list[str]]:
    """Return answer, reasoning and the names of calls, with `text` in pieces of this size."""
    splitter = CallSplitter(ReasoningSplitter(), form, [LOOK])
    pieces = [piece for at in range(0, len(text), size) for piece in splitter.feed(text[at : at + size])]
    pieces += splitter.flush()
    said = {channel: "".join(one for kind, one in pieces if kind == channel) for channel in ("answer", "reasoning")}
    return said["answer"], said["reasoning"], [call.name for call in splitter.calls]


@pytest.mark.parametrize(
    ("text", "form", "expected"),
    [
        (CALL, GENERIC, ("", "", ["look"])),
        (f"I look.\n{CALL}\n{CALL}", GENERIC, ("I look.\n", "", ["look", "look"])),
        (f"<think>Look? {CALL}</think>\n\n{CALL}", GENERIC, ("", f"Look? {CALL}", ["look"])),
        ("1 < 2, and <tool_cabinet>", GENERIC, ("1 < 2, and <tool_cabinet>", "", [])),
        (f"See {CALL[:30]}", GENERIC, (f"See {CALL[:30]}", "", [])),  # cut off
        ("It ends with <tool", GENERIC, ("It ends with <tool", "", [])),
        (BARE_CALL, BARE, ("", "", ["look"])),
        (f"Like {BARE_CALL}", BARE, (f"Like {BARE_CALL}", "", [])),
        (f"So:\n{BARE_CALL}", BARE, ("So:", "", ["look"])),
        ('So:\n{"name": "other"}', BARE, ('So:\n{"name": "other"}', "", [])),  # no tool
        ('{"answer": 1}', BARE, ('{"answer": 1}', "", [])),
        (f"<think>So {CALL}", GENERIC, ("", "So ", ["look"])),  # which ends the reasoning
        ("<think>So <tool_call> is it", GENERIC, ("", "So <tool_call> is it", [])),
        ("", BARE, ("", "", [])),
        # Without the marks of the template
        (f"```json\n{UNMARKED}\n```", GENERIC, ("", "", ["look"])),
        (f"{UNMARKED}\n{UNMARKED}\nI look.", GENERIC, ("\nI look.", "", ["look", "look"])),
        (f"```json\n{UNMARKED[:30]}", GENERIC, (f"```json\n{UNMARKED[:30]}", "", [])),  # cut off
        (f"So: {UNMARKED}", GENERIC, (f"So: {UNMARKED}", "", [])),
        ('```json\n{"name": "other"}\n```', GENERIC, ('```json\n{"name": "other"}\n```', "", [])),
        ("```python\nlook()\n```", GENERIC, ("```python\nlook()\n```", "", [])),
        (f"{{{UNMARKED}}}", GENERIC, ("", "", ["look"])),  # in two braces
        (f"```json\n{{{UNMARKED}}}\n```\nSo.", GENERIC, ("\nSo.", "", ["look"])),
        (f"{{{UNMARKED}\n", GENERIC, ("", "", ["look"])),
        (OTHER, GENERIC, ("", "", ["add"])),  # a tool that does not exist: the model is told so
        (f"```json\n{OTHER}\n```", GENERIC, ("", "", ["add"])),
        (ANNA, GENERIC, (ANNA, "", [])),
        (f"```json\n{ANNA}\n```", GENERIC, (f"```json\n{ANNA}\n```", "", [])),
        ('{{"a": 1}}', GENERIC, ('{{"a": 1}}', "", [])),
    ],
)
def test_calls_are_no_text(text: str, form: CallFormat, expected: tuple[str, str, list[str]]) -> None:
    for size in (1, 3, 1000):
        assert split(text, form, size) == expected, size


def test_text_before_a_call_is_not_held_back() -> None:
    splitter = CallSplitter(ReasoningSplitter(), GENERIC, [LOOK])
    assert "".join(text for _, text in splitter.feed("One two <to")) == "One two "
    assert CallSplitter(ReasoningSplitter(), GENERIC, [LOOK]).feed("```python\n") == [("answer", "```python\n")]
    assert splitter.feed("ol_call>") == []
