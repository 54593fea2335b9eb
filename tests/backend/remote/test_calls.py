"""Tests calls of tools as servers send and take them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from cpuchat.backend.remote.stream import CallParts
from cpuchat.protocol.messages import ToolCall

LOOK = ToolCall(name="look", arguments={"at": "ü"}, id="a1")
STOP = ToolCall(name="stop", id="a2")


def part(index: int | None, arguments: Any, name: str = "", id: str = "") -> dict[str, Any]:
    """Return one entry of `tool_calls` in a delta."""
    found: dict[str, Any] = {"id": id, "function": {"name": name, "arguments": arguments}}
    return found if index is None else {**found, "index": index}


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([[part(0, "", "look", "a1")], [part(0, '{"at": ')], [part(0, '"ü"}')]], [LOOK]),  # OpenAI's
        ([[part(0, '{"at": "ü"}', "look", "a1"), part(1, "{}", "stop", "a2")]], [LOOK, STOP]),
        ([[part(None, {"at": "ü"}, "look", "a1")], [part(None, {}, "stop", "a2")]], [LOOK, STOP]),
        ([[part(0, "", "stop", "a2")]], [STOP]),
        ([[part(None, "", "look", "a1")], [part(None, '{"at": "ü"}')], [part(None, "", "stop", "a2")]], [LOOK, STOP]),
        ([[part(0, "", "look", "a1")], [part(0, '{"at": "ü"}')], [part(0, "", "stop", "a2")]], [LOOK, STOP]),
        ([[part(0, '{"at": "ü"}', "look")], [part(0, "{}", "stop")]], [replace(LOOK, id=""), replace(STOP, id="")]),
        ([[part(0, '{"at": ', "look", "a1")], [part(0, '"ü"}', "look", "a1")]], [LOOK]),  # the name again
        ([[part(0, '{"at": ', "look", "a1")], [part(0, '"ü"}', id="other")]], [LOOK]),
        ([[part(0, "", "stop", "a2"), part(1, "", "look", "a1")], [part(1, '{"at": "ü"}')]], [STOP, LOOK]),
        ([[part(0, json.dumps('{"at": "ü"}'), "look", "a1")]], [LOOK]),  # encoded twice
        ([[part(0, '{"at": "a\nb"}', "f")]], [ToolCall(name="f", arguments={"at": "a\nb"})]),
        ([[part(0, '{"at', "f")]], [ToolCall(name="f", problem="The arguments are not valid JSON.")]),
        ([[part(0, "[1]", "f")]], [ToolCall(name="f", problem="The arguments are not a JSON object.")]),
        ([None, "x", [7, {}, {"function": 1}, part(0, "{}")]], []),
    ],
)  # fmt: skip
def test_parts_make_calls(sent: list[Any], expected: list[ToolCall]) -> None:
    parts = CallParts()
    for one in sent:
        parts.add(one)
    assert list(parts.calls()) == expected


def test_a_server_that_sends_calls_without_end_is_cut_off() -> None:
    parts = CallParts()
    for index in range(200):
        parts.add([part(index, "{}", f"f{index}")])
    assert len(parts.calls()) == 64
