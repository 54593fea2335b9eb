"""The grammar that calls of tools must match, from where they begin.

White space around what a format consists of is free, and what ends all calls may be missing: models differ in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from cpuchat.errors import UsageError
from cpuchat.grammar.characters import any_but
from cpuchat.grammar.gbnf import ROOT, check_grammar
from cpuchat.grammar.rules import SPACE, Rules, literal
from cpuchat.grammar.schema import add_schema
from cpuchat.tool_calls import Tool
from cpuchat.tools.call_format import ID, KEY, CallFormat

_ANY_OBJECT: Final = {"type": "object"}
_ANY_ID: Final = "[0-9A-Za-z_.:-]{1,64}"
_ID_PAIR: Final = rf'"\"" ("id" | "tool_call_id" | "call_id") "\":" space "\"" {_ANY_ID} "\""'
_MARKERS: Final = re.compile(r"<[^<>]*>|[^<]+|<")
_SCALARS: Final = ("integer", "number", "boolean", "null")
_NESTED: Final = ("object", "array")
_PLAIN_QUOTES: Final = ('"', "'")


def call_grammar(form: CallFormat, tools: Sequence[Tool]) -> str:
    """Return the grammar (GBNF) of one or more calls, from `form.trigger` on; "" where none can say it."""
    if not tools:
        return ""
    rules = Rules()
    rules.define(ROOT, "")
    rules.built_in(SPACE)
    writer = _CallWriter(form, rules)
    rules.define("call", "")
    rules.define("call", " | ".join(map(writer.call, tools)))
    # Without anything between two calls, more could not be told from text.
    between = writer.lenient(form.between.strip())
    more = f"({_joined(SPACE, between, between and SPACE)} call)*" if (form.between + form.opening).strip() else ""
    end = ""
    for part in reversed(_MARKERS.findall(form.end)):  # some of which may come after the model's last token
        end = f"({_joined(SPACE, writer.lenient(part.strip()), end)})?" if part.strip() else end
    section = _joined(writer.lenient(form.section.strip()), SPACE) if form.section.strip() else ""
    rules.define(ROOT, _joined(section, "call", more, end))
    grammar = rules.text()
    try:
        check_grammar(grammar, "tools")
    except UsageError:  # a schema that refers to itself without an end
        return ""
    return grammar


class _CallWriter:
    """Writes the rules of calls in one format."""

    def __init__(self, form: CallFormat, rules: Rules) -> None:
        self._form = form
        self._rules = rules
        self._marks: dict[str, str] = {}

    def call(self, tool: Tool) -> str:
        """Return the expression of a call of this tool."""
        form, name = self._form, literal(tool.name)
        before, after = self.lenient(form.opening.lstrip()), self.lenient(form.closing)
        if form.shape == "object":
            return _joined(before, self._object(tool), after)
        if form.name_in_id:
            name = f'"functions." {name} ":" [0-9]{{1,3}}'
        arguments = self._arguments(tool) if form.shape == "json" else self._pairs(tool)
        return _joined(before, name, self.lenient(form.middle), arguments, after)

    def lenient(self, text: str) -> str:
        """Return the expression of a literal with free white space, any number, and any id."""
        parts = list[str]()
        for part in re.split(rf"(\s+|\d+|{ID})", text):
            if part == ID:
                parts.append(self._rules.add("call-id", _ANY_ID))
            elif part.isdecimal():  # as some number their calls
                parts.append("[0-9]{1,6}")
            elif part:
                parts.append(SPACE if part.isspace() else literal(part))
        return " ".join(parts)

    def _object(self, tool: Tool) -> str:
        id_pair = self._rules.add("id-pair", _ID_PAIR)
        name = f"{literal(json.dumps(self._form.name_key))} space {literal(':')} space {literal(json.dumps(tool.name))}"
        key = literal(json.dumps(self._form.arguments_key))
        return (
            f'"{{" space ({id_pair} space "," space)? {name} space "," space'
            f' {key} space ":" space {self._arguments(tool)} (space "," space {id_pair})? space "}}"'
        )

    def _arguments(self, tool: Tool) -> str:
        """Return the rule of a tool's arguments as JSON."""
        return self._value(tool.parameters, f"call-{tool.name}", _ANY_OBJECT)

    def _value(self, schema: Any, name: str, otherwise: Any) -> str:
        """Return the rule of a value in JSON; that of `otherwise` if a grammar cannot say it: the call is checked."""
        try:
            return add_schema(schema, name, self._rules, name)
        except UsageError:
            return add_schema(otherwise, name, self._rules, name)

    # Arguments one by one

    def _pairs(self, tool: Tool) -> str:
        """Return the expression of the arguments, in any order; which are missing is checked later."""
        style, pairs = self._form.pairs, list[str]()
        properties = tool.parameters.get("properties")
        for key, schema in properties.items() if isinstance(properties, dict) else ():
            start = _joined(self.lenient(style.opening.strip()), literal(key), self.lenient(style.assignment))
            value = self._written(schema if isinstance(schema, dict) else {}, f"call-{tool.name}-{key}", key)
            pairs.append(_joined(start, value))
        if not pairs:
            return ""
        pair = self._rules.add(f"call-{tool.name}-pair", " | ".join(pairs))
        many = f"{pair} ({self.lenient(style.separator) or SPACE} {pair})*"
        return f"{SPACE} {many if tool.parameters.get('required') else f'({many})?'} {SPACE}"

    def _written(self, schema: dict[str, Any], name: str, key: str) -> str:
        """Return the expression of the value of a key and what closes its pair."""
        style, kind, values = self._form.pairs, schema.get("type"), schema.get("enum")
        end, quote = style.closing.replace(KEY, key), style.quote
        closing = self.lenient(end)
        if isinstance(values, list) and values and all(isinstance(one, str) for one in values):
            return _joined(f"({self._rules.choice((f'{quote}{one}{quote}' for one in values), name)})", closing)
        is_json = quote in ("", *_PLAIN_QUOTES) and KEY not in style.closing
        if kind == "boolean" and quote in _PLAIN_QUOTES:  # as in Python
            return _joined('("True" | "False" | "true" | "false")', closing)
        if kind in _NESTED and quote in _PLAIN_QUOTES:
            return _joined(f"({self._value(schema, name, {})} | {self._own_value(quote)})", closing)
        if kind in _SCALARS or (kind in _NESTED and is_json):
            return _joined(self._value(schema, name, {}), closing)
        if not quote:
            return self._until(end.strip() or "\n")
        return _joined(self._string(quote) if kind == "string" else self._own_value(quote), closing)

    def _string(self, quote: str) -> str:
        """Return the rule of a text in quotes."""
        if quote not in _PLAIN_QUOTES:
            return self._rules.add("quoted", f"{literal(quote)} {self._until(quote)}")
        backslash = "\\"
        inside = f"({any_but(quote + backslash)} | {literal(backslash)} {any_but('')})*"
        return self._rules.add("quoted", f"{literal(quote)} {inside} {literal(quote)}")

    def _own_value(self, quote: str) -> str:
        """Return the rule of a value as in JSON, with other quotes around texts, and around keys plain ones only."""
        for name in ("number", "boolean", "null"):
            self._rules.built_in(name)
        value = "own-value"
        key = self._string(quote) if quote in _PLAIN_QUOTES else "[0-9A-Za-z_.-]{1,64}"
        self._rules.define("own-pair", f'{key} ":" {SPACE} {value}')
        self._rules.define(
            value,
            f'"{{" (own-pair ("," {SPACE} own-pair)*)? "}}" | "[" ({value} ("," {SPACE} {value})*)? "]"'
            f" | {self._string(quote)} | number | boolean | null",
        )
        return value

    def _until(self, mark: str) -> str:
        """Return the rule of any text up to and with `mark`, from the automaton of Knuth, Morris and Pratt."""
        if mark in self._marks:
            return self._marks[mark]
        names = [self._rules.reserve("until") for _ in mark]
        self._marks[mark] = names[0]
        for at, name in enumerate(names):
            steps = dict[str, int]()
            for character in mark[: at + 1]:
                text = mark[:at] + character
                steps[character] = next(n for n in range(len(text), -1, -1) if text.endswith(mark[:n]))
            known = "".join(character for character, state in steps.items() if state)
            parts = [_joined(literal(one), names[steps[one]] if steps[one] < len(mark) else "") for one in known]
            self._rules.define(name, " | ".join([*parts, f"{any_but(known)} {names[0]}"]))
        return names[0]


def _joined(*parts: str) -> str:
    return " ".join(filter(None, parts))
