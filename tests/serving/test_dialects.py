"""Tests how requests of each dialect are read, and in which form calls go back, without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from cpuchat.config.settings import Settings
from cpuchat.protocol.messages import EFFORTS, CallDelta, GenerationFinished, Message, Speculation, TextDelta
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import Timings
from cpuchat.serving.app import DIALECTS
from cpuchat.serving.errors import Refusal
from cpuchat.serving.requests import ParsedRequest, RequestReader
from tests.support.scripted_backend import WITH_DRAFT

READERS = {path: (read, reply) for path, read, reply in DIALECTS.values()}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TEXT = {"type": "string"}


def read(
    path: str, body: dict[str, Any], notes: list[str] | None = None, model: ModelInfo = WITH_DRAFT, **options: Any
) -> ParsedRequest:
    note = (lambda text: None) if notes is None else notes.append
    reader = RequestReader(("tiny",), model, Settings(), Speculation(), note=note, **options)
    return READERS[path][0](reader, json.dumps(body).encode())


def refused(path: str, body: dict[str, Any], **options: Any) -> Refusal:
    with pytest.raises(Refusal) as raised:
        read(path, body, **options)
    return raised.value


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def asked(path: str) -> dict[str, Any]:
    return {"input": "Hi"} if path == RESPONSES else {"messages": [user("Hi")]}


def made(id: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def of_chat(*messages: dict[str, Any]) -> tuple[Message, ...]:
    return read(CHAT, {"messages": list(messages)}).request.messages


def calling(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def returned(id: str | None, text: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


EFFORT_FIELDS: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "reasoning_effort": (CHAT, lambda word: {"reasoning_effort": word}),
    "reasoning.effort": (RESPONSES, lambda word: {"reasoning": {"effort": word}}),
    "reasoning.effort (chat)": (CHAT, lambda word: {"reasoning": {"effort": word}}),
    "chat_template_kwargs.reasoning_effort": (CHAT, lambda word: {"chat_template_kwargs": {"reasoning_effort": word}}),
    "output_config.effort": (MESSAGES, lambda word: {"output_config": {"effort": word}}),
}


@pytest.mark.parametrize("field", EFFORT_FIELDS)
def test_an_effort_of_every_dialect_is_read_or_refused(field: str) -> None:
    path, more = EFFORT_FIELDS[field]
    for word in EFFORTS:
        request = read(path, {**asked(path), **more(word)}).request
        assert (request.effort, request.reasoning) == (word, word != "none")
    assert read(path, {**asked(path), **more(None)}).request.effort == ""
    for wrong in ("bogus", "", 3, ["high"]):
        refusal = refused(path, {**asked(path), **more(wrong)})
        assert refusal.param == field.removesuffix(" (chat)") and "xhigh" in refusal.message


def test_what_else_tells_whether_to_reason_wins() -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}
    assert read(CHAT, {**asked(CHAT), **off}).request.reasoning is False
    off = {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}
    request = read(MESSAGES, {**asked(MESSAGES), **off}).request
    assert (request.reasoning, request.effort) == (False, "high")


def test_an_effort_that_the_template_does_not_take_is_noted() -> None:
    notes: list[str] = []
    model = msgspec.structs.replace(WITH_DRAFT, takes_effort=False)
    read(CHAT, {**asked(CHAT), "reasoning_effort": "high"}, notes, model=model)
    assert len(notes) == 1 and "no effort of reasoning" in notes[0]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_any_model_is_answered_and_another_one_noted(path: str) -> None:
    notes: list[str] = []
    body = {**asked(path), "model": "claude-haiku-4-5"}
    read(path, body, notes)
    assert len(notes) == 1 and notes[0].startswith("tiny answers")
    read(path, {**body, "model": "tiny"}, notes)
    assert len(notes) == 1


def test_a_result_belongs_to_the_latest_call_with_its_id_that_has_none() -> None:
    messages = of_chat(
        user("List, then read twice."),
        calling(made("call_0", "list_dir")), returned("call_0", "a.txt"),
        calling(made("call_0", "read_file"), made("call_0", "stat")), returned("call_0", "heron"),
        returned("call_0", "7 bytes"), returned("call_0", "7 bytes again"),
    )  # fmt: skip
    assert [one.tool for one in messages if one.role == "tool"] == ["list_dir", "read_file", "stat", "stat"]
    items = [{"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"} for name in ("one", "two")]
    results = [{"type": "function_call_output", "call_id": "c", "output": text} for text in ("1", "2")]
    given = read(RESPONSES, {"input": [user("Go"), *items, *results]}).request.messages
    assert [(one.tool, one.content) for one in given[2:]] == [("one", "1"), ("two", "2")]
    uses = [{"type": "tool_use", "id": "c", "name": name, "input": {}} for name in ("one", "two")]
    blocks = [{"type": "tool_result", "tool_use_id": "c", "content": text} for text in ("1", "2")]
    turns = [user("Go"), {"role": "assistant", "content": uses}, user(blocks)]
    given = read(MESSAGES, {"messages": turns}).request.messages
    assert [(one.tool, one.content) for one in given[2:]] == [("one", "1"), ("two", "2")]


CUT = {
    "in a text": '{"path": "sr', "a list": "[1, 2]", "null": "null", "a text": '"text"', "Python": "{'a': 1}",
    "too long": '{"a": 1}}',
}  # fmt: skip


@pytest.mark.parametrize("cut", CUT.values(), ids=CUT)
def test_a_call_that_was_cut_is_the_text_that_the_model_wrote(cut: str) -> None:
    good = made("c2", "stat")
    question, answer, result, other, _ = of_chat(
        user("List."), calling(made("c1", "list_dir", cut), good, content="I look."),
        returned("c1", "error"), returned("c2", "fine"), user("Again."),
    )  # fmt: skip
    assert question.content == "List."
    assert answer.content.startswith("I look.\n<tool_call>") and f'"list_dir", "arguments": {cut}' in answer.content
    assert [one.name for one in answer.calls] == ["stat"]
    assert (result.tool, other.tool) == ("", "stat")


@pytest.mark.parametrize(
    ("id", "content"), [("gone", [{"type": "text", "text": "heron"}]), (None, "heron"), ("", None)]
)
def test_a_result_whose_call_is_gone_is_a_result_of_no_tool(id: str | None, content: Any) -> None:
    result, _ = of_chat(returned(id, content), user("What was it?"))
    assert (result.role, result.content, result.tool) == ("tool", "heron" if content else "", "")


def test_an_image_in_a_result_is_left_out_and_the_model_told_so() -> None:
    parts = [{"type": "text", "text": "seen"}, {"type": "image_url", "image_url": {}}]
    result = of_chat(user("Go"), calling(made("c", "go")), returned("c", parts))[2]
    assert result.content.startswith("seen[") and "image_url" in result.content
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "go", "input": {}}]}
    block = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": {}}]}
    turns = [user("Go"), use, user([block])]
    assert "image" in read(MESSAGES, {"messages": turns}).request.messages[2].content
    refused(CHAT, {"messages": [user(parts)]})


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_last_text_of_the_assistant_is_continued_and_a_last_call_is_not(path: str) -> None:
    text = {"role": "assistant", "content": "Once upon"}
    call: dict[str, Any] = calling(made("c", "go"))
    if path == RESPONSES:
        call = {"type": "function_call", "call_id": "c", "name": "go", "arguments": "{}"}
    elif path == MESSAGES:
        call = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "go", "input": {}}]}
    field = "input" if path == RESPONSES else "messages"
    for last, continues in ((text, True), (call, False)):
        assert read(path, {field: [user("Go"), last]}).request.continues is continues


def test_what_ran_elsewhere_is_left_out_of_the_messages() -> None:
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "Found."},
    ]
    turns = [user("?"), {"role": "assistant", "content": blocks}, user("!")]
    assert [one.content for one in read(MESSAGES, {"messages": turns}).request.messages] == ["?", "Found.", "!"]
    items = [user("?"), {"type": "web_search_call", "id": "w", "status": "completed"}]
    assert len(read(RESPONSES, {"input": [*items, user("!")]}).request.messages) == 2


CODEX: list[dict[str, Any]] = [
    {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}},
    {"type": "web_search"}, {"type": "image_generation"}, {"type": "mcp", "server_label": "x"},
    {"type": "custom", "name": "edit", "description": "Edits.",
     "format": {"type": "grammar", "syntax": "lark", "definition": "start: X"}},
    {"type": "namespace", "name": "mcp__files__", "tools": [{"type": "function", "name": "read"}, {"type": "mcp"}]},
]  # fmt: skip


def test_tools_of_codex_are_offered_or_left_out_and_noted() -> None:
    notes: list[str] = []
    parsed = read(RESPONSES, {**asked(RESPONSES), "tools": CODEX}, notes)
    tools = {one.name: one for one in parsed.request.tools}
    assert list(tools) == ["now", "edit", "mcp__files__read"]
    assert tools["edit"].parameters["properties"] == {"input": TEXT} and "start: X" in tools["edit"].description
    assert sum("run elsewhere" in one for one in notes) == 4


@pytest.mark.parametrize(
    ("kind", "name"), [("bash_20250124", "bash"), ("text_editor_20250728", "str_replace_based_edit_tool")]
)
def test_tools_that_clients_of_anthropic_run_are_offered_with_their_schemas(kind: str, name: str) -> None:
    extra = {"cache_control": {"type": "ephemeral"}, "defer_loading": True, "input_examples": [], "display_width_px": 9}
    body = {**asked(MESSAGES), "tools": [{"type": kind, "name": name, **extra}]}
    (tool,) = read(MESSAGES, body).request.tools
    assert tool.name == name and tool.description and "properties" in tool.parameters
    assert read(MESSAGES, {**body, "tool_choice": {"type": "tool", "name": name}}).request.calling.names == (name,)


@pytest.mark.parametrize("kind", ["web_search_20250305", "computer_20250124", "new_20300101"])
def test_tools_that_run_at_a_vendor_are_left_out_and_cannot_be_chosen(kind: str) -> None:
    own = {"name": "look", "input_schema": {"type": "object"}, "eager_input_streaming": True}
    notes: list[str] = []
    body = {**asked(MESSAGES), "tools": [own, {"type": kind, "name": "theirs"}]}
    assert [one.name for one in read(MESSAGES, body, notes).request.tools] == ["look"] and kind in notes[0]
    codex = {**asked(RESPONSES), "tools": CODEX}
    for path, wrong in (
        (MESSAGES, {**body, "tool_choice": {"type": "tool", "name": "theirs"}}),
        (RESPONSES, {**codex, "tool_choice": {"type": "web_search"}}),
        (RESPONSES, {**codex, "tool_choice": {"type": "mcp", "server_label": "x"}}),
    ):
        refusal = refused(path, wrong)
        assert refusal.param == "tool_choice" and "runs elsewhere" in refusal.message
    only = {**asked(RESPONSES), "tools": [{"type": "web_search"}], "tool_choice": "required"}
    assert "run elsewhere" in refused(RESPONSES, only).message


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        ({"type": "function", "name": "now"}, "required", ("now",)),
        ({"type": "custom", "name": "edit"}, "required", ("edit",)),
        ({"type": "function", "name": "read", "namespace": "mcp__files__"}, "required", ("mcp__files__read",)),
    ],
)
def test_a_choice_of_tools_by_type(choice: dict[str, Any], mode: str, names: tuple[str, ...]) -> None:
    calling = read(RESPONSES, {**asked(RESPONSES), "tools": CODEX, "tool_choice": choice}).request.calling
    assert (calling.mode, calling.names) == (mode, names)


CALLS: list[tuple[str, str, dict[str, Any]]] = [
    ("now", "{}", {"type": "function_call", "name": "now", "arguments": "{}"}),
    ("edit", '{"input": "a\\n\\"b\\""}', {"type": "custom_tool_call", "name": "edit", "input": 'a\n"b"'}),
    ("mcp__files__read", "{}", {"type": "function_call", "name": "read", "namespace": "mcp__files__",
     "arguments": "{}"}),
]  # fmt: skip


def answered(
    parsed: ParsedRequest, path: str, name: str, arguments: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the whole answer with a call that comes in pieces, and the events of its stream."""
    pieces = [arguments[at : at + 3] for at in range(0, len(arguments), 3)]
    told: list[Any] = [CallDelta(request_id=1, index=0, name=name, id="c1", arguments=one) for one in pieces]
    told.append(GenerationFinished(request_id=1, stop_reason="end", timings=Timings()))
    whole, stream = (READERS[path][1]("tiny", "print", parsed) for _ in range(2))  # type: ignore[call-arg]
    sent = b""
    for event in told:
        whole.progress.follow(event, 0.0)
        stream.progress.follow(event, 0.0)
        sent += stream.rendered(event) or b""
    lines = (sent + stream.end()).decode().splitlines()
    return json.loads(whole.whole()), [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize(("name", "arguments", "item"), CALLS, ids=[one[0] for one in CALLS])
def test_calls_of_codex_come_in_the_items_that_it_knows_and_are_read_again(
    name: str, arguments: str, item: dict[str, Any]
) -> None:
    parsed = read(RESPONSES, {**asked(RESPONSES), "tools": CODEX})
    whole, events = answered(parsed, RESPONSES, name, arguments)
    (found,) = whole["output"]
    assert {**item, "call_id": "c1", "status": "completed"}.items() <= found.items()
    done = next(one["item"] for one in events if one["type"] == "response.output_item.done")
    assert item.items() <= done.items()
    if item["type"] == "custom_tool_call":
        deltas = [one["delta"] for one in events if one["type"] == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == item["input"]
    output = {"type": f"{item['type']}_output", "call_id": "c1", "output": "fine"}
    given = read(RESPONSES, {"input": [user("Go"), found, output], "tools": CODEX}).request.messages
    assert given[1].calls[0].name == given[2].tool == name
    assert json.loads(arguments).items() <= given[1].calls[0].arguments.items()


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
@pytest.mark.parametrize(("reasoning", "kinds"), [("hm", 1), ("", 0)])
def test_an_answer_without_text_has_no_empty_text(path: str, reasoning: str, kinds: int) -> None:
    reply = READERS[path][1]("tiny", "print", read(path, asked(path)))  # type: ignore[call-arg]
    for event in (
        TextDelta(request_id=1, text=reasoning, channel="reasoning"),
        GenerationFinished(request_id=1, stop_reason="max_tokens", timings=Timings()),
    ):
        reply.progress.follow(event, 0.0)
    whole = json.loads(reply.whole())
    assert len(whole["output" if path == RESPONSES else "content"]) == kinds


def test_reasoning_is_separate_in_chats() -> None:
    reply = READERS[CHAT][1]("m", "f", read(CHAT, asked(CHAT)))  # type: ignore[call-arg]
    thought = TextDelta(request_id=1, text="Hm.", channel="reasoning", n_tokens=2, predicted_n=2)
    said = TextDelta(request_id=1, text="Yes.", n_tokens=1, predicted_n=3)
    chunks = []
    for event in (thought, said):
        reply.progress.follow(event, 1.0)
        chunks.append(json.loads((reply.rendered(event) or b"").removeprefix(b"data: ")))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "reasoning_content": "Hm."}, {"content": "Yes."}]
    whole = json.loads(reply.whole())
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


