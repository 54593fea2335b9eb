"""Tests learning formats of calls from templates, and reading calls in them."""

from __future__ import annotations

import json
from functools import cache, partial
from typing import Any

import msgspec
import pytest

from cpuchat.grammar.limits import check_lark
from cpuchat.protocol.messages import Tool, ToolCall
from cpuchat.tools.call_format import CallFormat
from cpuchat.tools.call_grammar import call_grammar
from cpuchat.tools.call_learner import learn_format
from cpuchat.tools.call_parser import parse_calls
from tests.tools.templates import TEMPLATES, WITHOUT, render

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
        "required": ["city"],
    },
)
NOTHING = Tool(name="list-files", parameters={"type": "object", "properties": {}})
ARGUMENTS = {"city": 'Zürich "old" <town>', "days": 3, "exact": True}
SHAPES = {
    "hermes": "object", "mistral-nemo": "object", "mistral-new": "json", "llama-3": "object", "command": "object",
    "deepseek": "json", "kimi": "json", "glm": "pairs", "qwen-coder": "pairs", "minimax": "pairs", "gemma": "pairs",
    "python": "pairs",
}  # fmt: skip
TRIGGERS = {
    "hermes": "<tool_call>", "mistral-nemo": "[TOOL_CALLS]", "mistral-new": "[TOOL_CALLS]", "llama-3": "{",
    "command": "<|START_ACTION|>", "deepseek": "<｜tool▁calls▁begin｜>", "kimi": "<|tool_calls_section_begin|>",
    "glm": "<tool_call>", "qwen-coder": "<tool_call>", "minimax": "<minimax:tool_call>", "gemma": "<|tool_call>",
    "python": "[",
}  # fmt: skip


