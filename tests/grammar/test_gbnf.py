"""Tests what is said about a grammar before a model is loaded, against llama.cpp's own parser."""

from __future__ import annotations

import pytest

from cpuchat.base.errors import UsageError
from cpuchat.engine.decoding.guided import Grammar
from cpuchat.engine.llama.vocab import Vocab
from cpuchat.grammar.gbnf import check_grammar

VALID = (
    'root ::= "a"',
    '\n# moves\r\nroot ::= move ("," move)* # to the end\r\nmove ::= [a-h] [1-8]\n\n',
    'root ::= (\n  "a"\n  | b\n)+ "\\n"\nb ::= "\\x41\\u00e9\\U0001F600\\"" | .\n',
    'root ::= a{2} a{1,} a{0,3} [^\\]\\-a-z-]? |\n  "x"\na ::= "é" | "" "b"',
    'root ::= ws "x" ws\nws ::= ( [ \\t] ws )?',
    'root ::= "a"{0,0} "b"{0002} [--a] [a-] [+-] [\\[-\\]] [\\t-z]',
    'r2 ::= "b"\nroot ::= r2 | root2\nroot2 ::= "" "c" root2 | ',
)

INVALID = (
    ("# nothing", "there is no rule named root"),
    ('start ::= "a"', "there is no rule named root"),
    ('root ::= "a"\nb = "c"', "line 2: expected ::= after b"),
    ('my_rule ::= "a"', "line 1: expected ::= after my "),
    ('root ::= a\n\nc ::= "c"', "line 1: there is no rule named a"),
    ('root ::= "a\n', "line 1: a text in quotes is not closed"),
    ("root ::= [a-z", "line 1: a class of characters is not closed"),
    ('root ::= "\\d"', "line 1: unknown escape \\d"),
    ('root ::= "\\x4"', "line 1: unknown escape \\x"),
    ('root ::= ("a"\n  "b"', "line 2: expected )"),
    ('root ::= "a")', "line 1: unexpected ')'"),
    ('root ::= "a"\n| "b"', "line 2: expected the name of a rule"),
    ('root ::= * "a"', "line 1: nothing before * to repeat"),
    ('root ::= "a"{x}', "line 1: expected {n}"),
    ('root ::= "a"{2001}', "line 1: more than 2000 repetitions"),
)


@pytest.mark.parametrize("text", VALID)
def test_what_llama_cpp_accepts_is_accepted(vocab: Vocab, text: str) -> None:
    check_grammar(text, "file")
    Grammar(vocab, text)


@pytest.mark.parametrize(("text", "message"), INVALID)
def test_what_llama_cpp_rejects_is_rejected_with_the_line(vocab: Vocab, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_grammar(text, "a.gbnf")
    assert caught.value.message.startswith("a.gbnf") and message in caught.value.message
    with pytest.raises(UsageError, match="rejected the grammar"):
        Grammar(vocab, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("root ::= <think>", "line 1: elements that name a token are not supported"),
        ('root ::= "x" | ws a\nws ::= [ ]*\na ::= ws root', "is left-recursive"),
        ("root ::= " + "(" * 200, "nested too deeply"),
        ('root ::= "a"\0', "a zero byte"),
        ('root ::= "a"{3,2}', "{3,2} ends before it begins"),
        ('root ::= "a"{%s}' % ("9" * 5000), "more than 2000 repetitions"),
        ('root ::= "a"{1,%s}' % ("9" * 5000), "more than 2000 repetitions"),
        ('root ::= "a"{\u0663}', "expected {n}"),  # a digit, but not llama.cpp's
        ('root ::= "a"{1,' + " " * 300_000, "expected {n}"),
        ('root ::= "a"\nb ::= [+x-\\x61]', "line 2: the range x-\\x61 ends before it begins"),
        ("root ::= [\\]-\\[]", "the range \\]-\\[ ends before it begins"),
        ("root ::= []", "an empty class"),
        ("root ::= [^] root", "an empty class"),
    ],
)
def test_what_could_end_badly_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_grammar(text, "a.gbnf")
    assert message in caught.value.message
