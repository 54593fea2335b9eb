"""Tests that grammars which llama.cpp could not follow are refused, and large ones that it can are not."""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Callable
from typing import Any

import pytest

from cpuchat.base.errors import AmbiguousGrammar, UsageError
from cpuchat.grammar.gbnf import LAST, Ranges, check_grammar, without
from cpuchat.grammar.schema import schema_grammar

_N = 24
_CLASS = "".join(map(chr, range(0x3400, 0xD000, 2)))
HOSTILE = {
    "nested repetitions": "root ::= x{0,2000}\nx ::= [a-z ]{0,2000}",
    "rules that may be empty": "root ::= " + "x " * _N + "\nx ::= [a-z]*",
    "a chain of them": "root ::= r0\n"
    + "".join(f"r{i} ::= (r{i + 1} r{i + 1})?\n" for i in range(_N))
    + f'r{_N} ::= "x"',
    "rules entered twice": "root ::= r0\n"
    + "".join(f'r{i} ::= r{i + 1} "x" | r{i + 1} "y"\n' for i in range(_N))
    + f'r{_N} ::= "x"',
    "ways that part for ever": 'root ::= "a" root "x" | "a" root "y" | "b"',
    "ways that meet again": 'root ::= ("a" | [a-z] | [a-f])*',
    "behind a beginning": 'root ::= "{" x "}"\nx ::= y\ny ::= ("a" | [a-z] | [a-f])*',
    "a long text repeated": "root ::= " + ('"' + "a" * 2000 + '"{2000} | ') * 2 + '"x"',
    "many repetitions": "root ::= " + '"a"{0,2000} "b" ' * 200,
    "a chain of references": "".join(f'r{i} ::= r{i + 1} "x"\n' for i in range(20_000)) + 'r20000 ::= "x"\nroot ::= r0',
    "very many elements": "root ::= " + "[a]" * 100_001,
    "a class of single characters": f"root ::= [^{_CLASS}]",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_llama_cpp_could_not_follow_is_refused(case: str) -> None:
    with pytest.raises(AmbiguousGrammar) as caught:
        check_grammar(HOSTILE[case], "a.gbnf")
    assert caught.value.message.startswith("a.gbnf") and caught.value.hint


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(([a-z ]{0,40}){0,40}){0,40}$"},
        {"type": "string", "pattern": "^" + "[a-z]*" * _N + "$"},
        {"type": "string", "pattern": r"^(a|\w+|[a-f])*$"},
        {"properties": {"name": {"pattern": f"^[^{_CLASS}]$"}}},
    ],
)
def test_so_is_the_same_in_a_schema(schema: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        schema_grammar(schema, "schema.json")
    assert "refers to itself" not in caught.value.message


def test_values_are_told_apart_where_they_differ(matches: Callable[[str, str], bool]) -> None:
    values = ["", "a", "ab", "abc", "b", 'q"', "é", "ê", 1, 12, -1, 1.5, True, None, {"a": [1]}, {"a": [12]}, "abc"]
    grammar = schema_grammar({"enum": values}, "schema.json")
    for text in ('""', '"a"', '"ab"', '"abc"', '"b"', r'"q\""', '"é"', '"ê"', "1", "12", "-1", "1.5", "true", "null"):
        assert matches(grammar, text), text
    assert matches(grammar, '{"a": [1]}') and matches(grammar, '{"a": [12]}')
    for text in ('"', '"c"', '"abcd"', "2", "13", "-", "false", '"è"', '{"a": [2]}', "1.", ""):
        assert not matches(grammar, text), text


def _words(n: int, letters: str, seed: int) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(letters, k=draw.randint(3, 12))) for _ in range(n)]


WORDS = _words(5000, string.ascii_letters + " -", 1)


