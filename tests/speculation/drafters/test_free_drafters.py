"""Tests what prompt lookup and suffix decoding have in common: a text that grows or is edited, and nothing to say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuchat.speculation.drafters.lookup import PromptLookup
from cpuchat.speculation.drafters.suffix import SuffixDecoding

FreeDrafter = PromptLookup | SuffixDecoding
both = pytest.mark.parametrize("kind", [PromptLookup, SuffixDecoding])
texts = st.lists(st.integers(0, 3), max_size=80)


def begun(kind: type[FreeDrafter], text: list[int]) -> FreeDrafter:
    drafter = kind()
    drafter.begin_answer(text)
    return drafter


@both
@given(text=texts, more=st.lists(texts, max_size=4))
def test_appending_is_as_if_built_at_once(kind: type[FreeDrafter], text: list[int], more: list[list[int]]) -> None:
    drafter = begun(kind, text)
    for tokens in more:
        drafter.append(tokens)
        text = text + tokens
        assert drafter.propose(8) == begun(kind, text).propose(8)


@both
@given(shared=texts, a=texts, b=texts)
def test_an_edited_chat_is_as_if_built_at_once(
    kind: type[FreeDrafter], shared: list[int], a: list[int], b: list[int]
) -> None:
    drafter = begun(kind, shared + a)
    drafter.begin_answer(shared + b)
    assert drafter.propose(8) == begun(kind, shared + b).propose(8)


@both
@pytest.mark.parametrize("text", [[], [5], [5, 6], [1, 2, 3, 4, 5]])
def test_nothing_to_say(kind: type[FreeDrafter], text: list[int]) -> None:
    assert begun(kind, text).propose(8).tokens == []
