"""Turns a JSON schema into a grammar: what the grammar allows is valid under the schema.

The reverse does not hold: properties come in the order of the schema, and others are written only where the schema
names none. Keywords that a grammar cannot enforce are refused; annotations and unknown formats are ignored, as the
specification (draft 2020-12) has it. The converters of llama.cpp and llama-cpp-python ignore what they cannot express.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Final, NoReturn
from urllib.parse import unquote

from cpuchat.base.errors import AmbiguousGrammar, UsageError
from cpuchat.grammar.gbnf import ROOT, check_grammar
from cpuchat.grammar.rules import SPACE, NumberBounds, Rules, literal, numbers, pattern_expression

Schema = dict[str, Any]

_REFUSED: Final = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "patternProperties",
    "propertyNames", "minProperties", "maxProperties", "contains", "minContains", "maxContains", "multipleOf",
    "unevaluatedItems", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_IN_USE: Final = (
    "type", "enum", "const", "anyOf", "oneOf", "properties", "required", "additionalProperties", "items", "prefixItems",
    "additionalItems", "minItems", "maxItems", "uniqueItems", "pattern", "format", "minLength", "maxLength", "minimum",
    "maximum", "exclusiveMinimum", "exclusiveMaximum", "unevaluatedProperties",
)  # fmt: skip
_LIMITS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_HINTS: Final = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "minLength", "maxLength"),
    "number": _LIMITS,
}
_COUNTS: Final = ("minItems", "maxItems", "minLength", "maxLength")
_KEYWORDS: Final[tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...]] = (
    (("properties",), lambda value: isinstance(value, dict), "an object"),
    (("required", "enum", "allOf", "anyOf", "oneOf", "prefixItems"), lambda value: isinstance(value, list), "a list"),
    (("pattern",), lambda value: isinstance(value, str), "a string"),
    (("type",), lambda value: isinstance(value, str | list), "a string or a list"),
    (("required", "type"), lambda value: all(isinstance(one, str) for one in value), "a list of strings"),
    (_LIMITS, lambda value: isinstance(value, int | float), "a number"),
    (_COUNTS, lambda value: _is_number(value) and value >= 0 and not value % 1, "0 or a positive integer"),
)
"""What the values of keywords must be, in the order of the checks."""
_FORMATS: Final = {"date": "date", "time": "time", "date-time": 'date "T" time', "uuid": "uuid"}
_MAX_DEPTH: Final = 60
_MAX_VISITS: Final = 20_000
_PER_VISIT: Final = 20  # values of an enum, or characters of a pattern, that take as long as a visit
_LONGEST_NAME: Final = 80  # of a property in a path
_LARGEST: Final = 10**15


def schema_grammar(schema: Any, source: str) -> str:
    """Return the grammar of JSON texts that are valid under `schema`, read from `source`.

    Raises:
        UsageError: invalid, or more than a grammar can say; names `source` and the place.
    """
    rules = Rules()
    _Converter(schema, source, rules, ROOT).define()
    grammar = rules.text()
    try:
        check_grammar(grammar, source)
    except AmbiguousGrammar:
        raise
    except UsageError as error:
        raise UsageError(f"{source}: the schema refers to itself without an end.", error.message) from None
    return grammar


def add_schema(schema: Any, source: str, rules: Rules, name: str) -> str:
    """Add the rules of a JSON schema to a grammar, which `check_grammar` checks; returns the name of its rule.

    Raises:
        UsageError: as `schema_grammar`.
    """
    rule = rules.reserve(name)
    _Converter(schema, source, rules, rule).define()
    return rule


class _Converter:
    def __init__(self, document: Any, source: str, rules: Rules, root: str) -> None:
        self._document = document
        self._source = source
        self._rules = rules
        self._root = root
        self._references = {"": root}
        self._depth = 0

    def define(self) -> None:
        self._rules.define(self._root, "")
        self._rules.built_in(SPACE)
        self._rules.define(self._root, self._body(self._document, "#"))

    def _fail(self, path: str, reason: str) -> NoReturn:
        raise UsageError(f"{self._source}: {path}: {reason}.", "Change the schema, or write a grammar (--grammar).")

    def _visit(self, schema: Any, path: str) -> str:
        """Return the name of the rule for `schema`."""
        if isinstance(schema, dict) and not _restricts(schema):
            if "$ref" in schema and "allOf" not in schema:
                return self._reference(schema["$ref"], path)
            if "$ref" not in schema and isinstance(parts := schema.get("allOf"), list) and len(parts) == 1:
                return self._visit(parts[0], f"{path}/allOf/0")
        return self._rules.add(_name(path), self._body(schema, path))

    def _reference(self, reference: Any, path: str) -> str:
        pointer, target = self._resolve(reference, path)
        if pointer not in self._references:
            self._references[pointer] = name = self._rules.reserve(_name(pointer))
            self._rules.define(name, self._body(target, f"#{pointer[:_LONGEST_NAME]}"))
        return self._references[pointer]

    def _resolve(self, reference: Any, path: str) -> tuple[str, Any]:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            self._fail(path, f"$ref {reference!r} does not lead to a place in this file (#/...)")
        target, pointer = self._document, unquote(reference[1:])
        for part in pointer.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdecimal() and int(key) < len(target):
                target = target[int(key)]
            else:
                self._fail(path, f"$ref {reference!r} leads nowhere")
        return pointer, target

    def _deeper(self, path: str, work: Callable[[], Any]) -> Any:
        """Return what `work` returns; a ValueError names `path`."""
        self._depth += 1
        self._rules.n_visited += 1
        if self._depth > _MAX_DEPTH:
            self._fail(path, "the schema is nested too deeply, or refers to itself without an end")
        if self._rules.n_visited > _MAX_VISITS:
            self._fail(path, "the schema is too large, with all that its references repeat")
        try:
            return work()
        except ValueError as error:
            self._fail(path, str(error))
        finally:
            self._depth -= 1

    def _merged(self, schema: Any, path: str) -> Schema:
        """Return `schema` as one object, without `$ref` and `allOf`, and without annotations.

        Raises:
            UsageError: not a schema, or a keyword that is not supported.
        """
        return self._deeper(path, lambda: self._merge_parts(self._checked(schema, path), path))

    def _merge_parts(self, schema: Schema, path: str) -> Schema:
        merged = {key: value for key, value in schema.items() if key in _IN_USE}
        if "$ref" in schema:
            merged = merge(self._merged(self._resolve(schema["$ref"], path)[1], path), merged)
        for i, part in enumerate(schema.get("allOf", ())):
            merged = merge(merged, self._merged(part, f"{path}/allOf/{i}"))
            self._rules.n_visited += _size(merged)
        self._rules.n_visited += _size(merged)
        return merged

    def _checked(self, schema: Any, path: str) -> Schema:
        """Return the schema as an object, after a check of its keywords' types."""
        if schema is True:
            return {}
        if schema is False:
            self._fail(path, "false allows nothing")
        if not isinstance(schema, dict):
            self._fail(path, "a schema is an object, true or false")
        for key in _REFUSED:
            if key in schema:
                self._fail(path, f"{key} is not supported")
        if schema.get("uniqueItems") is True:
            self._fail(path, "uniqueItems is not supported")
        for keys, is_right, what in _KEYWORDS:
            for key in keys:
                if key in schema and not is_right(schema[key]):
                    self._fail(path, f"{key} must be {what}")
        return schema

    def _body(self, schema: Any, path: str) -> str:
        return self._deeper(path, lambda: self._body_of(self._merged(schema, path), path))

    def _body_of(self, schema: Schema, path: str) -> str:
        for key in ("anyOf", "oneOf"):
            if key in schema:
                rest = {k: v for k, v in schema.items() if k != key}
                return self._alternatives(schema[key], rest, f"{path}/{key}")
        if "const" in schema or "enum" in schema:
            return self._rules.choice(self._values(schema), _name(path))
        kinds = schema.get("type") or next((k for k, keys in _HINTS.items() if any(key in schema for key in keys)), "")
        if not kinds:
            return self._rules.built_in("value")
        if isinstance(kinds, str):
            return self._typed(kinds, schema, path)
        kinds = dict.fromkeys(kinds)
        return " | ".join(self._rules.add(_name(path), self._typed(kind, schema, path)) for kind in kinds)

    def _alternatives(self, schemas: list[Any], rest: Schema, path: str) -> str:
        if not schemas:
            raise ValueError("it has no alternatives")
        names: list[str] = []
        texts: list[str] = []
        for i, schema in enumerate(schemas):
            place = f"{path}/{i}"
            if rest or _is_values(schema):
                schema = merge(rest, self._merged(schema, place))
            if _is_values(schema):
                texts += self._deeper(place, lambda values=schema: self._values(values))
            else:
                names.append(self._visit(schema, place))
        return " | ".join([*dict.fromkeys(names), *([self._rules.choice(texts, _name(path))] if texts else [])])

    def _values(self, schema: Schema) -> list[str]:
        """Return the JSON texts that `enum`, `const` and `type` allow."""
        values = [schema["const"]] if "const" in schema else schema["enum"]
        if "const" in schema and "enum" in schema:
            values = common(values, schema["enum"])
        if "type" in schema:
            kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            values = [value for value in values if any(_has_type(value, kind) for kind in kinds)]
        if not values:
            raise ValueError("no value of enum, const and type is left")
        return [_json(value) for value in values]

    def _typed(self, kind: Any, schema: Schema, path: str) -> str:
        match kind:
            case "object":
                return self._object(schema, path)
            case "array":
                return self._array(schema, path)
            case "string":
                return self._string(schema, path)
            case "number" | "integer":
                bounds = _bounds(schema, whole=kind == "integer")
                return self._rules.built_in(kind) if bounds is None else numbers(bounds, whole=kind == "integer")
            case "boolean" | "null":
                return self._rules.built_in(kind)
        raise ValueError(f"unknown type {kind!r}")

    def _object(self, schema: Schema, path: str) -> str:
        properties: dict[str, Any] = dict(schema.get("properties", {}))
        required = schema.get("required", [])
        properties |= {name: {} for name in required if name not in properties}
        needed = set(required)
        if not properties:
            extra = schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
            return self._map(extra, path)
        members: list[tuple[str, bool]] = []
        for name, value in properties.items():
            rule = self._visit(value, f"{path}/properties/{name[:_LONGEST_NAME]}")
            key = literal(_json(name))
            members.append((self._rules.add(f"{_name(name)}-kv", f'{key} ":" {SPACE} {rule}'), name in needed))
        if not any(is_required for _, is_required in members):
            return f'"{{" {SPACE} (({self._from(members, path)}) {SPACE})? "}}"'
        return f'"{{" {SPACE} ({self._from(members, path)}) {SPACE} "}}"'

    def _from(self, members: list[tuple[str, bool]], path: str) -> str:
        """Return alternatives for the members of an object, the first of which has no comma before it."""
        tails = [""]  # what may follow the members from the last one on
        for rule, is_required in reversed(members):
            term = f'"," {SPACE} {rule}' if is_required else f'("," {SPACE} {rule})?'
            tails.append(self._rules.add(f"{_name(path)}-rest", f"{term} {tails[-1]}".rstrip()))
        tails.reverse()
        parts: list[str] = []
        for i, (rule, is_required) in enumerate(members):
            parts.append(f"{rule} {tails[i + 1]}".rstrip())
            if is_required:
                break
        return " | ".join(parts)

    def _map(self, values: Any, path: str) -> str:
        """Return the body for an object with any names."""
        if values is False:
            return f'"{{" {SPACE} "}}"'
        if values is True or values == {}:
            return self._rules.built_in("object")
        value = self._visit(values, f"{path}/additionalProperties")
        pair = self._rules.add(f"{_name(path)}-kv", f'{self._rules.built_in("string")} ":" {SPACE} {value}')
        return f'"{{" {SPACE} ({pair} ("," {SPACE} {pair})* {SPACE})? "}}"'

    def _array(self, schema: Schema, path: str) -> str:
        items = schema.get("items", {})
        first, others = schema.get("prefixItems"), items
        if isinstance(items, list):
            first, others = items, schema.get("additionalItems", {})
        min_count, max_count = int(schema.get("minItems", 0)), schema.get("maxItems")
        max_count = None if max_count is None else int(max_count)
        first = (first or [])[:max_count]
        min_count -= len(first)
        if others is False or (first and others in (True, {})):
            max_count = max(min_count, 0)  # no more than needed
            if others is False and max_count:
                raise ValueError("minItems is more than the items it may have")
        elif max_count is not None:
            max_count -= len(first)
        if max_count is not None and min_count > max_count:
            raise ValueError("minItems is more than maxItems")
        names = [self._visit(item, f"{path}/prefixItems/{i}") for i, item in enumerate(first)]
        if max_count == 0:
            inner = f' "," {SPACE} '.join(names)
            return f'"[" {SPACE} {inner} {SPACE} "]"' if names else f'"[" {SPACE} "]"'
        item = self._visit(others, f"{path}/items")
        more = self._rules.add(f"{_name(path)}-more", f'"," {SPACE} {item}')
        if not names:
            names, max_count = [item], None if max_count is None else max_count - 1
            rest = self._rules.repeat(more, max(min_count - 1, 0), max_count) if max_count != 0 else ""
            inner = f"{item} {rest} {SPACE}"
            return f'"[" {SPACE} {inner} "]"' if min_count > 0 else f'"[" {SPACE} ({inner})? "]"'
        inner = f' "," {SPACE} '.join(names)
        return f'"[" {SPACE} {inner} {self._rules.repeat(more, max(min_count, 0), max_count)} {SPACE} "]"'

    def _string(self, schema: Schema, path: str) -> str:
        min_count, max_count = schema.get("minLength", 0), schema.get("maxLength")
        if "pattern" in schema:
            if min_count or max_count is not None:
                raise ValueError(
                    "pattern cannot be combined with minLength or maxLength: put the length in the pattern"
                )
            try:
                inside = pattern_expression(schema["pattern"], self._rules, _name(path))
            except ValueError as error:
                raise ValueError(f"the pattern {schema['pattern'][:_LONGEST_NAME]} {error}") from None
        elif min_count or max_count is not None:
            if max_count is not None and max_count < min_count:
                raise ValueError("minLength is more than maxLength")
            inside = self._rules.repeat(
                self._rules.built_in("char"), int(min_count), None if max_count is None else int(max_count)
            )
        elif (kind := str(schema.get("format"))) in _FORMATS:
            inside = _FORMATS[kind]
            for name in ("date", "time", "uuid"):
                if name in inside.split():
                    self._rules.built_in(name)
        else:
            return self._rules.built_in("string")
        return f'"\\"" {inside} "\\""'


