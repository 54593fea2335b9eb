"""Reads the calls of tools in what a model wrote, in the format that was learned for it.

What models write differs from what templates render in white space, in the numbers and ids of calls and in the order of
JSON keys; all of that is read. Others leave out the marks that their template asks for, as Qwen2.5 Coder does: JSON
alone, or in a code fence (`unmarked_calls`).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from cpuchat.protocol.messages import Tool, ToolCall
from cpuchat.tools.call_format import ID, KEY, PLAIN_QUOTES, CallFormat

_DECODER = json.JSONDecoder()
_OPENING_FENCE = re.compile(r"\s*(?:```(?:json)?\s*)?")
_FENCE_END = re.compile(r"\s*```")
_BARE_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)\s*:")


def json_object(text: str, at: int) -> tuple[dict[str, Any] | None, int]:
    """Return the JSON object at `at`, which may be in a code fence, and where it ends. None: it is another value. An
    end of -1: it is not complete, or no JSON."""
    begin = _OPENING_FENCE.match(text, at)
    assert begin is not None  # it may be empty
    try:
        value, end = _DECODER.raw_decode(text, begin.end())
    except (ValueError, RecursionError):
        return None, -1
    fence = _FENCE_END.match(text, end) if "`" in begin[0] else None
    return value if isinstance(value, dict) else None, fence.end() if fence is not None else end


def _typed_value(text: str, schema: Any, quote: str = "") -> Any:
    """Return a value without quotes, as the type that its schema gives. `quote`: in which strings inside it stand."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string":
        return text
    for read in (json.loads, _read_quoted(quote), ast.literal_eval):  # the last: templates that write None and True
        try:
            value = read(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if value is None or isinstance(value, str | int | float | dict | list):
            return value
    return text


def _may_be_text(schema: Any) -> bool:
    """Return whether a schema takes a string, among others."""
    if not isinstance(schema, dict):
        return False
    choices = [schema]
    for key in ("anyOf", "oneOf"):
        choices += one if isinstance(one := schema.get(key), list) else ()
    kinds = [one.get("type") for one in choices if isinstance(one, dict)]
    return any(kind == "string" or (isinstance(kind, list) and "string" in kind) for kind in kinds)


def _read_quoted(quote: str) -> Any:
    """Return a reader of JSON with other quotes around its strings and none around its keys."""

    def read(text: str) -> Any:
        parts = text.split(quote) if quote and quote not in PLAIN_QUOTES else [text]
        written = [json.dumps(one) if at % 2 else _BARE_KEY.sub(r'\1"\2":', one) for at, one in enumerate(parts)]
        return json.loads("".join(written))

    return read


def _string_end(text: str, at: int, quote: str) -> int:
    """Return where the string that begins at `at` ends; -1: nowhere. In plain quotes a backslash escapes."""
    while (end := text.find(quote, at)) >= 0:
        before = text[at:end]
        if quote not in PLAIN_QUOTES or (len(before) - len(before.rstrip("\\"))) % 2 == 0:
            return end
        at = end + 1
    return -1


def _unescaped(text: str, quote: str) -> str:
    """Return the content of a string that stood in quotes."""
    if quote not in PLAIN_QUOTES or "\\" not in text:
        return text
    try:
        return json.loads('"' + text.replace("\\'", "'") + '"', strict=False)
    except ValueError:
        return text


def _bare_value_end(text: str, at: int, quote: str) -> int:
    """Return where a value without quotes ends: at a comma or closing bracket that is not its own; -1: nowhere."""
    depth = 0
    while at < len(text):
        if quote and text.startswith(quote, at):
            if (at := _string_end(text, at + len(quote), quote)) < 0:
                return -1
            at += len(quote)
            continue
        if depth == 0 and text[at] in ",)}]":
            return at
        depth += (text[at] in "([{") - (text[at] in ")]}")
        at += 1
    return -1


MAX_CALLS = 64
_NAME = r"(?P<name>[\w.$:-]{1,256}?)(?![\w-])"
_LOOSE_NAME = _NAME + r"[^{}\n]{0,100}?(?=\{)"  # and what else stands before its arguments
_WHOLE_NAME = r"(?P<name>[\w.$:-]{1,256}+)"  # where nothing but white space follows
_KEY = r"(?P<key>[^\s<>=:/{}()\[\],\"']{1,256}?)"
_ID_IN_NAME = re.compile(r"(?:functions\.)?(?P<name>.+?):\d+")
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*?)\]\]>(?!\])", re.DOTALL)
_CDATA_BEGIN = re.compile(r"\s*<!\[CDATA\[")
_PARTS = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|\w+|[^\w\s]")