LOOK = {"description": "Looks.", "parameters": {"type": "object", "properties": {"at": TEXT}}}


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "look", **LOOK}},
        {"type": "function", "name": "look", **LOOK},
        {"function": {"name": "look", **LOOK}},
        {"name": "look", "description": "Looks.", "input_schema": LOOK["parameters"]},
    ],
    ids=["nested", "flat", "no type", "anthropic"],
)
def test_tools_in_the_form_of_another_dialect_are_read(path: str, tool: dict[str, Any]) -> None:
    request = read(path, {**asked(path), "tools": [tool], "tool_choice": {"type": "any"}}).request
    (found,) = request.tools
    assert (found.name, found.description, found.parameters) == ("look", "Looks.", LOOK["parameters"])
    assert request.calling.mode == "required"
    assert read(path, {**asked(path), "tools": [tool], "tool_choice": "any"}).request.calling.mode == "required"


def test_a_schema_without_the_object_around_it_is_the_form() -> None:
    forms = [{"type": "json_schema", "schema": TEXT}, {"type": "json_schema", "json_schema": {"schema": TEXT}}]
    flat, nested = (read(CHAT, {**asked(CHAT), "response_format": form}).request.grammar for form in forms)
    others = [(RESPONSES, {"text": {"format": forms[0]}}), (MESSAGES, {"output_config": {"format": forms[0]}})]
    assert {read(path, {**asked(path), **more}).request.grammar for path, more in others} == {flat} == {nested} != {""}


