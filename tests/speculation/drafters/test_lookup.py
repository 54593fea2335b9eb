"""Tests prompt lookup against a search through the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cpuchat.speculation.drafters.drafter import MAX_DEPTH, N_BUCKETS
from cpuchat.speculation.drafters.ngrams import SIZES, NgramIndex, PromptLookup

texts = st.lists(st.integers(0, 3), max_size=80)


def naive(text: list[int], n: int) -> list[int]:
    """Apply the algorithm as defined: longest indexed n-gram, latest occurrence, token by token."""
    for size in SIZES:
        for start in range(len(text) - size - 1, -1, -1):
            if text[start : start + size] == text[len(text) - size :]:
                copy = list(text)
                for i in range(n):
                    copy.append(copy[start + size + i])
                return copy[len(text) :]
    return []


def lookup(text: list[int]) -> PromptLookup:
    index = NgramIndex()
    index.extend(text)
    return PromptLookup(index)


@given(texts, st.integers(0, 12))
def test_copies_on_from_the_latest_occurrence_of_the_longest_n_gram(text, n):
    proposal = lookup(text).propose(n)
    assert proposal.drafter == "lookup"
    assert proposal.tokens == naive(text, n)


@given(texts, st.integers(0, 100))
def test_as_many_grades_as_tokens_and_no_more_than_asked_for(text, n):
    proposal = lookup(text).propose(n)
    assert len(proposal.buckets) == len(proposal.tokens) <= min(n, MAX_DEPTH)
    assert all(1 <= bucket < N_BUCKETS for bucket in proposal.buckets)
    assert proposal.buckets == sorted(proposal.buckets), "the match that a token continues only gets longer"