def parse_calls(
    form: CallFormat, text: str, tools: Sequence[Tool] = (), *, at_start: bool = True
) -> tuple[str, list[ToolCall]]:
    """Return what an answer says beside its calls, and the calls, complete ones only. `tools`: their schemas tell what
    a value without quotes is. `at_start`: the text begins an answer."""
    schemas = {tool.name: tool.parameters for tool in tools}
    said, written = form.split(text, tuple(schemas), at_start=at_start)
    calls, at = list[ToolCall](), 0
    try:
        while written and len(calls) < MAX_CALLS and (found := _next(form, written, at, schemas)) is not None:
            call, at = found
            calls.append(call)
    except RecursionError:  # values in values in values
        return text, []
    is_inside = bool(said) or not at_start
    if not calls or (form.is_bare and is_inside and any(call.name not in schemas for call in calls)):
        return text, []  # in the middle of a text an object with a name is a call only if a tool has it
    return "\n".join(filter(None, (said, _rest(form, written[at:])))), calls


def _next(form: CallFormat, text: str, start: int, schemas: dict[str, Any]) -> tuple[ToolCall, int] | None:
    """Return the next call from `start` on, and where it ends."""
    if form.shape == "object":
        return _next_object(form, text, start)
    if (found := find_name(form, text, start)) is None:
        return None
    name, id, begin = found
    if form.shape == "json":
        arguments, end = json_object(text, begin)
    else:
        arguments, end = dict[str, Any](), begin
        for key, value, after in read_pairs(form, text, begin, schemas.get(name) or {}):
            arguments[key], end = value, after
        # It ends as the format says, or without a marker that has no text.
        closing, rest = form.closing.strip(), text[end:].strip() if end >= 0 else ""
        visible = re.split(r"[<\[]", closing)[0].strip()
        if not rest.startswith(closing[:2]) and not (visible and rest == visible):
            end = -1
    if end < 0:
        return None
    return _call(name, id, arguments), _skip(text, end, form.closing)


def find_name(form: CallFormat, text: str, start: int) -> tuple[str, str, int] | None:
    """Return name and id of the next call from `start` on, and where its arguments begin."""
    named = _NAME if form.middle.strip() else _WHOLE_NAME
    found = _pattern(form.lead, named, form.middle).search(text, start)
    if found is None and form.shape == "json" and form.opening.strip():  # a channel or a kind in between
        found = _pattern(form.lead, _LOOSE_NAME).search(text, start)
    if found is None:
        return None
    ahead = form.between if start or text.startswith(form.between or "\0") else form.section
    if not form.opening.strip() and text[start : found.start()].strip() != ahead.strip():
        return None  # a name in a text, with nothing that marks it
    name, id = found["name"], ""
    if form.name_in_id and (parts := _ID_IN_NAME.fullmatch(name)) is not None:
        name, id = parts["name"], name
    return name, id, found.end()


def _next_object(form: CallFormat, text: str, start: int) -> tuple[ToolCall, int] | None:
    """Return the call at `start`, a JSON object; the first one is anywhere behind the trigger."""
    at = text.find("{")
    if start:
        behind = _skip(text, start, form.between)
        at = _skip(text, behind, form.opening)
        if form.opening.strip() and at == behind:
            return None
        at += len(text[at:]) - len(text[at:].lstrip())
    if text[at : at + 1] != "{":
        return None
    value, end = json_object(text, at)
    name = value.get(form.name_key) if value is not None else None
    if value is None or not isinstance(name, str) or not name:
        return None
    arguments = value.get(form.arguments_key, {})
    if isinstance(arguments, str):  # JSON in a string, as servers write it
        arguments = json_object(arguments, 0)[0] if arguments.strip() else {}
    id = next((str(value[key]) for key in ("id", "tool_call_id", "call_id") if key in value), "")
    return _call(name, id, arguments), _skip(text, end, form.closing)


