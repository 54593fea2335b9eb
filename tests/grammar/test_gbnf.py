"""Tests what texts a grammar in GBNF allows, and what is said about one before a model is loaded."""

from __future__ import annotations

import pytest

from cpuchat.base.errors import UsageError
from cpuchat.grammar.gbnf import check_grammar
from tests.grammar.conftest import Matches, matcher

CASES = (
    ('root ::= "a"', ["a"], ["", "aa"]),
    ('\n# moves\r\nroot ::= move ("," move)* # to the end\r\nmove ::= [a-h] [1-8]\n\n', ["a1", "a1,h8"], ["a1,", "i1"]),
    ('root ::= (\n  "a"\n  | b\n)+ "\\n"\nb ::= "\\x41\\u00e9\\U0001F600\\"" | .\n', ["a\n", "é\n"], ["a"]),
    ('root ::= a{2} a{1,} a{0,3} [^\\]\\-a-z-]? |\n  "x"\na ::= "é" | "" "b"', ["ééé", "bbbA", "x"], ["éé", "bbb-"]),
    ('root ::= "a"{0,0} "b"{0002} [--a] [a-] [+-] [\\[-\\]] [\\t-z]', ["bb-a+[z", "bb.-+]\t"], ["abb-a+[z"]),
    ('r2 ::= "b"\nroot ::= r2 | root2\nroot2 ::= "" "c" root2 | ', ["", "b", "cc"], ["bb"]),
    ("root ::= ws \"x\" ws\nws ::= ( [ \\t] ws )?", ["x", " \tx  "], ["", "xx"]),
    # Texts that can be read in several ways, without recursion and with it.
    ('root ::= "ab" "x" | [a-z] "bc"', ["abx", "abc"], ["ab"]),
    ('root ::= [a-z]* "ab"? "c" root | "."', [".", "abc.", "xyzabcc."], ["b.", ""]),
    ('root ::= "x" | ws a\nws ::= [ ]*\na ::= ws root', ["x", "   x"], ["y"]),  # left-recursive
    ('root ::= [^\\U7FFFFFFF] "/" [/]', ["é//"], ["é/"]),
)  # fmt: skip
INVALID = (
    ("# nothing", "there is no rule named root"),
    ("my_rule ::= \"a\"", "line 1: expected ::= after my "),
    ('root ::= "a"\nb = "c"', "line 2: expected ::= after b"),
    ('root ::= a\n\nc ::= "c"', "line 1: there is no rule named a"),
    ('root ::= "a\n', "line 1: a text in quotes is not closed"),
    ("root ::= [a-z", "line 1: a class of characters is not closed"),
    ('root ::= "\\d"', "line 1: unknown escape \\d"),
    ('root ::= ("a"\n  "b"', "line 2: expected )"),
    ('root ::= "a")', "line 1: unexpected ')'"),
    ('root ::= "a"\n| "b"', "line 2: expected the name of a rule"),
    ('root ::= * "a"', "line 1: nothing before * to repeat"),
    ('root ::= "a"{x}', "line 1: expected {n}"),
    ('root ::= "a"{\u0663}', "expected {n}"),  # a digit, but not llama.cpp's
    ('root ::= "a"{1,' + " " * 300_000, "expected {n}"),
    ('root ::= "a"{3,2}', "{3,2} ends before it begins"),
    ('root ::= "a"{1,%s}' % ("9" * 5000), "more than 2000 repetitions"),
    ("root ::= <think>", "line 1: elements that name a token are not supported"),
    ('root ::= "a"\0', "a zero byte"),
    ('root ::= "a"\nb ::= [+x-\\x61]', "line 2: the range x-\\x61 ends before it begins"),
    ("root ::= [^] root", "an empty class"),
    ("root ::= [\\U7FFFFFFF]", "a class without a character of Unicode"),
    ('root ::= "\\uD800"', "not JSON serializable"),
)  # fmt: skip
TOO_MUCH = (
    ("root ::= " + "(" * 200, "nested too deeply"),
    ("".join(f'r{i} ::= r{i + 1} "x"\n' for i in range(200)) + 'r200 ::= "x"\nroot ::= r0', "more than 100 levels"),
    ("".join(f'r{i} ::= r{(i + 1) % 200} | "x"\n' for i in range(200)) + "root ::= r7", "more than 100 levels"),
    (
        "root ::= r0" + "".join(f"\nr{i} ::= r{i + 1} (r{i + 1}{{1,1}})" for i in range(45)) + '\nr45 ::= "x"',
        "a sequence of",
    ),
    ("root ::= r0" + "".join(f"\nr{i} ::= {f'r{i + 1} ' * 180}" for i in range(20)) + '\nr20 ::= "x"', "a sequence of"),
    ("root ::= " + "[a]" * 20_001, "more than 20,000 elements"),
    ("root ::= [^" + "".join(map(chr, range(0x3400, 0x5402, 2))) + "]", "more than 4,096 characters"),
)
HOSTILE = (
    "root ::= x{0,2000}\nx ::= [a-z ]{0,2000}", "root ::= x{0,2000}\nx ::= [a-z ]{0,2000} | root",
    "root ::= " + "x " * 24 + "\nx ::= [a-z]*",
    "root ::= r0\n" + "".join(f"r{i} ::= (r{i + 1} r{i + 1})?\n" for i in range(24)) + 'r24 ::= "x"',
    "root ::= r0\n" + "".join(f'r{i} ::= r{i + 1} "x" | r{i + 1} "y"\n' for i in range(40)) + 'r40 ::= "x"',
    'root ::= "a" root "x" | "a" root "y" | "b"', 'root ::= ("a" | [a-z] | [a-f])* | "b" root',
    "root ::= " + ('"' + "a" * 2000 + '"{2000} | ') * 2 + '"x"', "root ::= " + '"a"{0,2000} "b" ' * 200,
)  # fmt: skip


@pytest.mark.parametrize(("text", "allowed", "refused"), CASES)
def test_a_grammar_allows_what_llama_cpp_allows(
    matches: Matches, text: str, allowed: list[str], refused: list[str]
) -> None:
    check_grammar(text, "file")
    assert [one for one in allowed if not matches(text, one)] == []
    assert [one for one in refused if matches(text, one)] == []


@pytest.mark.parametrize(("text", "message"), [*INVALID, *TOO_MUCH])
def test_what_cannot_be_used_is_refused_with_the_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_grammar(text, "a.gbnf")
    assert caught.value.message.startswith("a.gbnf") and message in caught.value.message


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_what_can_be_read_in_many_ways_is_followed_or_given_up_soon(text: str) -> None:
    check_grammar(text, "a.gbnf")
    one = matcher(text)
    for _ in range(40):
        one.compute_bitmask()
        if one.is_error() or one.is_stopped() or one.try_consume_tokens(list(b"a")) + one.try_consume_tokens([120]) < 1:
            return