def _size(schema: Schema) -> int:
    """Return how many visits the values of a schema's keywords are worth."""
    return sum(len(value) for value in schema.values() if isinstance(value, list | dict | str)) // _PER_VISIT


def _restricts(schema: Schema) -> bool:
    """Return whether something beside `$ref` and `allOf` restricts what is allowed."""
    return any(key in schema for key in (*_IN_USE, *_REFUSED))


def _is_values(schema: Any) -> bool:
    """Return whether a schema is nothing but values that are given one by one."""
    return (
        isinstance(schema, dict)
        and ("const" in schema or "enum" in schema)
        and not any(key in schema for key in ("$ref", "allOf", "anyOf", "oneOf"))
    )


def _json(value: Any) -> str:
    """Return the JSON text of a value, escaped where a half of a surrogate pair stands alone."""
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if any("\ud800" <= one <= "\udfff" for one in text) else text


def _name(path: str) -> str:
    """Return a name for the rule of a place: the last part of it that is one."""
    words = [part for part in path.split("/") if part not in ("#", "properties", "items", "anyOf", "oneOf", "allOf")]
    return next((word for word in reversed(words) if not word.isdecimal() and word), "value")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf


def _has_type(value: Any, kind: Any) -> bool:
    if kind in ("number", "integer"):
        return _is_number(value) and (kind == "number" or value % 1 == 0)
    kinds = {"string": str, "boolean": bool, "null": type(None), "object": dict, "array": list}
    return kind in kinds and isinstance(value, kinds[kind])


