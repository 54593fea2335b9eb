"""Tests reading calls while they are written: the pieces are the arguments that the whole text has."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from cpuchat.engine.text.reasoning import ReasoningSplitter
from cpuchat.engine.text.text_stream import CallSplitter
from cpuchat.protocol.messages import Tool
from cpuchat.tools.call_stream import CallPiece, CallReader
from tests.tools.llama_calls import learned, recording


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