@pytest.mark.parametrize(
    "item",
    [
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"query": "x"}},
        {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": []},
        {"type": "mcp_list_tools", "server_label": "x", "tools": []},
        {"type": "mcp_approval_response", "approval_request_id": "m", "approve": True},
    ],
    ids=lambda item: item["type"],
)
def test_items_of_tools_that_run_elsewhere_are_left_out(item: dict[str, Any]) -> None:
    turns = [user("?"), item, user("!")]
    assert [one.content for one in read(RESPONSES, {"input": turns}).request.messages] == ["?", "!"]


def test_a_reference_to_an_item_is_refused_because_nothing_is_stored() -> None:
    refusal = refused(RESPONSES, {"input": [{"type": "item_reference", "id": "rs_1"}]})
    assert refusal.param == "input[0].type" and "nothing is stored here" in refusal.message
    for field, value in {"previous_response_id": "r", "store": True, "background": True, "truncation": "auto"}.items():
        assert refused(RESPONSES, {**asked(RESPONSES), field: value}).param == field


@pytest.mark.parametrize(("output", "text"), [(None, ""), ({"a": 1}, '{"a":1}'), ("x", "x")])
def test_outputs_and_answers_of_a_response_without_text_are_read(output: Any, text: str) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": output}
    empty = {"type": "message", "role": "assistant", "content": None}
    question = {"type": None, **user("Go")}
    messages = read(RESPONSES, {"input": [question, empty, call, result]}).request.messages
    assert [one.content for one in messages] == ["Go", "", text]


def test_a_response_repeats_what_was_used() -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": {"a": TEXT}}}
    body = {
        **asked(RESPONSES), "instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.25, "top_p": 0.5,
        "max_output_tokens": 7, "tools": CODEX, "tool_choice": {"type": "function", "name": "now"},
        "parallel_tool_calls": False, "text": {"format": form}, "reasoning": {"effort": "low"},
    }  # fmt: skip
    told, events = answered(read(RESPONSES, body), RESPONSES, "now", "{}")
    assert events[0]["response"]["reasoning"]["effort"] == "low"
    same = set(body) - {"input", "tools", "text", "reasoning"}
    assert {name: told[name] for name in same} == {name: body[name] for name in same}
    assert told["text"]["format"] == form and told["reasoning"]["effort"] == "low"
    assert [one["type"] for one in told["tools"]] == ["function", "custom", "function"]


def test_a_form_and_tools_go_together() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "w", "schema": {"type": "object"}}}
    tools = [{"type": "function", "function": {"name": "go"}}]
    for choice in ("auto", "required", "none"):
        request = read(CHAT, {**asked(CHAT), "tools": tools, "tool_choice": choice, "response_format": form}).request
        assert request.grammar and request.calling.mode == choice
