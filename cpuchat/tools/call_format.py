"""How a model writes calls of tools in its answer, and reading them.

A format is learned from the model's chat template (`learning`). What models write differs from what templates render
in white space, in the numbers and ids of calls and in the order of JSON keys; all of that is read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

from cpuchat.protocol import Data
from cpuchat.tool_calls import Tool, ToolCall
from cpuchat.tools.values import (
    PLAIN_QUOTES,
    bare_value_end,
    json_object,
    may_be_text,
    string_end,
    typed_value,
    unescaped,
)

ID = "\0"
"""Stands for the id of a call in the texts of a format, or another word: any."""
KEY = "\1"
"""Stands for the key of an argument in what closes it."""
_MOST_CALLS = 64
_NAME = r"(?P<name>[\w.$:-]{1,256}?)(?![\w-])"
_WHOLE_NAME = r"(?P<name>[\w.$:-]{1,256}+)"  # where nothing but white space follows
_KEY = r"(?P<key>[^\s<>=:/{}()\[\],\"']{1,256}?)"
_ID_IN_NAME = re.compile(r"(?:functions\.)?(?P<name>.+?):\d+")
_MARKER_FIRST = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")
_VARIES = re.compile(rf"[\s\d\"{ID}]|(?<!^)\{{")  # where what a model writes may differ from the template
_MARKER = re.compile(r"[<\[|>(=]\S{2,}")
_LAST_MARKER = re.compile(r"[<\[][^<>\[\]\s]+[>=]?\s*$|[<\[][^<>\[\]]+=\"$")  # which leads to the name of a call
_LOOSE_MARKERS = re.compile(r"(?:\s*<\|[^<>|]*\|>\w*)+\s*$")  # before a call that names its channel
_CDATA = re.compile(r"\s*<!\[CDATA\[(.*?)\]\]>(?!\])", re.DOTALL)
_PARTS = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|\w+|[^\w\s]")

Shape = Literal["object", "json", "pairs"]


class PairStyle(Data, frozen=True):
    """How arguments stand one by one: `opening` key `assignment` value `closing`, with `separator` between two.

    A string is between two `quote`; "" writes it as it is.
    """

    opening: str = ""
    assignment: str = ""
    closing: str = ""
    separator: str = ""
    quote: str = ""


class CallFormat(Data, frozen=True):
    """How calls are written: `section`, then calls with `between` two of them, then `end`. `turn_end` ends any
    answer, `text_end`, with which `section` begins, any text.

    "object": a call is a JSON object with the keys `name_key` and `arguments_key`, in `opening` and `closing`. "json":
    `opening` name `middle` arguments as JSON `closing`. "pairs": as "json", but the arguments are written as `pairs`
    says. `name_in_id`: an id such as `functions.search:0` stands for the name. `arguments_as_text`: the template takes
    arguments as JSON in a string.
    """

    shape: Shape
    section: str = ""
    opening: str = ""
    middle: str = ""
    closing: str = ""
    between: str = ""
    end: str = ""
    turn_end: str = ""
    text_end: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    pairs: PairStyle = PairStyle()
    name_in_id: bool = False
    arguments_as_text: bool = False

    @property
    def trigger(self) -> str:
        """Return the text with which calls begin, up to where it can differ."""
        start = f"{self.section}{self.opening}".lstrip()
        if not start and self.shape == "object":
            return "{"
        if (marker := _MARKER_FIRST.match(start.removeprefix(self.text_end))) is not None:
            return f"{self.text_end}{marker[0]}"
        varies = _VARIES.search(start)
        return start[: varies.start()] if varies is not None else start

    @property
    def literals(self) -> str:
        """Return all texts of the format together."""
        pairs = self.pairs
        around = self.section, self.opening, self.middle, self.closing, self.between, self.end
        return "".join((*around, pairs.opening, pairs.assignment, pairs.closing, pairs.separator, pairs.quote))

    @property
    def only_at_start(self) -> bool:
        """Return whether the trigger is ordinary text, which begins a call only where an answer begins."""
        return _MARKER.search(self.trigger) is None

    def starts(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the texts that begin a call of one of these tools only where an answer begins."""
        if self._is_headless:
            return tuple(f"{name}{self.middle}" for name in names)
        return (self.trigger,) if self.only_at_start and self.trigger else ()

    def triggers(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the texts that begin a call of one of these tools wherever they stand."""
        if self._is_headless:
            return tuple(f"{self.between}{name}{self.middle}" for name in names) if self.between.strip() else ()
        if not self.only_at_start:
            lead = self._lead.strip()
            return tuple(dict.fromkeys((self.trigger, lead if _MARKER.search(lead) else self.trigger)))
        if self.shape != "object":
            return ()
        key = f'{{"{self.name_key}":'
        return (
            (f"\n{key}", '\n{"type": "function",')
            if self._is_bare
            else (f"{self.section}{self.opening}{key}".lstrip(),)
        )

    @property
    def _is_bare(self) -> bool:
        """Return whether nothing tells a call from another JSON object."""
        return self.trigger == "{"

    @property
    def _is_headless(self) -> bool:
        """Return whether a call begins with its name; what leads to it is in the prompt, as with Functionary."""
        return self.shape == "json" and not f"{self.section}{self.opening}".strip()

    @property
    def _lead(self) -> str:
        """Return what stands right before a name; models leave out the markers that may precede it."""
        opening = self.opening.lstrip()
        found = _LAST_MARKER.search(opening) if self.shape != "object" else None
        return found[0] if found is not None else opening

    def find(self, text: str, names: Sequence[str], *, at_start: bool = True) -> int:
        """Return where calls of tools with these names begin in a text; -1: nowhere.

        Args:
            at_start: the text begins an answer.
        """
        if at_start and text.lstrip().startswith(self.starts(names) or ("\0",)):
            return 0
        return min((at for trigger in self.triggers(names) if (at := text.find(trigger)) >= 0), default=-1)

    def split(self, text: str, names: Sequence[str] = (), *, at_start: bool = True) -> tuple[str, str]:
        """Return what an answer says before its calls, and the calls."""
        at = self.find(text, names, at_start=at_start)
        return (text, "") if at < 0 else (self.without_channel(text[:at]).rstrip(), text[at:])

    def without_channel(self, said: str) -> str:
        """Return what is said before calls without the markers that name their channel."""
        return _LOOSE_MARKERS.sub("", said) if self.in_channel else said

    @property
    def in_channel(self) -> bool:
        """Return whether markers that tell a channel may stand before a call."""
        return not self.only_at_start and self.trigger[:1] not in "<["

    def parse(self, text: str, tools: Sequence[Tool] = (), *, at_start: bool = True) -> tuple[str, list[ToolCall]]:
        """Return what an answer says beside its calls, and the calls, complete ones only.

        Args:
            tools: their schemas tell what a value without quotes is.
            at_start: the text begins an answer.
        """
        schemas = {tool.name: tool.parameters for tool in tools}
        said, written = self.split(text, tuple(schemas), at_start=at_start)
        calls, at = list[ToolCall](), 0
        try:
            while written and len(calls) < _MOST_CALLS and (found := self._next(written, at, schemas)) is not None:
                call, at = found
                calls.append(call)
        except RecursionError:  # values in values in values
            return text, []
        is_inside = bool(said) or not at_start
        if not calls or (self._is_bare and is_inside and any(call.name not in schemas for call in calls)):
            return text, []  # in the middle of a text an object with a name is a call only if a tool has it
        return "\n".join(filter(None, (said, self._rest(written[at:])))), calls

    def _next(self, text: str, start: int, schemas: dict[str, Any]) -> tuple[ToolCall, int] | None:
        """Return the next call from `start` on, and where it ends."""
        if self.shape == "object":
            return self._next_object(text, start)
        named = _NAME if self.middle.strip() else _WHOLE_NAME
        found = _pattern(self._lead, named, self.middle).search(text, start)
        if found is None and self.shape == "json" and self.opening.strip():  # a channel or a kind in between
            found = _loose_pattern(self._lead).search(text, start)
        if found is None:
            return None
        ahead = self.between if start or text.startswith(self.between or "\0") else self.section
        if not self.opening.strip() and text[start : found.start()].strip() != ahead.strip():
            return None  # a name in a text, with nothing that marks it
        name, id = found["name"], ""
        if self.name_in_id and (parts := _ID_IN_NAME.fullmatch(name)) is not None:
            name, id = parts["name"], name
        problem = ""
        if self.shape == "json":
            arguments, end = json_object(text, found.end())
        else:
            arguments, end = self._pairs(text, found.end(), schemas.get(name) or {})
        if end < 0:
            return None
        if arguments is None:
            arguments, problem = {}, _NO_OBJECT
        return ToolCall(name=name, arguments=arguments, id=id, problem=problem), _skip(text, end, self.closing)

    def _next_object(self, text: str, start: int) -> tuple[ToolCall, int] | None:
        """Return the call at `start`, a JSON object; the first one is anywhere behind the trigger."""
        at = text.find("{")
        if start:
            behind = _skip(text, start, self.between)
            at = _skip(text, behind, self.opening)
            if self.opening.strip() and at == behind:
                return None
            at += len(text[at:]) - len(text[at:].lstrip())
        if text[at : at + 1] != "{":
            return None
        value, end = json_object(text, at)
        name = value.get(self.name_key) if value is not None else None
        if value is None or not isinstance(name, str) or not name:
            return None
        arguments = value.get(self.arguments_key, {})
        if isinstance(arguments, str):  # JSON in a string, as servers write it
            arguments = json_object(arguments, 0)[0] if arguments.strip() else {}
        id = next((str(value[key]) for key in ("id", "tool_call_id", "call_id") if key in value), "")
        if isinstance(arguments, dict):
            call = ToolCall(name=name, arguments=arguments, id=id)
        else:
            call = ToolCall(name=name, id=id, problem=_NO_OBJECT)
        return call, _skip(text, end, self.closing)

    def _pairs(self, text: str, at: int, schema: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Return the arguments from `at` on, and where they end; -1: they do not."""
        found, style = dict[str, Any](), self.pairs
        pair = _pattern(f" {style.opening.strip()}", _KEY, style.assignment.rstrip())
        while self._skipped_closing(text, at) is None:
            match = pair.match(text, _skip(text, at, style.separator))
            if match is None:
                break
            key = match["key"]
            found[key], at = self._value(text, match.end(), key, _schema_of(schema, key))
            if at < 0:
                return found, -1
        return found, at if self._closes(text[at:].strip()) else -1

    def _closes(self, rest: str) -> bool:
        """Return whether a call ends with `rest`: as the format says, or without a marker that has no text."""
        closing = self.closing.strip()
        visible = re.split(r"[<\[]", closing)[0].strip()
        return rest.startswith(closing[:2]) or (bool(visible) and rest == visible)

    def _skipped_closing(self, text: str, at: int) -> int | None:
        """Return where the end of the call is passed, None when it is not at `at`."""
        if not self.closing.strip():
            return None
        end = _skip(text, at, self.closing)
        return end if text[at:end].strip() else None

    def _value(self, text: str, at: int, key: str, schema: Any) -> tuple[Any, int]:
        """Return the value at `at` and where its pair ends; -1: it does not."""
        style = self.pairs
        quote = text[at : at + 1] if style.quote in PLAIN_QUOTES and text[at : at + 1] in PLAIN_QUOTES else style.quote
        if quote and text.startswith(quote, at):
            begin = at + len(quote)
            end = string_end(text, begin, quote)
            if end < 0:
                return "", -1
            return unescaped(text[begin:end], quote), _skip(text, end + len(quote), style.closing)
        closing = style.closing.strip().replace(KEY, key)
        if (members := self._members(text, at, closing, schema)) is not None:
            return members
        if closing and (data := _CDATA.match(text, at)) is not None:
            return typed_value(data[1], schema), _skip(text, data.end(), closing)
        if closing:
            found = _pattern(closing).search(text, at)
            end, after = (found.start(), found.end()) if found is not None else (-1, -1)
        else:
            end = after = bare_value_end(text, at, style.quote)
        if end < 0:
            return "", -1
        written = text[at:end]
        if style.assignment.endswith("\n"):
            written = written.removeprefix("\n")
        if style.closing.startswith("\n"):
            written = written.removesuffix("\n")
        return typed_value(written, schema, style.quote), after

    def _members(self, text: str, at: int, closing: str, schema: Any) -> tuple[Any, int] | None:
        """Return an object or array that is written as values are, with its keys or `item`, as MiniMax M3 does; None
        where there is none.
        """
        style, kind = self.pairs, schema.get("type") if isinstance(schema, dict) else None
        mark = style.closing.partition(KEY)[2].removeprefix(style.assignment).strip()  # what begins each tag
        pair = _pattern(f" {style.opening.strip()}", _KEY, style.assignment.rstrip())
        first = _skip(text, at, mark)
        if KEY not in style.closing or not mark or may_be_text(schema) or (first == at and kind != "array"):
            return None
        found, at = list[tuple[str, Any]](), first
        while (match := pair.match(text, at)) is not None:
            inner = _schema_of(schema, match["key"])
            value, at = self._value(text, match.end(), match["key"], inner)
            if at < 0:
                return "", -1
            found.append((match["key"], value))
        end = _skip(text, at, closing.removeprefix(mark))
        if end == at:
            return None
        is_list = kind == "array" or (kind != "object" and all(key == "item" for key, _ in found))
        return ([value for _, value in found] if is_list else dict(found)), end

    def _rest(self, text: str) -> str:
        """Return what follows the calls, without what ends them, of which some leave a part out."""
        text = text.strip()
        end = f"{self.end}{self.turn_end}"
        if "".join(f"{self.closing}{end}".split()).startswith("".join(text.split())):
            return ""
        for part in _PARTS.findall(end):
            if not text.startswith(part):
                break
            text = text[len(part) :].lstrip()
        return text


_NO_OBJECT = "The arguments are not a JSON object."


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


@lru_cache(16)
def _loose_pattern(opening: str) -> re.Pattern[str]:
    """Return a pattern for a name and what else stands before its arguments."""
    return re.compile(_lenient(opening) + _NAME + r"[^{}\n]{0,100}?(?=\{)")


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
