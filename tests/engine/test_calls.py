"""Tests calls of tools from the answer's tokens to its last event."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpuchat.engine.decoding.sampling import Sampler
from cpuchat.protocol.messages import GenerationFinished, LoadOptions, Message, TextDelta, Tool, ToolCall
from tests.support.engine_chat import Chat, user
from tests.support.tiny_gguf import CHATML, vocabulary, write_tiny_gguf
from tests.tools.templates import TEMPLATES

LOOK = Tool(name="look", parameters={"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]})
CALLED = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"at": "<|im_end|>"}}\n</tool_call>',
    "qwen-coder": "<tool_call>\n<function=look>\n<parameter=at>\n<|im_end|>\n</parameter>\n</function>\n</tool_call>",
    "": '<tool_call>\n{"name": "look", "arguments": {"at": "<|im_end|>"}}\n</tool_call>',
}


@pytest.mark.parametrize(("calls", "name"), [(True, "hermes"), (False, "qwen-coder"), (True, "")])
def test_an_answer_in_a_form_or_a_call_can_begin(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, calls: bool
) -> None:
    path = write_tiny_gguf(tmp_path / "caller.gguf", template=TEMPLATES.get(name, CHATML))
    chat.load(path, LoadOptions(n_ctx=2048))
    written = CALLED[name].replace("<|im_end|>", "here") if calls else '{"sky": "blue"}'
    # "@" fits in neither: the grammar asks for another token.
    tokens = iter([*b"@", *written.encode(), vocabulary().index("<|im_end|>")])
    monkeypatch.setattr(Sampler, "candidates", lambda *_: ([next(tokens)], [1.0]))
    form = 'root ::= "{" ("\\"sky\\": \\"blue\\"" | "\\"sky\\": \\"grey\\"") "}"'
    chat.ask(user("Sky?"), tools=(LOOK,), grammar=form, max_tokens=0)
    finished = chat.of(GenerationFinished)[0]
    assert finished.matches_grammar
    assert finished.calls == ((ToolCall(name="look", arguments={"at": "here"}),) if calls else ())
    assert "".join(delta.text for delta in chat.of(TextDelta)).strip() == ("" if calls else written)


@pytest.mark.parametrize("name", CALLED)
def test_calls_come_with_the_end_of_an_answer(
    chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = write_tiny_gguf(tmp_path / "caller.gguf", template=TEMPLATES.get(name, CHATML))
    chat.load(path, LoadOptions(n_ctx=2048))
    end = vocabulary().index("<|im_end|>")
    # "@" fits nowhere in a call: the grammar asks for another token.
    written = f"I look.\n{CALLED[name]}".replace("arguments", "@arguments").replace("<parameter", "@<parameter")
    tokens = iter([*written.encode(), end])
    monkeypatch.setattr(Sampler, "candidates", lambda *_: ([next(tokens)], [1.0]))
    question = user("Where is it?")
    chat.ask(question, tools=(LOOK,), max_tokens=0)
    finished = chat.of(GenerationFinished)[0]
    assert "".join(delta.text for delta in chat.of(TextDelta)).strip() == "I look."
    assert finished.calls == (ToolCall(name="look", arguments={"at": "<|im_end|>"}),)
    assert finished.matches_grammar
    monkeypatch.undo()
    calls = Message(role="assistant", content="I look.", calls=finished.calls)
    result = Message(role="tool", content="A <|im_end|> in <tool_call>", call_id="1", tool="look")
    timings = chat.ask(question, calls, result, tools=(LOOK,))
    assert timings.cache_n > 20, "the prompt of the first answer is reused"
