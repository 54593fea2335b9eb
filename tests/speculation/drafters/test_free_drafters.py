"""Tests what prompt lookup and suffix decoding have in common: a text that grows or is edited, and nothing to say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuchat.speculation.drafters.drafter import Drafter
from cpuchat.speculation.drafters.ngrams import NgramIndex, PromptLookup
from cpuchat.speculation.drafters.suffix import SuffixDecoding

both = pytest.mark.parametrize("kind", [PromptLookup, SuffixDecoding])
texts = st.lists(st.integers(0, 3), max_size=80)
Kind = Callable[[NgramIndex], Drafter]


def begun(kind: Kind, text: Sequence[int]) -> tuple[NgramIndex, Drafter]:
    index = NgramIndex()
    index.extend(text)
    return index, kind(index)


@both
@given(text=texts, more=st.lists(texts, max_size=4))
def test_appending_is_as_if_built_at_once(kind: Kind, text: list[int], more: list[list[int]]) -> None:
    index, drafter = begun(kind, text)
    for tokens in more:
        index.extend(tokens)
        text = text + tokens
        assert drafter.propose(8) == begun(kind, text)[1].propose(8)


@both
@given(shared=texts, a=texts, b=texts)
def test_an_edited_chat_is_as_if_built_at_once(kind: Kind, shared: list[int], a: list[int], b: list[int]) -> None:
    index, drafter = begun(kind, shared + a)
    index.set_text(shared + b)
    assert drafter.propose(8) == begun(kind, shared + b)[1].propose(8)


@both
@pytest.mark.parametrize("text", [[], [5], [5, 6], [1, 2, 3, 4, 5]])
def test_nothing_to_say(kind: Kind, text: list[int]) -> None:
    assert begun(kind, text)[1].propose(8).tokens == []
