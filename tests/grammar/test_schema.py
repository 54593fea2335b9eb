"""Tests that a schema's grammar allows valid JSON and nothing else."""

from __future__ import annotations

import json
import random
import re
import string
from typing import Any

import pytest

from cpuchat.base.errors import UsageError
from cpuchat.grammar.schema import schema_grammar
from tests.grammar.conftest import Matches, matcher

TREE = {"type": "object", "properties": {"name": {"type": "string"}, "kids": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["name", "kids"]}  # fmt: skip
DEFS = {
    "$defs": {
        "a/b~c": {"enum": ["é", "日本", 'say "\\"', None, 1.5, {"x": [True]}]},
        "list": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"next": {"$ref": "#/$defs/list"}},
                                              "required": ["next"]}]},
    }
}  # fmt: skip

CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "anything": (
        True,
        ['{"a": [1, -2.5e3, "x\\u00e9\\n"], "b": {}}', "null", "[]", '"日本"'],
        ["", "{", "01", "-", '"\\ud800"', '"a\nb"', "nul", "[1,]", "'a'", "{} "],
    ),
    "object": (
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}, "c": {"type": "null"}},
         "required": ["b"]},
        ['{"b": true}', '{"a":1,"b":false}', '{\n  "a": -3,\n  "b": true,\n  "c": null\n}', '{"b":true,"c":null}'],
        ["{}", '{"a":1}', '{"b":true,"a":1}', '{"b":true,"d":1}', '{"b":true,}', '{"b":1}', '{,"b":true}'],
    ),
    "required without a schema": ({"required": ["k"]}, ['{"k": [1]}'], ["{}"]),
    "tree": (TREE, ['{"name":"a","kids":[{"name":"b","kids":[]}]}'], ['{"name":"a"}', '{"name":"a","kids":[1]}']),
    "references": (
        {**DEFS, "properties": {"v": {"$ref": "#/$defs/a~1b~0c"}, "l": {"$ref": "#/$defs/list"}},
         "required": ["v", "l"]},
        ['{"v": "é", "l": null}', '{"v": "日本","l":{"next":{"next":null}}}', '{"v": "say \\"\\\\\\"", "l": null}',
         '{"v": {"x": [true]}, "l": null}'],
        ['{"v": "e", "l": null}', '{"v": "é", "l": {}}', '{"v": true, "l": null}'],
    ),
    "arrays": (
        {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
         "minItems": 1},
        ["[[true]]", "[[true, false], [false]]", "[ [true] ]"],
        ["[]", "[[]]", "[[true,true,true]]", "[true]", "[[true],]"],
    ),
    "tuples": (  # as SDKs send those of Python
        {"type": "array", "prefixItems": [{"type": "integer"}, {"enum": ["a", "b"]}], "items": False,
         "minItems": 2, "maxItems": 2},
        ['[1, "a"]', '[-20,"b"]'],
        ["[]", "[1]", '["a", 1]', '[1, "c"]', '[1, "a", 2]'],
    ),
    "beginnings of arrays": (
        {"prefixItems": [{"type": "integer"}, {"type": "null"}], "items": {"type": "boolean"}, "type": "array",
         "minItems": 1},
        ["[1]", "[1, null]", "[1, null, true, false]"],
        ["[]", "[null]", "[1, true]", "[1, null, 2]"],
    ),
    "tuples in tuples": (
        {"prefixItems": [{"type": "integer"}, {"type": "array", "prefixItems": [{"type": "null"}], "items": False,
                                               "minItems": 1}],
         "type": "array", "items": False, "minItems": 2},
        ["[1, [null]]"],
        ["[]", "[1]", "[1, []]", "[1, [null], 2]", "[[null], 1]"],
    ),
    "discriminated": (
        {"type": "object", "required": ["kind"], "oneOf": [
            {"properties": {"kind": {"const": "a"}, "n": {"type": "integer"}}, "required": ["n"]},
            {"properties": {"kind": {"const": "b"}}}]},
        ['{"kind": "a", "n": 1}', '{"kind": "b"}'],
        ['{"kind": "a"}', '{"kind": "c"}', '{"kind":"b","n":1}'],
    ),
    "all of": (
        {"allOf": [{"properties": {"a": {"minimum": 1}}, "required": ["a"]},
                   {"properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "required": ["b"]}]},
        ['{"a": 1, "b": null}'],
        ['{"a": 0, "b": null}', '{"a": 1}', '{"a": 1.5, "b": null}'],
    ),
    "unknown": ({"type": "string", "format": "password", "x-order": 1, "uniqueItems": False}, ['"a"'], ["1"]),
    "other properties": (
        {"properties": {"a": {"const": 1}}, "required": ["b"], "patternProperties": {"^n_": {"type": "null"}}},
        ['{"b":2}', '{"a":1,"b":[],"n_x":null}'],
        ['{"a":1}', '{"a":2,"b":1}', '{"b":1,"n_x":2}'],
    ),
    "parts of an object": (
        {"properties": {"k": {}}, "oneOf": [{"properties": {"x": {"const": 1}}, "required": ["x"]},
                                            {"properties": {"y": {"const": 1}}, "required": ["y"]}]},
        ['{"k":1,"x":1}', '{"y":1}'],
        ['{"k":1}'],
    ),
    "elsewhere": (
        {"components": {"My Type": {"properties": {"a": {"enum": [1, True]}}}}, "$ref": "#/components/My%20Type"},
        ['{"a": 1}', '{"a": true}'],
        ['{"a": 2}', '{"b":1}'],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_grammar_allows_what_is_valid(matches: Matches, case: str) -> None:
    schema, valid, invalid = CASES[case]
    grammar = schema_grammar(schema, "schema.json")
    assert [text for text in valid if not matches(grammar, text)] == []
    assert [text for text in invalid if matches(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (False, "#: false allows nothing"),
        ([], "#: a schema is an object, true or false"),
        ({"properties": {"a": {"not": {}}}}, "#/properties/a: not is not supported"),
        ({"items": {"uniqueItems": True}}, "#/items: uniqueItems is not supported"),
        ({"type": "text"}, "Invalid type: text"),
        ({"properties": []}, "properties must be an object"),
        ({"required": [1]}, "required"),
        ({"allOf": [{"minimum": 1}, {"minimum": "x"}]}, "minimum"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum (3) is greater than maximum (2)"),
        ({"type": "integer", "minimum": 10**400}, "number out of range"),
        ({"type": "string", "enum": [1]}, "Unsatisfiable schema"),
        ({"$ref": "https://example.com/a"}, "https://example.com/a"),
        ({"$ref": "#/$defs/x"}, "Pointer '/$defs/x' does not exist"),
        ({"$ref": "#"}, "refers to itself without an end"),
        ({"anyOf": [{"$ref": "#/anyOf/1"}, {"$ref": "#/anyOf/0"}]}, "refers to itself without an end"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "refers to itself without an end"),
        ({"type": "array", "prefixItems": [{}, False], "items": False, "minItems": 2}, "allows nothing"),
        ({"prefixItems": [{"type": "null"}], "items": False, "minItems": 2}, "allows nothing"),
        ({"pattern": "(?=a)b"}, "look-around"),
        ({"pattern": "(a"}, "unclosed group"),
        ({"properties": {f"p{n}": {} for n in range(2_000)}}, "more than 1,500 properties"),
        ({"pattern": "^[" + "".join(map(chr, range(0x3400, 0xD000, 2))) * 2 + "]$"}, "more than 20,000 characters"),
        ({"$defs": {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(2_000)}, "$ref": "#/$defs/d0"},
         "references lead through more than 500 levels"),
        ({"allOf": [{"anyOf": [{"required": [f"p{m}_{n}"]} for n in range(6)]} for m in range(8)]}, "too large"),
    ],
    ids=range(24),
)  # fmt: skip
def test_what_a_grammar_cannot_enforce_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        schema_grammar(schema, "s.json")
    assert caught.value.message.startswith("s.json: ") and message in caught.value.message


def test_a_schema_that_is_nested_without_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(3_000):
        schema = {"items": schema}
    with pytest.raises(UsageError, match="nested too deeply"):
        schema_grammar(schema, "s.json")


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"^[A-Z]{2}-\d{3,4}$", ["AB-123", "AB-1234", "AB-12345", "ab-123", "AB-12"]),
        (r"^(foo|ba[rz])+x?$", ["foo", "barbazx", "fo", "foox", "xfoo", ""]),
        (r"b+", ["b", "abba", "a", ""]),
        (r"^\w+@\w+\.(com|org)$", ["a@b.com", "a_1@b.org", "a@b.net", "@b.com"]),
        (r'^[^a"]*$', ["", "xyz", "日本", "a", '"', "b\\\n"]),
        (r'^[^"\\]$', ["a", '"', "\\"]),
        (r'^.".$', ['x"y', '"""', '\\"\\', "x\ny", "ab"]),
        (r"^[\s\S]{2}$", ["\n\t", "é\\", "a"]),
        (r"^(?:a|)b\/\u00e9$", ["ab/é", "b/é", "a/é"]),
        ("", ["", "x"]),
    ],
)
def test_patterns_match_as_regular_expressions_do(matches: Matches, pattern: str, texts: list[str]) -> None:
    grammar = schema_grammar({"type": "string", "pattern": pattern}, "s.json")
    for text in texts:
        expected = re.search(pattern.replace("$", r"\Z"), text, re.ASCII) is not None
        assert matches(grammar, json.dumps(text, ensure_ascii=False)) == expected, text


HOSTILE = (
    {"type": "string", "pattern": "^(([a-z ]{0,40}){0,40}){0,40}$"},
    {"type": "string", "pattern": "^([a-z]{0,1000}){0,1000}$"},
    {"type": "string", "pattern": "^(.*a.{40})+$"},
    {"type": "string", "pattern": r"^(a|\w+|[a-f])*$"},
    {"allOf": [{"type": "string", "pattern": f"(a|b)*{letter}(a|b){{18}}"} for letter in "ab"]},
    {"type": "array", "items": {"type": "string", "minLength": 1000}, "minItems": 100_000},
    {"$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(25)} | {"d25": {}},
     "$ref": "#/$defs/d0"},
)  # fmt: skip


@pytest.mark.parametrize("schema", HOSTILE, ids=range(len(HOSTILE)))
def test_what_would_take_long_is_followed_or_given_up_soon(schema: Any) -> None:
    one = matcher(schema_grammar(schema, "s.json"))
    one.try_consume_tokens(list(b'"'))
    for _ in range(40):
        one.compute_bitmask()
        if one.is_error() or one.try_consume_tokens(list(b"a")) != 1:
            return


CHAIN = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(450)} | {"d450": {}}
"""Of which one more is known to end in each round."""


@pytest.mark.parametrize(
    "more",
    [{"properties": {"a": {"$ref": "#/$defs/d0"}}, "required": ["a"] * 100_000}, {"anyOf": [False] * 100_000}],
    ids=["required", "choices"],
)
def test_a_schema_of_too_many_references_and_alternatives_is_refused(more: Any) -> None:
    with pytest.raises(UsageError, match="too large for its references"):
        schema_grammar({"$ref": "#/$defs/d0", "$defs": CHAIN | {"z": more}}, "s.json")


def test_a_schema_below_a_long_name_is_refused() -> None:
    """The place of each is remembered."""
    with pytest.raises(UsageError, match="too large") as caught:
        schema_grammar({"properties": {"K" * 5_000: {"anyOf": [{}]}}}, "s.json")
    assert len(caught.value.message) < 300


def _words(n: int, letters: str, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(letters, k=draw.randint(3, 12))) for _ in range(n)]


WORDS = _words(5000, string.ascii_letters + " -", 1)


@pytest.mark.parametrize(
    ("form", "values"),
    [
        ("constants", WORDS),
        ("enum", _words(4000, "".join(map(chr, range(0x4E00, 0x8E00))), 2)),
        ("enum", list(map(str, range(5000)))),
    ],
    ids=["constants", "Chinese words", "numbers"],
)
def test_thousands_of_values_are_accepted(matches: Matches, values: list[str], form: str) -> None:
    schema = {"enum": values} if form == "enum" else {"oneOf": [{"const": one, "title": "one"} for one in values]}
    grammar = schema_grammar({"properties": {"a": schema}, "required": ["a"]}, "schema.json")
    for one in (values[0], values[-1]):
        assert matches(grammar, json.dumps({"a": one}, ensure_ascii=False)), one
        for other in (one + "x", one[:-1]):
            assert other in values or not matches(grammar, json.dumps({"a": other}, ensure_ascii=False)), other


def test_large_schemas_are_accepted(matches: Matches) -> None:
    fields = {f"field_{i}": {"type": "string", "maxLength": 50 + i} for i in range(200)}
    assert matches(schema_grammar({"properties": fields}, "schema.json"), '{"field_7":"x","field_199":"y"}')
