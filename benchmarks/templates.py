"""Calls of tools in answers: what cpuchat reads with what llama.cpp's own parser does, template by template.

    python benchmarks/templates.py [--record] [--show]

For all chat templates in llama.cpp's models/templates that render calls. The answers: fixed calls, as the template
writes them (rendered by llama.cpp), and all answers with tools in llama.cpp's own tests of its parser
(tests/test-chat.cpp). llama.cpp's side is llama_calls.cpp on libraries that are built the first time (build_llama.py).
`--record` writes what tests/tools reads, `--show` prints each answer that is read otherwise.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from build_llama import ROOT, installed_version
from common import HERE, MeasureError, Row, Target, arguments, machine, report, run_main, say, table
from llama_calls import SOURCE, Reference

sys.path.insert(0, str(HERE.parent))

from cpuchat.engine.prompt.chat_template import ChatTemplate, TemplateHelper, TemplateRejection
from cpuchat.engine.text.reasoning import FORMATS
from cpuchat.protocol.messages import Message, Tool
from cpuchat.tools.call_format import GENERIC, CallFormat
from tests.tools.llama_calls import FILE, Output, Reading, Recorded, Recording, as_json, read, rendering_key, same

TEMPLATES = "models/templates"
TAIL = 60  # characters of the prompt's end
SAID = "Everything is fine"
THOUGHT = "I should look."
USER = {"role": "user", "content": "Hello"}
TEXT = {"type": "string"}
TOOLS = [
    Tool(
        name="look_up",
        description="Look up the weather",
        parameters={
            "type": "object",
            "properties": {"city": TEXT, "days": {"type": "integer"}, "exact": {"type": "boolean"}},
            "required": ["city"],
        },
    ),
    Tool(
        name="save_note",
        description="Save a note",
        parameters={
            "type": "object",
            "properties": {
                "text": TEXT,
                "where": {"type": "object", "properties": {"folder": TEXT, "page": {"type": "integer"}}},
                "tags": {"type": "array", "items": TEXT},
                "ratio": {"type": "number"},
            },
            "required": ["text"],
        },
    ),
    Tool(name="list_all", description="List everything", parameters={"type": "object", "properties": {}}),
]
LOOK = ("look_up", {"city": "Bern", "days": 3, "exact": True})
NESTED = {
    "text": "x",
    "where": {"folder": "a b", "page": 7},
    "tags": ["one", "two, three"],
    "ratio": -0.25,
}
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """An answer to be read: text, then calls; `thought` comes before all. It may be cut off behind `cut`, in a value of
    the last call.
    """

    name: str
    calls: tuple[Call, ...] = ()
    said: str = ""
    thought: str = ""
    cut: str = ""


def _note(name: str, text: str) -> Case:
    return Case(name, (("save_note", {"text": text}),))


CASES = (
    Case("text", said='It is 3 < 4, and f(x) = {1}: see [here](a) or "there".'),
    Case("one call", (LOOK,)),
    Case("two calls", (LOOK, ("save_note", {"text": "done"}))),
    Case("text, call", (LOOK,), said="I will look it up."),
    Case("text, two calls", (LOOK, ("look_up", {"city": "Basel"})), said="First this: then that."),
    _note("quotes", 'She said "no", it\'s a \\ fine'),
    _note("newlines", "def f(x):\n    return {x: [1, 2]}\n\nprint('\\n')"),
    _note("unicode", "Zürich 東京 🙂"),
    _note("braces", "{a} [b] (c) }} <d> </e> ]]"),
    Case("nested", (("save_note", NESTED),)),
    Case("numbers", (("look_up", {"city": "12", "days": -4, "exact": False}),)),
    Case("no arguments", (("list_all", {}),)),
    Case("thought, call", (LOOK,), thought=THOUGHT),
    Case("thought, text", said="It rains.", thought=THOUGHT),
    Case("cut", (LOOK,), cut="Be"),
    Case("cut in the second", (LOOK, ("save_note", {"text": "some longer text"})), cut="some long"),
)


# --- the answers ---


def rendered(reference: Reference, template: str, case: Case) -> Iterator[dict[str, Any]]:
    """Give questions with the answer as the template writes it, likelier ones first: what ends it, and how reasoning is
    closed, is not quite known.
    """
    base = {
        "template": template,
        "tools": [one.declaration() for one in TOOLS],
        "parallel": True,
        "thinking": bool(case.thought),
        "reasoning": True,
        "outputs": [],
    }
    answer: dict[str, Any] = {"role": "assistant", "content": case.said}
    if case.calls:
        answer["tool_calls"] = [
            {"id": f"call{index:05}", "type": "function", "function": {"name": name, "arguments": json.dumps(values)}}
            for index, (name, values) in enumerate(case.calls)
        ]
    prompt = reference.ask(**base, messages=[USER])
    plain, full = (
        reference.ask(**base, messages=[USER, one], generate=False)["prompt"]
        for one in ({"role": "assistant", "content": SAID}, answer)
    )
    before, _, end = plain.partition(SAID)
    heads = (before, prompt["prompt"])
    start = next((len(one) for one in heads if full.startswith(one)), max(_shared(one, full) for one in heads))
    body = full[start:].removesuffix(end)
    tags = re.compile(r"\s*(?:<[^<>\s]+>|\[[A-Z_/]+\])\w*\s*$")
    if case.calls and case.said not in body:  # the template leaves out what is said before calls
        body = f"{case.said}\n{body.lstrip()}"
    bodies = [body]
    while tags.search(bodies[-1]) and len(bodies) < 8:
        bodies.append(tags.sub("", bodies[-1]))
    bodies = dict.fromkeys([*bodies, *(one.strip() for one in bodies)])
    for one in [*bodies, body.replace("True", "true").replace("False", "false")]:  # some write Python's
        for lead in _leads(prompt, case):
            text = lead + one
            text = text[: text.index(case.cut) + len(case.cut)] if case.cut and case.cut in text else text
            yield {**base, "messages": [USER], "outputs": [{"text": text, "partial": bool(case.cut)}]}


def _shared(head: str, text: str) -> int:
    """Return how much of a head a text begins with; not with the first letters of two markers that differ."""
    n = next(
        (at for at, two in enumerate(zip(head, text, strict=False)) if two[0] != two[1]), min(len(head), len(text))
    )
    return n if n == len(head) else max(text.rfind(end, 0, n) + 1 for end in ">]\n ")


def _leads(prompt: dict[str, Any], case: Case) -> list[str]:
    """Return what may come before the text of an answer, to open and to close its reasoning."""
    opening, closings = prompt["opening"], prompt["closings"]
    is_open = bool(opening.strip()) and prompt["generation"].rstrip().endswith(opening.strip())
    if case.thought:
        first = "" if is_open else opening
        return [f"{first}{case.thought}{closing}{space}" for closing in closings for space in ("", "\n", "\n\n")]
    closed = [f"{closing}{space}" for closing in closings for space in ("", "\n")]
    return closed if is_open else ["", *closed]


def fixed(reference: Reference, template: str) -> Iterator[tuple[Output, Case]]:
    """Give the answers of `CASES` that llama.cpp reads as what they are."""
    for case in CASES:
        whole = case.calls[:-1] if case.cut else case.calls
        wanted = Reading(case.said, case.thought, tuple((name, as_json(values)) for name, values in whole))
        try:
            for question in rendered(reference, template, case):
                output = asked(reference, question, 0, case.name)
                if output is not None and case.cut:  # llama.cpp gives the last call, too, with a part of its arguments
                    expected = msgspec.structs.replace(output.expected, calls=output.expected.calls[: len(whole)])
                    output = msgspec.structs.replace(output, expected=expected)
                if output is not None and same(wanted, output):
                    yield output, case
                    break
        except MeasureError:
            continue


def asked(reference: Reference, question: dict[str, Any], tools: int, name: str) -> Output | None:
    """Return an answer with what llama.cpp reads in it; None when it rejects it."""
    reply = reference.ask(**question)
    (output,), (result,) = question["outputs"], reply["results"]
    if "error" in result:
        return None
    calls = []
    for index, call in enumerate(result["calls"]):
        try:
            values = as_json(json.loads(call["arguments"] or "{}"))
        except ValueError:
            if not output["partial"] or index < len(result["calls"]) - 1:
                return None
            values = call["arguments"]
        calls.append((call["name"], values))
    return Output(
        name=name,
        text=output["text"],
        tools=tools,
        tail=reply["prompt"][-TAIL:],
        expected=Reading(result["said"], result["reasoning"], tuple(calls)),
        cut=output["partial"],
    )


# --- cpuchat's side ---


class RecordingHelper(TemplateHelper):
    """Renders, and keeps what was rendered."""

    def __init__(self, source: str, recorded: Recorded) -> None:
        super().__init__(source)
        self._recorded = recorded

    def render(self, variables: dict[str, Any]) -> str:
        key = rendering_key(variables)
        try:
            text = super().render(variables)
        except TemplateRejection:
            self._recorded.renderings[key] = None
            raise
        self._recorded.renderings[key] = text
        return text


@dataclass
class Result:
    """What came out for a template. `learning` is in ms, once a chat was rendered."""

    name: str
    form: CallFormat
    learning: float
    recorded: Recorded
    lost: list[str] = field(default_factory=list[str])
    others: list[tuple[Output, Reading]] = field(default_factory=list[tuple[Output, Reading]])


def learned(name: str) -> Result:
    source = (SOURCE / TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    hints = "\n".join(sorted({form.hint for form in FORMATS if form.hint and form.hint in source}))
    recorded = Recorded(hints=hints, renderings={}, outputs=[])
    helper = RecordingHelper(source, recorded)
    try:
        template = ChatTemplate(helper, "", "")
        template.render([Message(role="user", content="Hello")])
        begin = time.perf_counter()
        form = template.call_format
        return Result(name, form, (time.perf_counter() - begin) * 1000, recorded)
    finally:
        helper.close()


def main() -> None:
    options = arguments(
        __doc__,
        lambda parser: parser.add_argument("--record", action="store_true", help="write what tests/tools reads"),
        lambda parser: parser.add_argument("--show", action="store_true", help="print answers that are read otherwise"),
        lambda parser: parser.add_argument("--only", default="", help="templates whose name contains this"),
    )
    where = machine()
    tools: list[list[Tool]] = [TOOLS]
    results: list[Result] = []
    reference = Reference()
    try:
        tested = reference.tested()
        for file in sorted((SOURCE / TEMPLATES).glob("*.jinja")):
            if options.only.lower() not in file.stem.lower():
                continue
            result = learned(file.stem)
            if result.form is GENERIC and "tool_calls" not in file.read_text(encoding="utf-8"):
                continue  # it knows no calls
            _compare(reference, result, tested.get(file.stem, []), tools)
            if not any(output.expected.calls for output in result.recorded.outputs):
                say(f"  {file.stem}: llama.cpp reads no calls")
                continue
            results.append(result)
            say(f"  {file.stem}: {len(result.recorded.outputs)} answers, {len(result.others)} read otherwise")
    finally:
        reference.close()
    _tell(results, options, where)
    if options.record:
        _record(results, tools)


def _compare(reference: Reference, result: Result, tested: list[dict[str, Any]], tools: list[list[Tool]]) -> None:
    outputs = [output for output, _case in fixed(reference, f"{TEMPLATES}/{result.name}.jinja")]
    result.lost = [case.name for case in CASES if case.name not in {output.name for output in outputs}]
    for question in tested:
        question["reasoning"] = True  # split, as servers do by default
        functions = [declared["function"] for declared in question["tools"]]
        offered = [
            Tool(name=one["name"], description=one.get("description", ""), parameters=one.get("parameters") or {})
            for one in functions
        ]
        if offered not in tools:
            tools.append(offered)
        try:
            output = asked(reference, question, tools.index(offered), "test")
        except MeasureError:
            continue
        if output is not None and output not in outputs:
            outputs.append(output)
    result.recorded.outputs = outputs
    for output in outputs:
        found = read(result.form, result.recorded, output, tools[output.tools])
        if not same(found, output):
            result.others.append((output, found))


def _tell(results: list[Result], options: argparse.Namespace, where: Any) -> None:
    if options.show:
        for result in results:
            print(f"=== {result.name}: {result.form}")
            for output, found in result.others:
                print(f"--- {output.name} (cut: {output.cut}, tail {output.tail!r})")
                print(f"    text  {output.text!r}\n    llama {output.expected}\n    ours  {found}")
    rows = [
        (
            one.name,
            one.form.shape if one.form is not GENERIC else "–",
            f"{one.learning:.0f}",
            f"{len(one.recorded.outputs) - len(one.others)} of {len(one.recorded.outputs)}",
            ", ".join(one.lost) or "–",
        )
        for one in results
    ]
    print(table(rows, ("template", "shape", "ms to learn", "read alike", "cases that llama.cpp does not read")))
    answers = [len(one.recorded.outputs) for one in results]
    alike = sum(answers) - sum(len(one.others) for one in results)
    whole = sum(not one.others for one in results)
    rows_out = [
        Row(f"templates, of {len(results)}, all whose answers are read alike", "templates", [whole], target=Target(20)),
        Row(f"answers read alike, of {sum(answers)}", "answers", [alike]),
        Row("learning a template's calls", "ms", [one.learning for one in results]),
    ]
    report("templates", where, rows_out, quick=bool(options.quick or options.only))


def _record(results: list[Result], tools: list[list[Tool]]) -> None:
    commit = re.search(r'LLAMA_COMMIT = "(\w+)"', (ROOT / "plain/common/build-info.cpp").read_text())
    about = f"llama-cpp-python {installed_version()}, llama.cpp {commit[1] if commit else '?'}, {TEMPLATES} (MIT)"
    content = Recording(source=about, tools=tools, templates={one.name: one.recorded for one in results})
    FILE.write_bytes(gzip.compress(msgspec.json.encode(content), mtime=0))
    say(f"wrote {FILE}: {FILE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    run_main(main)