@pytest.mark.parametrize(
    ("form", "values"),
    [
        ("enum", WORDS),
        ("constants", WORDS),
        ("enum", _words(4000, "".join(map(chr, range(0x4E00, 0x8E00))), 2)),
        ("enum", [chr(0x4E00 + i) for i in range(5000)]),  # more than the ways that llama.cpp may follow
        ("enum", list(map(str, range(5000)))),
    ],
    ids=["words", "constants", "Chinese words", "characters", "numbers"],
)
def test_thousands_of_values_are_accepted(matches: Callable[[str, str], bool], values: list[str], form: str) -> None:
    schema = {"enum": values} if form == "enum" else {"oneOf": [{"const": one, "title": "one"} for one in values]}
    grammar = schema_grammar({"properties": {"a": schema}, "required": ["a"]}, "schema.json")
    assert len(grammar) < 5 * len(json.dumps(values, ensure_ascii=False).encode()) + 2000
    for one in (values[0], values[-1]):
        assert matches(grammar, json.dumps({"a": one}, ensure_ascii=False)), one
        assert one + "x" in values or not matches(grammar, json.dumps({"a": one + "x"}, ensure_ascii=False)), one
        assert one[:-1] in values or not matches(grammar, json.dumps({"a": one[:-1]}, ensure_ascii=False)), one


def test_the_grammar_of_many_values_grows_with_their_number() -> None:
    values = _words(4000, string.ascii_letters, 3)
    sizes = [len(schema_grammar({"enum": values[:n]}, "schema.json")) for n in (1000, 4000)]
    assert sizes[1] < 4.8 * sizes[0]


def test_values_that_all_begin_differently_are_refused_where_llama_cpp_could_not_follow_them() -> None:
    values = [f"{chr(0x4E00 + i)}{i}" for i in range(5000)]
    with pytest.raises(UsageError, match=r"#/properties/a: more than 4,096 values go on differently"):
        schema_grammar({"properties": {"a": {"enum": values}}}, "schema.json")


def test_what_follows_many_values_is_checked_too() -> None:
    values, bad = _words(5_000, string.ascii_letters, 4), {"pattern": r"^(a|\w+|[a-f])*$"}
    with pytest.raises(AmbiguousGrammar):
        schema_grammar({"properties": {"a": {"enum": values}, "b": bad}, "required": ["a", "b"]}, "schema.json")


def test_large_schemas_are_accepted(matches: Callable[[str, str], bool]) -> None:
    fields = {f"field_{i}": {"type": "string", "maxLength": 50 + i} for i in range(200)}
    assert matches(schema_grammar({"properties": fields}, "schema.json"), '{"field_7":"x","field_199":"y"}')
    values = [f"value {i}" for i in range(12_000)]
    merged = {"allOf": [{"enum": values[:8000]}, {"enum": values[4000:]}], "enum": [*values, 1, True]}
    grammar = schema_grammar(merged, "schema.json")
    assert matches(grammar, '"value 4321"') and not matches(grammar, '"value 999"') and not matches(grammar, "1")


def test_values_that_python_takes_for_equal_are_not() -> None:
    merged = {"enum": [1, True, [1], "a", {"b": 0}], "allOf": [{"enum": [1.0, [True], {"b": False}]}]}
    assert schema_grammar(merged, "schema.json").startswith('root ::= "1"\n')


def test_code_points_without_others() -> None:
    for ranges, others in (
        ([(0, LAST)], [(5, 5), (0, 1), (3, 4)]),
        ([(5, 9), (1, 3), (2, 6), (20, 30)], [(6, 6), (25, 40)]),
        ([(1, 2)], [(0, LAST)]),
        ([(1, 1)], []),
    ):
        left: Ranges = without(ranges, others)
        for code in range(50):
            wanted = any(a <= code <= b for a, b in ranges) and not any(a <= code <= b for a, b in others)
            assert any(a <= code <= b for a, b in left) == wanted, (ranges, others, code)


def test_the_message_names_the_rule() -> None:
    with pytest.raises(AmbiguousGrammar, match=re.escape("a.gbnf: the rule x can match one text in too many ways.")):
        check_grammar('root ::= "(" x ")"\nx ::= ("a" | [a-z] | [a-f])*', "a.gbnf")
