"""Tests that a schema's grammar, as llama.cpp reads it, allows valid JSON and nothing else."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from cpuchat.base.errors import UsageError
from cpuchat.grammar.rules import NumberBounds, Rules, numbers, pattern_expression
from cpuchat.grammar.schema import schema_grammar
from tests.grammar.conftest import Matches

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
    "optional": (
        {"properties": {"a": {"const": 1}, "b": {"const": 2}}},
        ["{}", '{"a":1}', '{"b":2}', '{"a":1,"b":2}'],
        ['{"b":2,"a":1}', '{"a":1,}', '{"a":1,"a":1}'],
    ),
    "no properties": ({"type": "object", "additionalProperties": False}, ["{}"], ['{"a":1}']),
    "map": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        ["{}", '{"a": 1, "é": 2}'],
        ['{"a": "1"}', '{"a"}'],
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
    "tuple": (
        {"prefixItems": [{"type": "integer"}, {"type": "string"}], "items": {"type": "null"}, "maxItems": 3},
        ['[1, "a"]', '[1,"a",null]'],
        ["[1]", '[1,"a",2]', '[1,"a",null,null]'],
    ),
    "long array": (
        {"maxItems": 2001, "items": {"pattern": "^([a-z]{1,900}x?)*$"}},
        ["[" + ", ".join(['"ab"'] * 2001) + "]", "[]"],
        ["[" + ", ".join(['"ab"'] * 2002) + "]"],
    ),
    "empty array": ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
    "union": ({"type": ["string", "null"], "minLength": 2}, ['"ab"', "null"], ['"a"', "1"]),
    "alternatives": (
        {"anyOf": [{"type": "integer", "minimum": 5}, {"enum": ["x"]}], "description": "either"},
        ["5", '"x"'],
        ["4", '"y"'],
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
    "one of all": ({"$defs": {"n": {"type": "null"}}, "allOf": [{"$ref": "#/$defs/n"}], "default": 1}, ["null"], ["1"]),
    "enum of a type": ({"type": "string", "enum": ["a", 1, "b"]}, ['"a"', '"b"'], ["1", '"c"']),
    "lengths": (
        {"type": "string", "minLength": 1, "maxLength": 3},
        ['"a"', '"日本é"', '"\\n\\u0041x"'],
        ['""', '"abcd"', '"a\nb"'],
    ),
    "long": ({"maxLength": 4500}, ['"' + "x" * 4500 + '"', '""'], ['"' + "x" * 4501 + '"']),
    "dates": ({"type": "string", "format": "date-time"}, ['"2026-02-28T23:59:00Z"'], ['"2026-13-01T00:00:00Z"', '"x"']),
    "uuid": ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"123e4567"']),
    "format without a rule": ({"type": "string", "format": "email"}, ['"a@b.c"'], ["1"]),
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
        ({"properties": {"a": {"multipleOf": 3}}}, "#/properties/a: multipleOf is not supported"),
        ({"items": {"uniqueItems": True}}, "#/items: uniqueItems is not supported"),
        ({"type": "text"}, "#: unknown type 'text'"),
        ({"properties": []}, "#: properties must be an object"),
        ({"type": [{}]}, "#: type must be a list of strings"),
        ({"prefixItems": {}}, "#: prefixItems must be a list"),
        ({"allOf": [{"minimum": 1}, {"minimum": "x"}]}, "#/allOf/1: minimum must be a number"),
        ({"required": [1]}, "#: required must be a list of strings"),
        ({"minLength": -1}, "#: minLength must be 0 or a positive integer"),
        ({"minItems": 3, "maxItems": 2}, "#: minItems is more than maxItems"),
        ({"type": "number", "minimum": 0.5}, "#: minimum 0.5 is not an integer"),
        ({"type": "integer", "minimum": "1"}, "#: minimum must be a number"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "#: there is no number within these bounds"),
        ({"type": "string", "enum": [1]}, "#: no value of enum, const and type is left"),
        ({"anyOf": []}, "#: it has no alternatives"),
        ({"$ref": "https://example.com/a"}, "does not lead to a place in this file"),
        ({"$ref": "#/$defs/x"}, "$ref '#/$defs/x' leads nowhere"),
        (
            {
                "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(25)} | {"d25": True},
                "$ref": "#/$defs/d0",
                "type": "object",
            },
            "too large",
        ),
        ({"$ref": "#"}, "nested too deeply, or refers to itself"),
        ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "refers to itself without an end"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no value has the types string and null"),
        ({"allOf": [{"format": "date"}, {"format": "time"}]}, "schemas with a different format cannot be combined"),
        ({"pattern": "(?=a)b"}, "the pattern (?=a)b has a lookaround"),
        ({"pattern": "(a"}, "is not a regular expression"),
        ({"pattern": "a", "maxLength": 3}, "pattern cannot be combined with minLength or maxLength"),
    ],
)
def test_what_a_grammar_cannot_enforce_is_refused_with_its_place(schema: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        schema_grammar(schema, "s.json")
    assert caught.value.message.startswith("s.json: ") and message in caught.value.message


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        (r"^[A-Z]{2}-\d{3,4}$", ["AB-123", "AB-1234", "AB-12345", "ab-123", "AB-12"]),
        (r"^(foo|ba[rz])+x?$", ["foo", "barbazx", "fo", "foox", "xfoo", ""]),
        (r"b+", ["b", "abba", "a", ""]),
        (r"^\w+@\w+\.(com|org)$", ["a@b.com", "a_1@b.org", "a@b.net", "@b.com"]),
        (r'^[^a"]*$', ["", "xyz", "日本", "a", '"', "b\\\n"]),
        (r'^.".$', ['x"y', '"""', '\\"\\', "x\ny", "ab"]),
        (r"^[\s\S]{2}$", ["\n\t", "é\\", "a"]),
        (r"^\S+$", ["abc", "a b", "é"]),
        (r"^(?:a|)b\/\u00e9$", ["ab/é", "b/é", "a/é"]),
        ("", ["", "x"]),
    ],
)
def test_patterns_match_as_regular_expressions_do(matches: Matches, pattern: str, texts: list[str]) -> None:
    rules = Rules()
    rules.define("root", "")
    rules.define("root", f'"\\"" {pattern_expression(pattern, rules, "p")} "\\""')
    for text in texts:
        expected = re.search(pattern.replace("$", r"\Z"), text, re.ASCII) is not None
        assert matches(rules.text(), json.dumps(text, ensure_ascii=False)) == expected, text


