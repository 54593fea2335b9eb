"""Tests learning formats of calls from templates, and reading calls in them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from cpuchat.base.errors import TemplateError
from cpuchat.grammar.limits import check_lark
from cpuchat.protocol.messages import Tool, ToolCall
from cpuchat.tools.call_format import CallFormat
from cpuchat.tools.call_grammar import call_grammar
from cpuchat.tools.call_learner import learn_format
from cpuchat.tools.call_parser import parse_calls
from tests.tools import llama_calls

WEATHER = Tool(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
        "required": ["city"],
    },
)
FORMS = {
    "hermes": "Qwen-Qwen3-0.6B", "mistral-nemo": "mistralai-Mistral-Nemo-Instruct-2407", "glm": "GLM-4.6",
    "llama-3": "meta-llama-Llama-3.2-3B-Instruct", "command": "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "deepseek": "deepseek-ai-DeepSeek-V3.1", "kimi": "moonshotai-Kimi-K2", "qwen-coder": "Qwen3-Coder",
    "gemma": "google-gemma-4-31B-it", "python": "LFM2.5-8B-A1B",
}  # fmt: skip


def learned(name: str) -> CallFormat:
    return llama_calls.learned(FORMS[name])


def test_what_is_said_before_calls_is_kept() -> None:
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Bern"}}</tool_call>'
    said, calls = parse_calls(learned("hermes"), f"I will look.\n{call}", [WEATHER])
    assert said == "I will look." and len(calls) == 1


@pytest.mark.parametrize("text", ["Hello", "no", "x" * 200_000])
def test_a_template_without_calls_has_no_format(text: str) -> None:
    def render(messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        if text == "no":
            raise TemplateError(text)
        return text + json.dumps(messages) if len(text) > 9 else text

    assert learn_format(render) is None


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
        ("python", '<|tool_call_start|>[get_weather(city="Bern")]'),
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
    values = {"city": "12", "days": "4", "exact": "True", "more": '[1, {"a": null}]'}
    pairs = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"<tool_call>\n<function=get_weather>\n{pairs}</function>\n</tool_call>"
    (call,) = parse_calls(learned("qwen-coder"), text, [WEATHER])[1]
    assert call.arguments == {"city": "12", "days": 4, "exact": True, "more": [1, {"a": None}]}
    (call,) = parse_calls(learned("gemma"), '<|tool_call>call:f{where:{city:<|"|>a, b}<|"|>,at:[1,2]}}<tool_call|>')[1]
    assert call.arguments == {"where": {"city": "a, b}", "at": [1, 2]}}


def test_arguments_that_are_no_object_are_a_problem() -> None:
    (call,) = parse_calls(learned("hermes"), '<tool_call>{"name": "f", "arguments": [1]}</tool_call>')[1]
    assert call.problem == "The arguments are not a JSON object." and call.arguments == {}


def test_json_after_calls_is_no_further_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>\nFor example {"name": "delete", "arguments": {}}'
    said, calls = parse_calls(learned("hermes"), text)
    assert [call.name for call in calls] == ["f"]
    assert said.startswith("For example")


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