def _bounds(schema: Schema, *, whole: bool) -> NumberBounds | None:
    """Return the bounds of a number, None without any. Raises ValueError for those that are not supported."""
    ends: list[tuple[int | None, bool]] = []
    for key, open_key, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
        end, exclusive, is_open = schema.get(key), schema.get(open_key), False
        for name, value in ((key, end), (open_key, exclusive)):
            if value is not None and not _is_number(value) and not (name == open_key and isinstance(value, bool)):
                raise ValueError(f"{name} must be a number")
        if isinstance(exclusive, bool):  # draft 4
            is_open = exclusive
        elif exclusive is not None and (end is None or exclusive * sign >= end * sign):
            end, is_open = exclusive, True
        ends.append(_end(end, key, sign, is_open=is_open, whole=whole))
    (low, low_open), (high, high_open) = ends
    return None if low is None and high is None else NumberBounds(low, high, low_open, high_open)


def _end(value: float | None, key: str, sign: int, *, is_open: bool, whole: bool) -> tuple[int | None, bool]:
    if value is None or (abs(value) > _LARGEST and value * sign < 0):
        return None, False
    if abs(value) > _LARGEST:
        raise ValueError(f"{key} is too large: the limit is {_LARGEST:g}")
    if value % 1 and not whole:
        raise ValueError(f"{key} {value:g} is not an integer: a grammar cannot compare fractions")
    return (math.ceil(value) if sign > 0 else math.floor(value)), is_open and not value % 1


