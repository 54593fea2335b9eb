"""What llama.cpp's parser reads in answers with calls of tools, as recorded by benchmarks/templates.py."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from cpuchat.engine.prompt.chat_template import ChatTemplate, TemplateHelper, TemplateRejection
from cpuchat.engine.text.reasoning import ReasoningSplitter
from cpuchat.engine.text.text_stream import CallSplitter
from cpuchat.protocol.messages import Tool
from cpuchat.tools.call_format import CallFormat

FILE = Path(__file__).with_name("llama_calls.json.gz")


class Reading(msgspec.Struct, frozen=True):
    """What was read in an answer; each call as its name and its arguments in JSON."""

    said: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]


class Output(msgspec.Struct, frozen=True):
    """An answer, and what llama.cpp reads in it: `tools` counts in `Recording.tools`, `tail` is the end of the prompt,
    `cut`: the answer stops before its end. `name`: of a case of benchmarks/templates.py, or "test" for an answer of
    llama.cpp's own tests."""

    name: str
    text: str
    tools: int
    tail: str
    expected: Reading
    cut: bool = False


class Recorded(msgspec.Struct):
    """A template: what it makes of the chats that are rendered to learn its calls, and answers in its form. `hints` are
    the texts of the template that tell what marks reasoning."""

    hints: str = ""
    renderings: dict[str, str | None] = {}
    outputs: list[Output] = []


class Recording(msgspec.Struct):
    """All of it. `source` names the templates' origin."""

    source: str
    tools: list[list[Tool]]
    templates: dict[str, Recorded]


@cache
def recording() -> Recording:
    return msgspec.json.decode(gzip.decompress(FILE.read_bytes()), type=Recording)


@cache
def learned(name: str) -> CallFormat:
    """Return the form of calls of a recorded template."""
    return ChatTemplate(RecordedHelper(recording().templates[name]), "", "").call_format


class RecordedHelper(TemplateHelper):
    """Renders what was recorded."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    def render(self, variables: dict[str, Any]) -> str:
        key = rendering_key(variables)
        assert key in self._recorded.renderings, "learning renders another chat: record with benchmarks/templates.py"
        if (text := self._recorded.renderings[key]) is None:
            raise TemplateRejection("")
        return text


def rendering_key(variables: dict[str, Any]) -> str:
    lasting = {name: value for name, value in variables.items() if name != "datetime"}
    return hashlib.sha256(json.dumps(lasting, sort_keys=True).encode()).hexdigest()[:16]


def read(form: CallFormat, recorded: Recorded, output: Output, tools: Sequence[Tool]) -> Reading:
    """Return what cpuchat reads, on the way that the text of an answer takes."""
    splitter = CallSplitter(ReasoningSplitter(output.tail, recorded.hints), form, tools)
    pieces = []
    for at in range(0, len(output.text), 7):
        pieces += splitter.feed(output.text[at : at + 7])
    pieces += splitter.flush()
    said, reasoning = ("".join(text for channel, text in pieces if channel == one) for one in ("answer", "reasoning"))
    calls = tuple((call.name, call.problem or as_json(call.arguments)) for call in splitter.calls)
    return Reading(said, reasoning, calls)


def as_json(value: Any) -> str:
    """Return JSON that is the same for equal values."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def same(found: Reading, output: Output) -> bool:
    """Return whether both are the same but for white space. Of an answer that was cut off the whole calls count:
    llama.cpp gives the last one, too, with as much as there is of its arguments."""
    expected = output.expected
    if output.cut:
        return found.calls == expected.calls
    texts = [(one.said.split(), one.reasoning.split()) for one in (found, expected)]
    return found.calls == expected.calls and texts[0] == texts[1]
