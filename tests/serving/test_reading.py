"""Tests that any body is read or refused, in every field of all dialects, in steps that grow no faster than it."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cpuchat.config.settings import Settings
from cpuchat.protocol.messages import Speculation
from cpuchat.serving import app
from cpuchat.serving.errors import Refusal
from cpuchat.serving.requests import RequestReader
from cpuchat.serving.service import InferenceService
from tests.support.scripted_backend import WITH_DRAFT


def reader(n_ctx: int = 4096) -> RequestReader:
    """Return what reads requests for a model that is called tiny."""
    conversation: Any = SimpleNamespace(in_effect=Settings(), speculation=Speculation())
    service = InferenceService(conversation, aliases=("tiny",))
    service.loaded(msgspec.structs.replace(WITH_DRAFT, n_ctx=n_ctx, fills_in=True))
    return service.reader


READER = reader()
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "enum": ["x"]}}, "required": ["a"]}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA, "strict": False}
SHARED = {
    "model": "tiny", "stream": False, "seed": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1,
    "repeat_penalty": 1.1, "cache_salt": "s",
}  # fmt: skip
OPENAI = {
    "stream_options": {"include_usage": True}, "max_tokens": 5, "n": 1,
    "ignore_eos": False, "reasoning_budget_tokens": 10, "timings_per_token": True,
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        **SHARED, **OPENAI,
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "reasoning_content": "r",
             "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{\"a\": 1}"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "found"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "parallel_tool_calls": True, "logprobs": False, "functions": [], "modalities": ["text"],
        "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}, "stop": ["x"],
    },
    "completions": {
        **SHARED, **OPENAI, "prompt": ["Hi"], "stop": "x", "best_of": 1, "echo": False, "suffix": "",
    },
    "infill": {
        **SHARED, "input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c", "filename": "d"}],
        "prompt": "e", "n_predict": 5, "n_indent": 2, "t_max_predict_ms": 100, "stop": ["x"],
        "response_fields": ["content"], "lora": [], "grammar": "", "json_schema": {},
    },
    "responses": {
        **SHARED,
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "t"}],
             "summary": [{"type": "summary_text", "text": "s"}]},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "output_text", "text": "o"}]},
        ],
        "instructions": "Be brief.", "max_output_tokens": 5, "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "look"}, "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "metadata": {"k": "v"},
        "store": False, "truncation": "disabled",
    },
    "messages": {
        **SHARED,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "t", "signature": "x"}, {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": "x"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "f"}],
                 "is_error": False}]},
        ],
        "max_tokens": 5, "stop_sequences": ["x"], "tools": [{"name": "look", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 10},
    },
}  # fmt: skip
"""Bodies with every field that is read, by dialect."""


def nested(depth: int, kind: str = "list") -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"type": value}
    return value


ODD: tuple[Any, ...] = (
    None, True, -1, 7, 1 << 63, -(1 << 70), 10**400, 1.5, 1e308, "", "\ud83d", "x" * 300, "\x00\x1b[2J", [], [None],
    [[]], ["x"], [True, "x", None], ["\ud83d"], {}, {"type": None}, {"type": "text"}, {"type": "text", "text": 1},
    {"type": ["text"]}, {"\ud83d": 1}, nested(50), nested(900), nested(300, "dict"), nested(900, "dict"),
)  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where each value of a body is."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield (*at, key)
        yield from places(one, (*at, key))


def changed(body: dict[str, Any], at: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return a body with another value in one place."""
    found = copy.deepcopy(body)
    inside: Any = found
    for key in at[:-1]:
        inside = inside[key]
    inside[at[-1]] = value
    return found


def read(dialect: str, data: bytes) -> str:
    """Return what becomes of a body: "read", so that it can be sent to the worker, or the code of its refusal."""
    try:
        assert msgspec.msgpack.encode(app.DIALECTS[dialect][1](READER, data).request)
    except Refusal as refusal:
        assert 400 <= refusal.status < 500
        assert refusal.response(path="/v1/messages").body and json.loads(refusal.body)["error"]["message"]
        return refusal.code
    return "read"


