"""Tests suffix decoding against a search through the text."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuchat.speculation.drafters.drafter import MAX_DEPTH, N_BUCKETS
from cpuchat.speculation.drafters.suffix import MAX_CANDIDATES, NOWHERE, SIZES, NgramIndex, SuffixDecoding

texts = st.lists(st.integers(0, 3), max_size=80)


def suffix(text: list[int]) -> SuffixDecoding:
    index = NgramIndex()
    index.extend(text)
    return SuffixDecoding(index)


def continuations(text: list[int], size: int, n: int) -> list[list[int]]:
    """Return the `n` tokens after every earlier occurrence of the last `size`, latest first; past the end
    they repeat."""
    found = []
    for start in range(len(text) - size - 1, -1, -1):
        if text[start : start + size] == text[len(text) - size :]:
            copy = list(text)
            for i in range(n):
                copy.append(copy[start + size + i])
            found.append(copy[len(text) :])
    return found


def most_frequent(ways: list[list[int]]) -> list[int]:
    """Return the most frequent next token, the latest on a tie, and what all that continue with it have in common."""
    counts = Counter(way[0] for way in ways)
    token = max(counts, key=lambda token: counts[token])
    ways = [way for way in ways if way[0] == token]
    agreed = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*ways, strict=True))
    return [tokens[0] for tokens in agreed]


@given(texts, st.integers(1, 12))
def test_a_proposal_is_the_most_frequent_way_on_from_one_of_the_matches(text, n):
    index = NgramIndex()
    index.extend(text)
    tokens = SuffixDecoding(index).propose(n).tokens
    assert len(tokens) <= n
    paths = [most_frequent(ways[:MAX_CANDIDATES]) for size in SIZES if (ways := continuations(text, size, n))]
    is_copy = bool(text) and index.source[-1] != NOWHERE
    assert is_copy or not tokens or any(path[: len(tokens)] == tokens for path in paths)
    # A match that was always followed by the same token is not passed over in silence.
    if any(len({way[0] for way in continuations(text, size, 1)}) == 1 for size in SIZES):
        assert tokens


@given(st.lists(st.integers(0, 1000), min_size=40, max_size=80, unique=True), st.integers(8, 28), st.integers(1, 12))
def test_a_copy_continues_as_its_source(text, length, n):
    assert suffix([*text, 2000, *text[:length]]).propose(n).tokens == text[length : length + n]


SOURCE = list(range(100, 140))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([*SOURCE[:10], 7], SOURCE[11:15]),  # perhaps a replacement
        ([*SOURCE[:10], 7, 111], SOURCE[12:16]),  # it was one
        ([*SOURCE[:10], 7, 8, 9, 110, 111], SOURCE[12:16]),  # an insertion
        ([*SOURCE[:10], 114, 115], SOURCE[16:20]),  # a part was left out
        ([*SOURCE[:10], 7, 111, 112, 113, 8, 115], SOURCE[16:20]),  # two changes close to each other
    ],
)
def test_a_copy_goes_on_behind_a_change(written, expected):
    assert suffix([*SOURCE, 1, 2, 3, *written]).propose(4).tokens == expected


@pytest.mark.parametrize("old", [[5], [5, 6]])
@pytest.mark.parametrize("new", [[7], [7, 8, 9]])
def test_what_was_replaced_once_is_replaced_again(old, new):
    before, after = SOURCE[:10], SOURCE[10:20]
    text = [*before, *old, *after, *old, *SOURCE[20:30], 1, 2, 3]
    copy = [*before, *new, *after]
    assert suffix([*text, *copy]).propose(8).tokens[: len(new) + 2] == [*new, *SOURCE[20:22]]
    # Where it stays, it is taken for unchanged from then on.
    again = [*text, *copy, *old, *SOURCE[20:30], 4, *after]
    assert suffix(again).propose(len(old)).tokens == old


@given(texts, st.integers(0, 100))
def test_as_many_grades_as_tokens(text, n):
    proposal = suffix(text).propose(n)
    assert proposal.drafter == "suffix"
    assert len(proposal.buckets) == len(proposal.tokens) <= min(n, MAX_DEPTH)
    assert all(1 <= given < N_BUCKETS for given in proposal.buckets)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=20, unique=True), st.integers(1, 31))
def test_periodic_text_goes_on_with_its_period(period, n):
    drafter = suffix(period * 40)
    assert drafter.propose(n).tokens == [period[i % len(period)] for i in range(n)]


@pytest.mark.parametrize("text", [[], [5], [5, 6], [1, 2, 3, 4, 5]])
def test_nothing_to_say(text):
    assert suffix(text).propose(8).tokens == []


JUST_NOW = [5, 6, 7, 8, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # the more frequent continuation wins against the latest
        ([1, 2, 3, 10, 1, 2, 3, 11, 1, 2, 3, 12, 1, 2, 4, 13, 1, 2], 3),
        # the longer match against the frequent one: after "2 3" alone mostly 9 came, after all of this 4
        ([*JUST_NOW, 4, 4, 4, *[2, 3, 9] * 3, *JUST_NOW], 4),
        # an ambiguous long match gives way: "0 1 2" was followed by 3, 4 and 5; "1 2" by 8, very often
        ([0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 5, *[1, 2, 8, 8] * 12, 0, 1, 2], 8),
    ],
)
def test_which_match_decides(text, expected):
    assert suffix(text).propose(1).tokens == [expected]
