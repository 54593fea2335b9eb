"""Tests calls of tools in all dialects, with the vendors' own clients: required, streamed, answered and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import Server, chat, server
from tests.support.tiny_gguf import write_tiny_gguf

SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["here", "there"]}, "depth": {"enum": [1, 2]}},
    "required": ["place", "depth"],
    "additionalProperties": False,
}
FUNCTION = {"name": "look", "description": "Looks somewhere.", "parameters": SCHEMA, "strict": True}
TOOLS = [{"type": "function", "function": FUNCTION}, {"type": "function", "function": {**FUNCTION, "name": "walk"}}]
FLAT = [{"type": "function", **FUNCTION}]
OWN = [{"name": "look", "description": "Looks somewhere.", "input_schema": SCHEMA}]
MUST: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}


def is_valid(arguments: Any) -> bool:
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return set(given) == {"place", "depth"} and given["place"] in ("here", "there") and given["depth"] in (1, 2)


def test_a_required_call_is_made_and_its_result_is_read(tiny: Server) -> None:
    answer = tiny.openai.chat.completions.create(model="", **chat("Where?", **MUST))
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert is_valid(call.function.arguments)
    named = {"type": "function", "function": {"name": "walk"}}
    walked = tiny.openai.chat.completions.create(model="", **chat("Where?", **{**MUST, "tool_choice": named}))
    assert [one.function.name for one in walked.choices[0].message.tool_calls or ()] == ["walk"]  # type: ignore
    none = tiny.openai.chat.completions.create(model="", **chat("Where?", tools=TOOLS, tool_choice="none"))
    assert none.choices[0].message.content and not none.choices[0].message.tool_calls
    asked = [{"role": "user", "content": "Where?"}, choice.message.model_dump(exclude_none=True)]
    asked.append({"role": "tool", "tool_call_id": call.id, "content": "Nothing there."})
    told = tiny.openai.chat.completions.create(model="", **chat("", messages=asked, tools=TOOLS))
    assert told.usage is not None
    assert told.usage.prompt_tokens_details is not None
    assert (told.usage.prompt_tokens_details.cached_tokens or 0) > 100


def test_a_call_is_streamed_as_it_is_written(tiny: Server) -> None:
    chunks = list(tiny.openai.chat.completions.create(model="", stream=True, **chat("Where?", **MUST)))
    deltas = [one for chunk in chunks for choice in chunk.choices for one in choice.delta.tool_calls or ()]
    assert [bool(one.id) for one in deltas] == [True, *[False] * (len(deltas) - 1)]
    assert {one.index for one in deltas} == {0}
    assert is_valid("".join(one.function.arguments or "" for one in deltas if one.function))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("most", [25, 45])
def test_a_call_that_is_cut_is_told_as_far_as_it_is_written(tiny: Server, most: int) -> None:
    body = chat("Where?", **{**MUST, "max_tokens": most})
    (choice,) = tiny.openai.chat.completions.create(model="", **body).choices
    assert choice.finish_reason == "length"
    assert not choice.message.content
    chunks = list(tiny.openai.chat.completions.create(model="", stream=True, **body))
    assert not any(one.delta.content for chunk in chunks for one in chunk.choices)
    assert bool(choice.message.tool_calls) == (most == 45)
    asked = {"input": "Where?", "tools": FLAT, "tool_choice": "required", "max_output_tokens": most, "temperature": 0}
    answer = tiny.post(asked, "/v1/responses").json()
    assert answer["status"] == "incomplete"
    assert not any(part["text"] for item in answer["output"] for part in item.get("content", ()))


STRICT = (
    "{%- for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System first.') }}{% endif %}"
    "{% if m.tool_calls and m.content %}{{ raise_exception('Text or a call.') }}{% endif %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>' + {'name': c.function.name, 'arguments': c.function.arguments}"
    " | tojson + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def called(arguments: str, **more: object) -> dict:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


def test_conversations_of_agents_are_answered_with_a_strict_template(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "strict-F32.gguf", template=STRICT)
    question, again = {"role": "user", "content": "Where?"}, {"role": "user", "content": "Again."}
    said = {"role": "assistant", "content": "There."}
    result = {"role": "tool", "tool_call_id": "c1", "content": "heron"}
    with server(model, tmp_path / "served") as strict:
        for messages in (
            [question, said, {"role": "developer", "content": "One word."}, again],
            [question, called('{"at": "here"}', content="I look.", reasoning_content="A place."), result, again],
            [question, called('{"at": "he'), result, again],
            [result, again],
            [question, called("{}"), again, result],
            [question, {"role": "assistant", "content": "Once upon a"}],
        ):
            for tools in ([], TOOLS):
                answer = strict.post(chat("", messages=messages, tools=tools, max_tokens=2))
                assert answer.status_code == 200, answer.text
        # In the middle of a conversation a system message changes nothing of what was evaluated before.
        first = [{"role": "system", "content": "Rules. " * 50}, question, said]
        before = strict.post(chat("", messages=[*first, again], max_tokens=2)).json()["usage"]["prompt_tokens"]
        later = [*first, again, {"role": "system", "content": "New rules."}, question]
        usage = strict.post(chat("", messages=later, max_tokens=2)).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > before - 20


def test_responses_with_the_vendor_s_client(tiny: Server) -> None:
    common: dict[str, Any] = {"model": "", "temperature": 0, "max_output_tokens": 200}
    answer = tiny.openai.responses.create(input="Hello", instructions="Be brief.", **{**common, "max_output_tokens": 9})
    assert answer.status == "incomplete"
    assert answer.output_text
    must: dict[str, Any] = {"tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False}
    called = tiny.openai.responses.create(input="Where?", **must, **common)
    call = called.output[0]
    assert call.type == "function_call"
    assert is_valid(call.arguments)
    items = [{"role": "user", "content": "Where?"}, *(one.model_dump() for one in called.output)]
    items += [{"type": "function_call_output", "call_id": one.call_id, "output": "No."} for one in called.output]  # type: ignore
    told = tiny.openai.responses.create(input=items, tools=FLAT, **{**common, "max_output_tokens": 9})  # type: ignore
    assert told.usage is not None
    assert told.usage.input_tokens_details.cached_tokens > 50


def test_a_streamed_response_has_all_its_events(tiny: Server) -> None:
    asked: dict[str, Any] = {"model": "", "input": "Where?", "tools": FLAT, "tool_choice": "required"}
    with tiny.openai.responses.stream(**asked, temperature=0, parallel_tool_calls=False) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert is_valid(final.output[0].arguments)  # type: ignore
    with tiny.openai.responses.stream(model="", input="Hello", temperature=0, max_output_tokens=9) as stream:
        kinds = [event.type for event in stream]
    assert kinds[3] == "response.content_part.added"
    assert kinds[-1] == "response.incomplete"
    assert {"response.output_text.delta", "response.output_text.done", "response.content_part.done"} < set(kinds)


def test_messages_with_the_vendor_s_client(tiny: Server) -> None:
    client = tiny.anthropic
    common: dict[str, Any] = {
        "model": "tiny", "system": "Be brief.", "extra_body": {"temperature": 0}, "max_tokens": 9,
    }  # fmt: skip
    asked = [{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}]
    answer = client.messages.create(messages=asked, **common)  # type: ignore
    assert answer.content[0].type == "text"
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 9
    counted = client.messages.count_tokens(model="tiny", messages=asked, system="Be brief.")  # type: ignore
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    stop = answer.content[0].text[3:5]
    stopped = client.messages.create(messages=asked, stop_sequences=["never written", stop], **common)  # type: ignore
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)


def test_messages_call_tools_and_read_results(tiny: Server) -> None:
    client = tiny.anthropic
    must: dict[str, Any] = {
        "model": "", "max_tokens": 200, "extra_body": {"temperature": 0}, "tools": OWN,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }  # fmt: skip
    asked: list[Any] = [{"role": "user", "content": "Where?"}]
    answer = client.messages.create(messages=asked, **must)
    (call,) = answer.content
    assert answer.stop_reason == call.type == "tool_use"
    assert is_valid(call.input)
    with client.messages.stream(messages=asked, **must) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert "input_json" in kinds
    assert final.content[0].input == call.input  # type: ignore
    asked.append({"role": "assistant", "content": [one.model_dump() for one in final.content]})
    result = {"type": "tool_result", "tool_use_id": final.content[0].id, "content": "No."}  # type: ignore
    asked.append({"role": "user", "content": [result, {"type": "text", "text": "And now?"}]})
    told = client.messages.create(messages=asked, model="", max_tokens=5, tools=OWN)  # type: ignore
    assert (told.usage.cache_read_input_tokens or 0) > 50


def test_errors_have_the_form_of_their_dialect(tiny: Server) -> None:
    import anthropic  # slow

    with pytest.raises(anthropic.BadRequestError) as raised:
        tiny.anthropic.messages.create(model="", max_tokens=5, messages=[{"role": "user", "content": "word " * 9000}])
    body: Any = raised.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith("prompt is too long")
    assert tiny.post({}, "/v1/messages/none").json()["error"]["type"] == "not_found_error"
    found = tiny.post({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "/v1/messages").json()
    assert found["error"]["param"] == "messages[0].content[0]"


@pytest.mark.timeout(300)
def test_an_agent_costs_what_is_new_after_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    def timings(running: Server, text: str) -> dict[str, int]:
        talk = [{"role": "system", "content": "You are careful. " * 40}, {"role": "user", "content": text}]
        return running.post(chat("", messages=talk, tools=TOOLS)).json()["timings"]

    with server(tiny_model, tmp_path) as first:
        assert timings(first, "Hello")["prompt_n"] > 1000
    with server(tiny_model, tmp_path) as again:
        found = timings(again, "Another question")
        assert found["cache_n"] > 1000 and found["prompt_n"] < 90
        assert again.http.get("/metrics").status_code == 200