def _call(name: str, id: str, arguments: Any) -> ToolCall:
    if not isinstance(arguments, dict):
        return ToolCall(name=name, id=id, problem="The arguments are not a JSON object.")
    return ToolCall(name=name, id=id, arguments=arguments)


def read_pairs(form: CallFormat, text: str, at: int, schema: Any) -> Iterator[tuple[str, Any, int]]:
    """Yield key and value of each argument from `at` on, and where it ends; -1, with the last: it does not."""
    style = form.pairs
    pair = _pattern(f" {style.opening.strip()}", _KEY, style.assignment.rstrip())
    while at >= 0 and skipped_closing(form, text, at) is None:
        match = pair.match(text, _skip(text, at, style.separator))
        if match is None:
            return
        key = match["key"]
        value, at = _value(form, text, match.end(), key, _schema_of(schema, key))
        yield key, value, at


def skipped_closing(form: CallFormat, text: str, at: int) -> int | None:
    """Return where the end of the call is passed, None when it is not at `at`."""
    if not form.closing.strip():
        return None
    end = _skip(text, at, form.closing)
    return end if text[at:end].strip() else None


def _value(form: CallFormat, text: str, at: int, key: str, schema: Any) -> tuple[Any, int]:
    """Return the value at `at` and where its pair ends; -1: it does not."""
    style = form.pairs
    quote = text[at : at + 1] if style.quote in PLAIN_QUOTES and text[at : at + 1] in PLAIN_QUOTES else style.quote
    if quote and text.startswith(quote, at):
        begin = at + len(quote)
        end = _string_end(text, begin, quote)
        if end < 0:
            return "", -1
        return _unescaped(text[begin:end], quote), _skip(text, end + len(quote), style.closing)
    closing = style.closing.strip().replace(KEY, key)
    if (members := _members(form, text, at, closing, schema)) is not None:
        return members
    if closing and (data := _CDATA.match(text, at)) is not None:
        return _typed_value(data[1], schema), _skip(text, data.end(), closing)
    if closing and _CDATA_BEGIN.match(text, at) is not None:
        return "", -1
    if closing:
        found = _pattern(closing).search(text, at)
        end, after = (found.start(), found.end()) if found is not None else (-1, -1)
    else:
        end = after = _bare_value_end(text, at, style.quote)
    if end < 0:
        return "", -1
    written = text[at:end]
    if style.assignment.endswith("\n"):
        written = written.removeprefix("\n")
    if style.closing.startswith("\n"):
        written = written.removesuffix("\n")
    return _typed_value(written, schema, style.quote), after


def _members(form: CallFormat, text: str, at: int, closing: str, schema: Any) -> tuple[Any, int] | None:
    """Return an object or array with members as pairs, or `item`s, as MiniMax M3 writes it; None: there is none."""
    style, kind = form.pairs, schema.get("type") if isinstance(schema, dict) else None
    mark = style.closing.partition(KEY)[2].removeprefix(style.assignment).strip()  # what begins each tag
    pair = _pattern(f" {style.opening.strip()}", _KEY, style.assignment.rstrip())
    first = _skip(text, at, mark)
    if KEY not in style.closing or not mark or _may_be_text(schema) or (first == at and kind != "array"):
        return None
    found, at = list[tuple[str, Any]](), first
    while (match := pair.match(text, at)) is not None:
        inner = _schema_of(schema, match["key"])
        value, at = _value(form, text, match.end(), match["key"], inner)
        if at < 0:
            return "", -1
        found.append((match["key"], value))
    end = _skip(text, at, closing.removeprefix(mark))
    if end == at:
        return None
    is_list = kind == "array" or (kind != "object" and all(key == "item" for key, _ in found))
    return ([value for _, value in found] if is_list else dict(found)), end


