"""Provides llguidance's judgment of a text, byte by byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from llguidance import LLMatcher, LLTokenizer

from cpuchat.grammar.gbnf import gbnf_to_lark
from cpuchat.grammar.limits import parser_limits

Matches = Callable[[str, str], bool]


class Bytes:
    """A vocabulary of bytes: the token of a byte is its value."""

    tokens = (*(bytes([byte]) for byte in range(256)), b"\xffend")
    eos_token_id, special_token_ids = 256, (256,)
    bos_token_id, is_tokenizer_wrapper = None, True

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


VOCABULARY = LLTokenizer(Bytes(), slices=[])  # type: ignore[arg-type]


def matcher(grammar: str) -> LLMatcher:
    """Return a matcher of a grammar, as `Generate` has it or in Lark."""
    text = grammar if grammar.startswith(("{", "start: ")) else gbnf_to_lark(grammar, "test")
    found = LLMatcher(VOCABULARY, text, log_level=0, limits=parser_limits())
    assert not found.is_error(), found.get_error()
    return found


@pytest.fixture
def matches() -> Matches:
    """Return whether a grammar allows a text."""

    def _matches(grammar: str, text: str) -> bool:
        one = matcher(grammar)
        return one.try_consume_tokens(list(text.encode())) == len(text.encode()) and one.is_accepting()

    return _matches