def test_numbers_within_bounds(matches: Matches) -> None:
    draw = random.Random(5)
    ends = [None, *range(-12, 13), -1000, -101, -99, 95, 100, 999, 1234]
    tried = sorted({*range(-130, 131), -1234, -1000, -999, 998, 999, 1000, 1001, 1233, 1234, 1235, 10**9})
    for _ in range(60):
        low, high = draw.choice(ends), draw.choice(ends)
        if low is not None and high is not None and low > high:
            low, high = high, low
        bounds = NumberBounds(low, high, draw.random() < 0.3, draw.random() < 0.3)
        for whole in (True, False):
            texts = [str(n) for n in draw.sample(tried, 25)]
            if not whole:
                texts += [f"{text}.{draw.choice(('0', '5', '07'))}" for text in texts] + ["-0.5", "0.5"]
            try:
                body = numbers(bounds, whole=whole)
            except ValueError:
                assert not any(_within(text, bounds) for text in texts)
                continue
            for text in texts:
                if text.startswith("-0") and float(text) == 0:
                    continue  # valid, but not written
                assert matches(f"root ::= {body}", text) == _within(text, bounds), (bounds, whole, text, body)


def _within(text: str, bounds: NumberBounds) -> bool:
    n = float(text)
    above = bounds.low is None or n > bounds.low or (n == bounds.low and not bounds.low_open)
    return above and (bounds.high is None or n < bounds.high or (n == bounds.high and not bounds.high_open))
