"""Tests that calls are read as llama.cpp's own parser reads them, in the forms of the templates that it comes with, and
while they are written: the pieces are the arguments that the whole text has.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from cpuchat.engine.text.reasoning import ReasoningSplitter
from cpuchat.engine.text.text_stream import CallSplitter
from cpuchat.protocol.messages import Tool
from cpuchat.tools.call_format import GENERIC
from cpuchat.tools.call_parser import parse_calls
from cpuchat.tools.call_stream import CallPiece, CallReader
from tests.tools.llama_calls import learned, read, recording, same

OTHERWISE = {"muse-glimmer": 1}
"""How many answers of a template are read otherwise. Muse Glimmer: a call in a second message, behind text."""

NO_CALLS = ('Like {"a": {"b": 1}}, or <b>[x](y="z")</b>: f(x=1).', '{"answer": {"a": 1}}', "[f, g](x=1)\n<a href=b>")


@pytest.mark.parametrize("name", recording().templates)
def test_calls_are_read_as_llama_cpp_reads_them(name: str) -> None:
    recorded = recording().templates[name]
    form = learned(name)
    assert form is not GENERIC
    for text in NO_CALLS:
        assert parse_calls(form, text) == (text, [])
    readings = [(read(form, recorded, one, recording().tools[one.tools]), one) for one in recorded.outputs]
    others = [(found, output) for found, output in readings if not same(found, output)]
    assert len(others) == OTHERWISE.get(name, 0), others


def test_the_recording_is_of_many_templates_and_whole_calls() -> None:
    with_calls = [one for one in recording().templates.values() if any(out.expected.calls for out in one.outputs)]
    assert len(with_calls) >= 50
    assert sum(bool(out.expected.calls) for one in with_calls for out in one.outputs) >= 600


def test_values_in_values_without_end_are_no_call() -> None:
    form = learned("MiniMax-M3")
    text = f"{form.section}{form.opening}f{form.middle}{'[<a>]<]minimax[>' * 10_000}"
    assert parse_calls(form, text) == (text, [])


def joined(pieces: Sequence[CallPiece]) -> list[tuple[str, str]]:
    told: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.index == len(told):
            told.append((piece.name, ""))
        told[piece.index] = (piece.name, told[piece.index][1] + piece.text)
    return told


def test_pieces_come_while_the_arguments_are_written() -> None:
    reader = CallReader(learned("Qwen-Qwen3-0.6B"), [Tool(name="look")])
    text = '<tool_call>\n{"name": "look", "arguments": {"at": "' + "x" * 100
    pieces = list[CallPiece]()
    for character in text:
        reader.feed(character)
        pieces += reader.take()
    assert len(pieces) > 100 and joined(pieces) == [("look", text.partition('arguments": ')[2])]


@pytest.mark.parametrize("name", recording().templates)
def test_recorded_answers_are_read_as_their_whole_text_is(name: str) -> None:
    recorded = recording().templates[name]
    for number, one in enumerate(recorded.outputs):
        step = (1, 3, 1000)[number % 3]
        splitter = ReasoningSplitter(one.tail, recorded.hints)
        calls = CallSplitter(splitter, learned(name), recording().tools[one.tools], streams=True)
        for at in range(0, len(one.text), step):
            calls.feed(one.text[at : at + step])
        calls.flush()
        told = joined(calls.pieces)[: len(calls.calls)]
        assert [(name, json.loads(text)) for name, text in told] == [(c.name, c.arguments) for c in calls.calls], one
