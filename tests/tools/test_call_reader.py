"""Tests reading calls while they are written: the pieces are the arguments that the whole text has."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from cpuchat.engine.prompt.chat_template import ChatTemplate
from cpuchat.engine.text.reasoning import ReasoningSplitter
from cpuchat.engine.text.text_stream import CallSplitter
from cpuchat.protocol.messages import Tool
from cpuchat.tools.call_format import CallFormat
from cpuchat.tools.call_parser import parse_calls
from cpuchat.tools.call_stream import CallPiece, CallReader
from tests.tools.llama_calls import RecordedHelper, recording
from tests.tools.templates import TEMPLATES
from tests.tools.test_call_format import ARGUMENTS, NOTHING, WEATHER, learned, written

PLAIN = {"city": "Bern", "days": -12, "exact": False}


def streamed(form: CallFormat, text: str, tools: Sequence[Tool], step: int = 1) -> tuple[list, list[tuple], int]:
    """Return the calls of a text by its pieces and by its end, and how many pieces came before the end."""
    reader = CallReader(form, tools)
    begin = max(form.find(text, [tool.name for tool in tools]), 0)
    pieces = []
    for at in range(begin, len(text), step):
        reader.feed(text[at : at + step])
        pieces += reader.take()
    early = len(pieces)
    calls, _ = reader.finish(parse_calls(form, text, tools)[1])
    pieces += reader.take()
    told = [(name, json.loads(text)) for name, text in joined(pieces)]
    return told, [(one.name, one.arguments) for one in calls], early


def joined(pieces: Sequence[CallPiece]) -> list[tuple[str, str]]:
    told: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.index == len(told):
            told.append((piece.name, ""))
        told[piece.index] = (piece.name, told[piece.index][1] + piece.text)
    return told


@pytest.mark.parametrize("name", TEMPLATES)
def test_pieces_together_are_the_arguments(name: str) -> None:
    form, tools = learned(name), [WEATHER, NOTHING]
    calls = [("get_weather", ARGUMENTS), ("list-files", {}), ("get_weather", PLAIN)]
    for made in ([calls[0]], [calls[1]], calls if name != "llama-3" else calls[2:]):
        for step in (1, 5, 1000):
            told, found, early = streamed(form, written(name, *made), tools, step)
            assert told == found == made, step
            assert early >= len(made) - 1 - (form.shape == "pairs" and not form.closing.strip()), step


def test_pieces_come_while_the_arguments_are_written() -> None:
    text = written("hermes", ("get_weather", {"city": "x" * 100}))
    assert streamed(learned("hermes"), text, [WEATHER])[2] > 50


@pytest.mark.parametrize("name", recording().templates)
def test_recorded_answers_are_read_as_their_whole_text_is(name: str) -> None:
    recorded = recording().templates[name]
    form = ChatTemplate(RecordedHelper(recorded), "", "").call_format
    for one in recorded.outputs:
        splitter = ReasoningSplitter(one.tail, recorded.hints)
        calls = CallSplitter(splitter, form, recording().tools[one.tools], streams=True)
        for at in range(0, len(one.text), 3):
            calls.feed(one.text[at : at + 3])
        calls.flush()
        told = joined(calls.pieces)[: len(calls.calls)]
        assert [(name, json.loads(text)) for name, text in told] == [(c.name, c.arguments) for c in calls.calls], one