@cache
def learned(name: str) -> CallFormat:
    found = learn_format(partial(render, TEMPLATES[name]))
    assert found is not None
    return found


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Return what the template makes of these calls, without what is around the answer."""
    as_text = name == "deepseek"
    made = []
    for index, (tool, arguments) in enumerate(calls):
        id = f"functions.{tool}:{index}" if name == "kimi" else f"call{index:05}"
        function = {"name": tool, "arguments": json.dumps(arguments) if as_text else arguments}
        made.append({"id": id, "function": function})
    user = {"role": "user", "content": "Hi"}
    before = render(TEMPLATES[name], [user, {"role": "assistant", "content": "◊"}], False)
    text = render(TEMPLATES[name], [user, {"role": "assistant", "content": "", "tool_calls": made}], False)
    start, end = before.split("◊")
    return text.removeprefix(start).removesuffix(end)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_format_is_learned_and_reads_what_the_template_writes(name: str) -> None:
    form = learned(name)
    assert (form.shape, form.trigger) == (SHAPES[name], TRIGGERS[name])
    one = written(name, ("get_weather", ARGUMENTS))
    said, (call,) = parse_calls(form, one, [WEATHER])
    assert (said, call.name, call.arguments, call.problem) == ("", "get_weather", ARGUMENTS, "")
    if name != "llama-3":
        two = written(name, ("get_weather", ARGUMENTS), ("get_weather", {"city": "Bern"}))
        said, calls = parse_calls(form, two, [WEATHER])
        assert said == ""
        assert [call.arguments for call in calls] == [ARGUMENTS, {"city": "Bern"}]
    said, (empty,) = parse_calls(form, written(name, ("list-files", {})), [WEATHER, NOTHING])
    assert (said, empty.name, empty.arguments) == ("", "list-files", {})


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_is_no_call(name: str) -> None:
    form = learned(name)
    for text in ("Hello there.", "It is 3 < 4, as f(x=1) shows.", "", "A list: [1, 2]", "[1] f(x=1)", "{1} f(x=1)"):
        assert parse_calls(form, text) == (text, [])
    whole = written(name, ("get_weather", ARGUMENTS))
    for end in range(0, len(whole) - len(form.closing) - len(form.end) - 3, 7):  # cut off
        said, calls = parse_calls(form, whole[:end], [WEATHER])
        assert not calls and said == whole[:end]


def test_what_is_said_before_calls_is_kept() -> None:
    names = [name for name in TEMPLATES if not learned(name).only_at_start]
    assert len(names) > 5
    for name in names:
        text = f"I will look.\n{written(name, ('get_weather', ARGUMENTS))}"
        said, calls = parse_calls(learned(name), text, [WEATHER])
        assert said == "I will look." and len(calls) == 1, name


def test_a_template_without_calls_has_no_format() -> None:
    assert learn_format(partial(render, WITHOUT)) is None
    assert learn_format(partial(render, "{{ raise_exception('no') }}")) is None
    assert learn_format(partial(render, "{{ 'x' * 200_000 }}" + TEMPLATES["hermes"])) is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"city": "Bern"}, "name": "get_weather"}</tool_call>'),
        ("hermes", '<tool_call>\n\n{"name":"get_weather","arguments":{"city":"Bern"}}'),
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"Bern\\"}"}\n</tool_call>'),
        ("mistral-nemo", '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Bern"}, "id": "abcdefghi"}]'),
        ("llama-3", '{"name": "get_weather", "parameters": {"city": "Bern"}}'),
        ("command", '<|START_ACTION|>[{"tool_call_id": "12", "tool_name": "get_weather", '
                    '"parameters": {"city": "Bern"}}]'),
        ("kimi", '<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:12<|tool_call_argument_begin|>'
                 '{"city": "Bern"}<|tool_call_end|><|tool_calls_section_end|>'),
        ("glm", "<tool_call>get_weather\n<arg_key>city</arg_key><arg_value>Bern</arg_value></tool_call>"),
        ("qwen-coder", "<tool_call><function=get_weather><parameter=city>Bern</parameter></function></tool_call>"),
        ("gemma", '<|tool_call>call:get_weather{city:<|"|>Bern<|"|>}'),
        ("python", '[get_weather(city="Bern")]'),
    ],
)  # fmt: skip
def test_what_models_write_otherwise_is_read_too(name: str, text: str) -> None:
    said, calls = parse_calls(learned(name), text, [WEATHER])
    assert [(call.name, call.arguments) for call in calls] == [("get_weather", {"city": "Bern"})]
    assert said == ""


def test_a_channel_between_name_and_arguments_is_passed_over() -> None:
    form = CallFormat(shape="json", opening=" to=functions.", middle="<|channel|>commentary json<|message|>")
    text = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Bern"}'
    said, calls = parse_calls(form, text)
    assert calls == [ToolCall(name="get_weather", arguments={"city": "Bern"})]
    assert said == ""


def test_values_have_the_types_of_the_schema() -> None:
    form = learned("qwen-coder")
    arguments = {"city": "12", "days": "4", "exact": "True", "more": [1, {"a": None}]}
    text = written("qwen-coder", ("get_weather", arguments))
    (call,) = parse_calls(form, text, [WEATHER])[1]
    assert call.arguments == {"city": "12", "days": 4, "exact": True, "more": [1, {"a": None}]}
    code = "def f():\n    return 1\n"
    (call,) = parse_calls(form, written("qwen-coder", ("get_weather", {"city": f"    {code}"})), [WEATHER])[1]
    assert call.arguments["city"] == f"    {code}"
    (call,) = parse_calls(learned("gemma"), '<|tool_call>call:f{where:{city:<|"|>a, b}<|"|>,at:[1,2]}}<tool_call|>')[1]
    assert call.arguments == {"where": {"city": "a, b}", "at": [1, 2]}}


def test_arguments_that_are_no_object_are_a_problem() -> None:
    (call,) = parse_calls(learned("hermes"), '<tool_call>{"name": "f", "arguments": [1]}</tool_call>')[1]
    assert call.problem == "The arguments are not a JSON object." and call.arguments == {}
    (call,) = parse_calls(learned("mistral-new"), "[TOOL_CALLS]f[CALL_ID]a[ARGS][1]")[1]
    assert call.problem


def test_json_after_calls_is_no_further_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>\nFor example {"name": "delete", "arguments": {}}'
    said, calls = parse_calls(learned("hermes"), text)
    assert [call.name for call in calls] == ["f"]
    assert said.startswith("For example")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_grammar_says_the_calls(name: str) -> None:
    form = learned(name)
    odd = Tool(name="odd", parameters={"type": "object", "patternProperties": {"a": {}}})  # not for a grammar
    grammar = call_grammar(form, [WEATHER, NOTHING, odd])
    check_lark(grammar, "calls")
    assert all(tool in grammar for tool in ("get_weather", "list-files", "odd"))
    assert call_grammar(form, []) == ""


TOO_MUCH = {
    "endless": {"allOf": [{"$ref": "#"}]},
    "needs itself": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "left recursion": {"anyOf": [{"$ref": "#/anyOf/1"}, {"$ref": "#/anyOf/0"}]},
    "optional": {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(700)}},
    "enum": {"type": "object", "properties": {"a": {"enum": [f"value {n}" for n in range(30_000)]}}},
    "ways": {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(a?){900}(a?){900}$"}}},
    "refused": {"type": "object", "patternProperties": {"x": {}}},
    "no object": {"type": "string"},
    "nothing": {},
}


@pytest.mark.parametrize("name", ["hermes", "deepseek", "qwen-coder", "gemma"])
@pytest.mark.parametrize("kind", TOO_MUCH)
def test_a_tool_that_is_not_strict_takes_any_arguments_if_its_schema_is_too_much(name: str, kind: str) -> None:
    odd = Tool(name="odd", parameters=TOO_MUCH[kind])
    grammar = call_grammar(learned(name), [odd, WEATHER])
    check_lark(grammar, "calls")
    assert "odd" in grammar and "get_weather" in grammar
    assert "days" in grammar  # the other is held to its schema


def test_schemas_that_are_too_much_together_are_left_out_unless_they_are_strict() -> None:
    names = ([f"p{number}n{n}" for n in range(500)] for number in range(45))
    tools = [
        Tool(name=f"tool{number}", parameters={"type": "object", "properties": {name: {} for name in some}})
        for number, some in enumerate(names)
    ]
    grammar = call_grammar(learned("hermes"), [*tools, msgspec.structs.replace(WEATHER, strict=True)])
    check_lark(grammar, "calls")
    assert "tool39" in grammar and "days" in grammar
    assert call_grammar(learned("hermes"), [msgspec.structs.replace(one, strict=True) for one in tools]) == ""
