"""Makes the grammar of calls in a format, with the arguments that the tools' schemas allow."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import msgspec

from cpuchat.base.errors import UsageError
from cpuchat.grammar.limits import check_lark
from cpuchat.grammar.schema import schema_expression, schema_grammar
from cpuchat.protocol.messages import Tool
from cpuchat.tools.call_format import ID, KEY, PLAIN_QUOTES, CallFormat

_MAX_GRAMMAR: Final = 1 << 17
"""Characters of a grammar; larger ones can take seconds to compile."""
_MAX_CHECKED: Final = 32 << 10
"""Bytes of schemas that are checked one by one when they are too much together."""
_MARKERS: Final = re.compile(r"<[^<>]*>|[^<]+|<")
_SCALARS: Final = ("integer", "number", "boolean", "null")
_NESTED: Final = ("object", "array")
_TEXT: Final = r"[^\x00-\x08\x0B-\x1F\x7F]"
_ANY_ID: Final = "[0-9A-Za-z_.:-]{1,64}"
_RULES: Final = rf"""
sp: (/ |\n{{1,2}}[ \t]{{0,20}}/)?
id_pair: ("\"id\"" | "\"tool_call_id\"" | "\"call_id\"") sp ":" sp /"{_ANY_ID}"/
"""


def call_grammar(form: CallFormat, tools: Sequence[Tool], *, single: bool = False) -> str:
    """Return the grammar, in Lark, of one or more calls from `form.trigger` on; `single`: of one call. Tools that are
    not strict take any object if their schemas are too much; "" if those of strict ones are, or there are no tools."""
    if not tools:
        return ""
    lax = [tool for tool in tools if not tool.strict]
    for loose in (lambda: (), lambda: _unusable(lax), lambda: lax)[: 3 if lax else 1]:
        with contextlib.suppress(UsageError):
            grammar = _CallWriter(form, {tool.name for tool in loose()}).write(tools, single=single)
            if len(grammar) <= _MAX_GRAMMAR:
                check_lark(grammar, "tools")
                return grammar
    return ""


def _unusable(tools: Sequence[Tool]) -> Iterator[Tool]:
    """Yield the tools that no grammar can hold to their schemas; of many large ones, not all are checked."""
    sizes = [(len(msgspec.json.encode(tool.parameters)), n) for n, tool in enumerate(tools)]
    left = _MAX_CHECKED
    for size, n in sorted(sizes):
        left -= size
        try:
            is_usable = left >= 0 and bool(schema_grammar(tools[n].parameters, tools[n].name))
        except UsageError:
            is_usable = False
        if not is_usable:
            yield tools[n]


class _CallWriter:
    """Writes the rules of calls in one format, of the tools named in `loose` with any arguments."""

    def __init__(self, form: CallFormat, loose: Collection[str]) -> None:
        self._form = form
        self._loose = loose
        self._names: dict[str, str] = {}  # of rules, by their bodies

    def write(self, tools: Sequence[Tool], *, single: bool) -> str:
        """Return the grammar. Raises UsageError: the schema of a strict tool cannot be used."""
        form = self._form
        calls = " | ".join(map(self._call, sorted(tools, key=lambda tool: not tool.strict)))
        # Without anything between two calls, more could not be told from text.
        can_tell = (form.between + form.opening).strip() and not single
        more = f"({_joined('sp', _lenient(form.between.strip()), 'sp call')})*" if can_tell else ""
        end = ""
        for part in reversed(_MARKERS.findall(form.end)):  # some of which may come after the model's last token
            end = f"({_joined('sp', _lenient(part.strip()), end)})?" if part.strip() else end
        section = f"{_lenient(form.section.strip())} sp" if form.section.strip() else ""
        rules = "".join(f"{name}{body}\n" for body, name in self._names.items())
        return f"start: {_joined(section, 'call', more, end)}\ncall: {calls}\n{rules}{_RULES}"

    def _rule(self, body: str) -> str:
        """Return the name of a rule; `body` begins with a colon, or the attributes before it."""
        return self._names.setdefault(body, f"r{len(self._names)}")

    def _call(self, tool: Tool) -> str:
        form, name = self._form, _quoted(tool.name)
        before, after = _lenient(form.opening.lstrip()), _lenient(form.closing)
        if form.shape == "object":
            written = (
                f'"{{" sp (id_pair sp "," sp)? {_quoted(json.dumps(form.name_key))} sp ":" sp'
                f' {_quoted(json.dumps(tool.name))} sp "," sp {_quoted(json.dumps(form.arguments_key))} sp ":" sp'
                f' {self._arguments(tool)} (sp "," sp id_pair)? sp "}}"'
            )
            return _joined(before, written, after)
        if form.name_in_id:
            name = f'"functions." {name} ":" /[0-9]{{1,3}}/'
        arguments = self._arguments(tool) if form.shape == "json" else self._pairs(tool)
        return _joined(before, name, _lenient(form.middle), arguments, after)

    def _arguments(self, tool: Tool) -> str:
        if tool.strict:
            return self._rule(f": {schema_expression(tool.parameters, tool.name)}")
        is_object = tool.name not in self._loose and tool.parameters.get("type", "object") == "object"
        return self._value(tool.parameters if is_object else {}, otherwise={"type": "object"})

    def _value(self, schema: Any, otherwise: Any = True) -> str:
        """Return the rule of a value in JSON; of `otherwise` if a grammar cannot say it: the call is checked."""
        try:
            return self._rule(f": {schema_expression(schema or otherwise, 'tools')}")
        except UsageError:
            return self._rule(f": {schema_expression(otherwise, 'tools')}")

    # Arguments one by one

    def _pairs(self, tool: Tool) -> str:
        """Return the expression of the arguments, in any order; which are missing is checked later. Those of a strict
        tool come in the order of the schema, the required ones all."""
        style, pairs = self._form.pairs, list[str]()
        properties, required = tool.parameters.get("properties"), tool.parameters.get("required") or ()
        in_order = tool.strict and not style.separator.strip()
        for key, schema in properties.items() if isinstance(properties, dict) else ():
            schema = schema if isinstance(schema, dict) and tool.name not in self._loose else {}
            start = _joined(_lenient(style.opening.strip()), _quoted(key), _lenient(style.assignment))
            one = _joined(start, self._written(schema, key))
            if in_order:
                one = f"{one} sp" if key in required else f"({one} sp)?"
            pairs.append(one)
        if not pairs:
            return ""
        if in_order:
            return _joined("sp", *pairs)
        pair = self._rule(f": {' | '.join(pairs)}")
        many = f"{pair} ({_lenient(style.separator) or 'sp'} {pair})*"
        return f"sp {many if required else f'({many})?'} sp"

    def _written(self, schema: dict[str, Any], key: str) -> str:
        style, kind, values = self._form.pairs, schema.get("type"), schema.get("enum")
        end, quote = style.closing.replace(KEY, key), style.quote
        closing = _lenient(end)
        if isinstance(values, list) and values and all(isinstance(one, str) for one in values):
            mark = _pattern(quote)
            return _joined(self._rule(f": /{mark}({'|'.join(map(_pattern, values))}){mark}/"), closing)
        is_json = quote in ("", *PLAIN_QUOTES) and KEY not in style.closing
        if kind == "boolean" and quote in PLAIN_QUOTES:  # as in Python
            return _joined('("True" | "False" | "true" | "false")', closing)
        if kind in _NESTED and quote in PLAIN_QUOTES:
            return _joined(f"({self._value(schema)} | {self._own_value(quote)})", closing)
        if kind in _SCALARS or (kind in _NESTED and is_json):
            return _joined(self._value(schema), closing)
        if not quote:
            return self._until(end.strip() or "\n")
        return _joined(self._string(quote) if kind == "string" else self._own_value(quote), closing)

    def _string(self, quote: str) -> str:
        """Return the rule of a text in quotes."""
        if quote not in PLAIN_QUOTES:
            return self._rule(f": {_quoted(quote)} {self._until(quote)}")
        return self._rule(rf": /{quote}({_TEXT[:-1]}{quote}\\]|\\{_TEXT})*{quote}/")

    def _own_value(self, quote: str) -> str:
        """Return the rule of a value as in JSON, with other quotes around texts, and around keys plain ones only."""
        string = self._string(quote)
        key = string if quote in PLAIN_QUOTES else r"/[0-9A-Za-z_.\-]{1,64}/"
        scalar = self._value({"type": ["number", "boolean", "null"]})
        pair = f'{key} ":" sp own'
        members = f'"{{" ({pair} ("," sp {pair})*)? "}}" | "[" (own ("," sp own)*)? "]"'
        self._names[f": {members} | {string} | {scalar}"] = "own"
        return "own"

    def _until(self, mark: str) -> str:
        """Return the rule of any text up to and with the first `mark`."""
        return self._rule(f"[lazy]: /{_TEXT}*{_pattern(mark)}/")


def _joined(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _quoted(text: str) -> str:
    """Return a literal in Lark; "" for an empty one."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _pattern(text: str) -> str:
    """Return a regular expression for a text."""
    return "".join(one if one.isalnum() or one in " _" else f"\\x{{{ord(one):X}}}" for one in text)


def _lenient(text: str) -> str:
    """Return the expression of a literal with free white space, any number, and any id."""
    parts, before = list[str](), ""
    for part in filter(None, re.split(rf"(\s+|\d+|{ID})", text)):
        if part == ID:
            parts.append(f"/{_ANY_ID}/")
        elif part.isdecimal():  # as some number their calls
            parts.append("/[0-9]{1,6}/")
        elif part.isspace():
            parts.append("sp")
        elif before == ID:  # where the id ends is told by what follows
            parts[-1] = f"/{_ANY_ID}{_pattern(part)}/"
        else:
            parts.append(_quoted(part))
        before = part
    return " ".join(parts)
