"""Turns a JSON schema into a grammar of llguidance: what the grammar allows is valid under the schema.

The reverse does not hold: properties come in the order of the schema, others are written only where the schema names
none or asks for them, and white space is limited, because a model that may write it endlessly sometimes does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NoReturn
from urllib.parse import unquote

from cpuchat.base.errors import UsageError
from cpuchat.grammar.limits import FORM_HINT, MAX_LEVELS, check_lark

_REFUSED: Final = (
    "not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies", "propertyNames", "contains",
    "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_FORMATS: Final = (
    "date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
)  # fmt: skip
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OPENING: Final = ("additionalProperties", "patternProperties", "anyOf", "oneOf", "$ref")
_DATA: Final = ("const", "default", "example")
_MAX_SCHEMAS: Final = 10_000
_MAX_PROPERTIES: Final = 1_500  # of one object, whose time grows with their square
_MAX_ALL_PROPERTIES: Final = 6_000
_LONGEST_PATH: Final = 4_000  # characters of the place of a schema; each is remembered
_MAX_NEEDED: Final = 1_000_000  # looks at schemas that others need
_LONGEST_PATTERNS: Final = 20_000  # characters of all of them
_MAX_REFERRED: Final = 500  # levels of all schemas that are referred to, together
_NEGATED_CLASS: Final = re.compile(r"\\.|\[\^", re.DOTALL)
_OPTIONS: Final = {
    "whitespace_pattern": r"(?:| |\n{1,2}[ \t]{0,20})",
    "coerce_one_of": True,
    "json_allow_general_unicode_escapes": True,
    "lenient": False,
}


def schema_grammar(schema: Any, source: str) -> str:
    """Return the grammar of JSON texts that are valid under `schema`, read from `source`. Raises UsageError: invalid,
    or more than a grammar can say; names `source`, and the place where it is known."""
    grammar = json.dumps({"grammars": [{"json_schema": _prepared(schema, source)}]})
    check_lark(grammar, source)
    return grammar


def schema_expression(schema: Any, source: str) -> str:
    """Return the same as an expression in Lark, which `check_lark` checks. Raises UsageError, as `schema_grammar`."""
    return f"%json {json.dumps(_prepared(schema, source))}"


def _prepared(schema: Any, source: str) -> dict[str, Any]:
    return _Preparation(source).prepare(schema) | {"x-guidance": _OPTIONS}


class _Preparation:
    """Rewrites a schema for llguidance: without what it does not know and the specification lets be ignored, closed
    where only named properties are wanted, and with nothing refused, or so deep that its stack would overflow."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._schemas: list[dict[str, Any]] = []
        self._n_properties = self._pattern_length = 0
        self._levels: dict[str, int] = {}  # of the schema at each place
        self._references: set[str] = set()
        self._may_close = True

    def prepare(self, schema: Any) -> dict[str, Any]:
        """Return the schema. Raises UsageError."""
        if schema is False:
            self._fail("#", "false allows nothing")
        if not isinstance(schema, dict) and schema is not True:
            self._fail("#", "a schema is an object, true or false")
        try:
            self._may_close = '"allOf"' not in json.dumps(schema)  # where parts are merged, each may add properties
        except (ValueError, RecursionError):
            self._fail("#", "the schema is nested too deeply, or has too large a number")
        prepared, _ = self._schema(schema, "#", 0)
        deepest = self._levels.get("#", 0)
        if sum(self._levels.get(unquote(one), deepest) for one in self._references) > _MAX_REFERRED:
            self._fail("#", f"references lead through more than {_MAX_REFERRED} levels")
        if not isinstance(prepared, dict):
            return {}
        self._check_end(prepared)
        return prepared

    def _check_end(self, document: dict[str, Any]) -> None:
        """Check that a value of the schema need not contain another one without an end."""
        ending = set[int]()

        def ends(schema: Any) -> bool:
            return schema is not False if not isinstance(schema, dict) else id(schema) in ending

        target = cache(lambda reference: _target(document, reference))
        left, n_left, n_needed = self._schemas, -1, 0
        while len(left) != n_left and id(document) not in ending:
            n_left = len(left)
            for schema in left:
                needed = _needed(target, schema)
                choices = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
                n_needed += 1 + len(needed) + sum(map(len, choices))
                if n_needed > _MAX_NEEDED:
                    self._fail("#", "the schema is too large for its references")
                if all(map(ends, needed)) and all(any(map(ends, some)) for some in choices if some):
                    ending.add(id(schema))
            left = [schema for schema in left if id(schema) not in ending]
        if id(document) not in ending:
            self._fail("#", "the schema allows nothing, or refers to itself without an end")

    def _fail(self, path: str, reason: str) -> NoReturn:
        raise UsageError(f"{self._source}: {path}: {reason}.", FORM_HINT)

    def _schema(self, schema: Any, path: str, depth: int, *, is_part: bool = False) -> tuple[Any, int]:
        """Return the schema at `path`, and its levels. `is_part`: others say what else it takes."""
        if not isinstance(schema, dict):
            return schema, 1
        if depth > MAX_LEVELS or len(self._schemas) > _MAX_SCHEMAS or len(path) > _LONGEST_PATH:
            self._fail(path[:100], "the schema is nested too deeply, or too large")
        for key in _REFUSED:
            if key in schema and (key, schema[key]) != ("unevaluatedProperties", True):
                self._fail(path, f"{key} is not supported")
        found = {key: value for key, value in schema.items() if key not in ("x-guidance", "unevaluatedProperties")}
        if found.pop("uniqueItems", False):
            self._fail(path, "uniqueItems is not supported")
        if found.get("format") not in _FORMATS:
            found.pop("format", None)
        if isinstance(pattern := found.get("pattern"), str):
            # Negated classes exclude U+0000 too: llguidance (1.9) takes `[^"]` and `[^\\]` for any character at all.
            found["pattern"] = _NEGATED_CLASS.sub(lambda one: r"[^\x00" if one[0] == "[^" else one[0], pattern)
            self._pattern_length += len(pattern)
            if self._pattern_length > _LONGEST_PATTERNS:
                self._fail(path, f"patterns of more than {_LONGEST_PATTERNS:,} characters")
        if isinstance(reference := found.get("$ref"), str):
            self._references.add(reference)
        levels = self._children(found, path, depth)
        if isinstance(properties := found.get("properties"), dict):
            self._n_properties += len(properties)
            if len(properties) > _MAX_PROPERTIES or self._n_properties > _MAX_ALL_PROPERTIES:
                self._fail(path, f"more than {_MAX_PROPERTIES:,} properties, or {_MAX_ALL_PROPERTIES:,} in all")
            is_open = is_part or not self._may_close or any(key in found for key in _OPENING)
            required = found.get("required", [])
            if not is_open and isinstance(required, list) and all(name in properties for name in map(str, required)):
                found["additionalProperties"] = False
        self._levels[path] = levels
        self._schemas.append(found)
        return found, levels

    def _children(self, found: dict[str, Any], path: str, depth: int) -> int:
        """Rewrite the schemas in a schema; returns its levels."""
        children: list[tuple[Any, Any, str]] = []  # of each: what it is in, its key there, its place
        for key in _MAPS:
            if isinstance(value := found.get(key), dict):
                found[key] = dict(value)
                children += [(found[key], name, f"{path}/{key}/{_escaped(name)}") for name in value]
        for key in _LISTS:
            if isinstance(value := found.get(key), list):
                found[key] = list(value)
                children += [(found[key], n, f"{path}/{key}/{n}") for n in range(len(value))]
        others = [key for key, value in found.items() if isinstance(value, dict) and key not in (*_MAPS, *_DATA)]
        children += [(found, key, f"{path}/{_escaped(key)}") for key in others]  # anything may be referred to
        levels = 0
        is_part = "properties" in found
        for place, key, below in children:
            is_choice = place is found.get("anyOf") or place is found.get("oneOf")
            place[key], n = self._schema(place[key], below, depth + 1, is_part=is_part and is_choice)
            levels = max(levels, n)
        return levels + 1


def _needed(target: Callable[[str], Any], schema: dict[str, Any]) -> list[Any]:
    """Return the schemas of which each value of this schema has one; `target`: what a reference leads to."""
    needed = [target(schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
    needed += parts if isinstance(parts := schema.get("allOf"), list) else []
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and isinstance(required, list):
        needed += [properties.get(name) if isinstance(name, str) else None for name in required]
    if isinstance(least := schema.get("minItems"), int | float) and least > 0:
        first = parts if isinstance(parts := schema.get("prefixItems"), list) else []
        needed += first[: int(min(least, len(first)))]
        needed += [schema.get("items")] if least > len(first) else []
    return needed


def _target(document: Any, reference: str) -> Any:
    """Return what a reference leads to; None: nothing in this document, as llguidance says."""
    target = document
    for part in unquote(reference.removeprefix("#")).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list):
            target = dict(enumerate(target)).get(int(key)) if key.isdecimal() and len(key) < 9 else None
        else:
            target = target.get(key) if isinstance(target, dict) else None
    return target


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