def _rest(form: CallFormat, text: str) -> str:
    """Return what follows the calls, without what ends them, of which some leave a part out."""
    text = text.strip()
    end = f"{form.end}{form.turn_end}"
    if "".join(f"{form.closing}{end}".split()).startswith("".join(text.split())):
        return ""
    for part in _PARTS.findall(end):
        if not text.startswith(part):
            break
        text = text[len(part) :].lstrip()
    return text


def _schema_of(schema: Any, key: str) -> Any:
    """Return the schema of a member, or of the items of an array; None when it is not told plainly."""
    if not isinstance(schema, dict):
        return None
    members = schema.get("properties")
    return members.get(key) if isinstance(members, dict) else schema.get("items")


@lru_cache(256)
def _pattern(literal: str, group: str = "", then: str = "") -> re.Pattern[str]:
    """Return a pattern for two literals and what is between them."""
    return re.compile(_lenient(literal) + group + _lenient(then))


def _lenient(literal: str) -> str:
    """Return a pattern for a literal: any white space where it has some, any number, any id."""
    parts = list[str]()
    for part in re.split(rf"(\s+|\d+|{ID})", literal):
        if part == ID:
            parts.append(r"[\w.:-]{0,256}?")
        elif part.isspace():
            parts.append(r"\s*")
        elif part.isdecimal():
            parts.append(r"\d+")
        else:
            parts.append(re.escape(part))
    return "".join(parts)


def _skip(text: str, at: int, literal: str) -> int:
    """Return the place behind a literal and the white space before it; `at` where it is not there."""
    found = _pattern(" " + literal.strip()).match(text, at) if literal.strip() else None
    return found.end() if found is not None else at


_FENCE = re.compile(r"\s*`{1,3}(?:(?<=```)(?:j(?:s(?:on?)?)?)?\s*)?")  # its end may be missing
_NAME_WITHIN = 200  # characters
_DOUBLED = re.compile(r"\{(?=\s*\{)")  # the template of Qwen2.5 Coder shows a call in two braces
_DOUBLED_END = re.compile(r"\s*\}?\s*(?:```)?")
_UNMARKED_NAME = re.compile(r"[\w.-]{1,64}")
_ANY_NAME = re.compile(r'\{"name":"[\w.-]{1,64}"')
_NAME_BEGINS = re.compile(r'\{"name":"[\w.-]{0,64}')
_ARGUMENTS = ',"arguments":{'


def may_begin(text: str) -> bool:
    """Return whether an answer that begins with `text` may be a call: of a tool that exists or of another."""
    fence = _FENCE.match(text)
    body = "".join(text[fence.end() if fence is not None else 0 :][:_NAME_WITHIN].split())
    body = body[1:] if body.startswith("{{") else body
    if (named := _ANY_NAME.match(body)) is not None:
        rest = body[named.end() :]
        return rest.startswith(_ARGUMENTS) or _ARGUMENTS.startswith(rest)
    return bool(body or fence) and ('{"name":"'.startswith(body) or _NAME_BEGINS.fullmatch(body) is not None)


def unmarked_calls(text: str, tools: Sequence[Tool]) -> tuple[str, list[ToolCall]]:
    """Return what an answer says behind the calls with which it begins, and the calls: objects with the name of one of
    these tools and an object of arguments. One of another name is a call only with nothing beside its arguments."""
    names, calls, at = {tool.name for tool in tools}, list[ToolCall](), 0
    while True:
        fence = _FENCE.match(text, at)
        doubled = _DOUBLED.match(text, fence.end() if fence is not None else at)
        value, end = json_object(text, doubled.end() if doubled is not None else at)
        name, arguments = (value.get("name"), value.get("arguments", {})) if value is not None else ("", {})
        if end < 0 or value is None or not isinstance(name, str) or not isinstance(arguments, dict):
            return text[at:], calls
        if name not in names and (set(value) != {"name", "arguments"} or _UNMARKED_NAME.fullmatch(name) is None):
            return text[at:], calls
        calls.append(ToolCall(name=name, arguments=arguments))
        after = _DOUBLED_END.match(text, end) if doubled is not None else None
        at = after.end() if after is not None else end