_LOWER = ("minLength", "minItems", "minimum", "exclusiveMinimum")
_UPPER = ("maxLength", "maxItems", "maximum", "exclusiveMaximum")


def merge(one: Schema, other: Schema) -> Schema:
    """Return a schema that allows what both allow.

    Raises:
        ValueError: they cannot be merged; the message says why.
    """
    closed = [s for s in (one, other) if s.get("additionalProperties") is False]
    properties = [set(s.get("properties", ())) for s in (one, other)]
    if closed and properties[0] != properties[1]:
        raise ValueError("additionalProperties: false cannot be combined with properties of another schema")
    merged = one | other
    for key in one.keys() & other.keys():
        a, b = one[key], other[key]
        if a == b:
            continue
        if key == "properties":
            merged[key] = a | {name: {"allOf": [a[name], value]} if name in a else value for name, value in b.items()}
        elif key == "required":
            merged[key] = list(dict.fromkeys([*a, *b]))
        elif key == "enum":
            merged[key] = common(a, b)
        elif key == "type":
            merged[key] = _both_types(_listed(a), _listed(b))
        elif key in _LOWER:
            merged[key] = max(a, b)
        elif key in _UPPER:
            merged[key] = min(a, b)
        else:
            raise ValueError(f"schemas with a different {key} cannot be combined")
    return merged


def common(values: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Return the JSON values that are among `others`: true is not 1, but 1 is 1.0."""
    kept = set(map(_key, others))
    return [value for value in values if _key(value) in kept]


def _key(value: Any) -> Hashable:
    """Return what is equal for equal JSON values."""
    if isinstance(value, dict):
        return frozenset((name, _key(one)) for name, one in value.items())
    return tuple(map(_key, value)) if isinstance(value, list) else (isinstance(value, bool), value)


def _listed(types: Any) -> list[Any]:
    return types if isinstance(types, list) else [types]


def _both_types(one: list[Any], other: list[Any]) -> list[Any]:
    one, other = list(dict.fromkeys(one)), list(dict.fromkeys(other))
    both = [kind for kind in one if kind in other or (kind == "integer" and "number" in other)]
    both += [kind for kind in other if kind == "integer" and "number" in one and kind not in both]
    if not both:
        raise ValueError(f"no value has the types {', '.join(map(str, one))} and {', '.join(map(str, other))}"[:200])
    return both