@pytest.mark.parametrize("dialect", BODIES)
def test_a_field_of_any_type_is_read_or_refused(dialect: str) -> None:
    body = BODIES[dialect]
    assert read(dialect, json.dumps(body).encode()) == "read"
    for at in places(body):
        for value in ODD:
            data = json.dumps(changed(body, at, value)).encode()
            try:
                read(dialect, data)
            except Exception as error:
                raise AssertionError(f"{at}: {str(value)[:50]}") from error


@pytest.mark.parametrize(
    ("field", "value"),
    [("content", 5), ("content", True), ("summary", 1.5), ("summary", {"text": "t"}), ("content", [1])],
)
def test_an_item_of_reasoning_that_is_no_text_is_refused_with_its_place(field: str, value: Any) -> None:
    items = [{"type": "message", "role": "user", "content": "Hi"}, {"type": "reasoning", field: value}]
    with pytest.raises(Refusal) as raised:
        app.DIALECTS["responses"][1](READER, json.dumps({"input": items}).encode())
    assert raised.value.param == f"input[1].{field}"


@pytest.mark.parametrize("dialect", ["chat", "messages", "responses"])
def test_too_many_messages_are_refused_before_any_is_read(dialect: str) -> None:
    name = "input" if dialect == "responses" else "messages"
    body = json.dumps({name: [{"role": "wizard", "content": "Hi"}] * 4097}).encode()
    with pytest.raises(Refusal, match="4,097 messages") as raised:
        app.DIALECTS[dialect][1](READER, body)
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", name)


def conversations(n: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield bodies of `n` calls and results, and of other lists as long."""
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": "look", "arguments": "{}"}} for i in range(n)]
    asks = {"role": "user", "content": "Hi"}
    results = [{"role": "tool", "tool_call_id": one["id"], "content": "f"} for one in calls]
    yield "chat", {"messages": [asks, *({"role": "assistant", "tool_calls": [one]} for one in calls), *results]}
    yield "chat", {"messages": [asks, {"role": "assistant", "tool_calls": calls}, *results]}
    yield "chat", {"messages": [asks, {"role": "assistant", "tool_calls": [calls[0]] * n}, *[results[0]] * n]}
    uses = [{"type": "tool_use", "id": one["id"], "name": "look", "input": {}} for one in calls]
    back = [{"type": "tool_result", "tool_use_id": one["id"], "content": "f"} for one in calls]
    yield "messages", {"messages": [{"role": "assistant", "content": uses}, {"role": "user", "content": back}]}
    items = [{"type": "function_call", "call_id": one["id"], "name": "look", "arguments": "{}"} for one in calls]
    outputs = [{"type": "function_call_output", "call_id": one["id"], "output": "f"} for one in calls]
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}] * 9}
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}] * 9}
    yield "responses", {"input": [*items, *outputs]}
    yield "responses", {"input": [*[thought, said] * n, asks]}
    yield "chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "t"}] * n}]}


def n_lines(dialect: str, body: dict[str, Any]) -> int:
    """Return how many lines of Python are run to read a body."""
    counted = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal counted
        counted += event == "line"
        return trace

    patient, data = reader(1 << 20), json.dumps(body).encode()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        app.DIALECTS[dialect][1](patient, data)
    finally:
        sys.settrace(before)
    return counted


@pytest.mark.parametrize("number", range(len([*conversations(1)])))
def test_reading_takes_as_many_steps_for_each_message_of_a_long_request_as_of_a_short_one(number: int) -> None:
    short, long = ([*conversations(n)][number] for n in (50, 400))
    n_lines(*short)  # what is made once is made now
    assert n_lines(*long) < 9 * n_lines(*short)


def test_an_integer_of_more_than_64_bits_in_a_schema_is_refused_with_its_place() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 1 << 64}}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "tools": tools}).encode()
    with pytest.raises(Refusal, match="64-bit integers") as raised:
        app.DIALECTS["chat"][1](READER, body)
    assert raised.value.param == "tools[0].function.parameters"


def test_strict_schemas_that_take_too_long_together_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpuchat.serving.requests.PARSE_SECONDS", -1.0)
    body = copy.deepcopy(BODIES["messages"])
    assert read("messages", json.dumps(body).encode()) == "read"
    body["tools"][0]["strict"] = True
    assert read("messages", json.dumps(body).encode()) == "unsupported"
