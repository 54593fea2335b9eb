"""Tests prompt lookup against a search through the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cpuchat.speculation.drafters.drafter import MAX_DEPTH, N_BUCKETS
from cpuchat.speculation.drafters.ngrams import MAX_MATCH, SIZES, NgramIndex, PromptLookup

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


def test_a_longer_match_has_a_higher_grade():
    text = list(range(100, 160))
    buckets = [lookup([*text, 7, *text[10 : 10 + match]]).propose(1).buckets[0] for match in range(2, 45)]
    assert buckets == sorted(buckets)
    assert buckets[0] == 1
    assert buckets[MAX_MATCH - 2] == buckets[-1] == N_BUCKETS - 1
    assert set(buckets) == set(range(1, N_BUCKETS))
